"""`use_virtual_cpu_devices` makes several devices out of one CPU, for tests and for trying things out."""

import os

import jax

SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def use_virtual_cpu_devices(num_devices: int) -> None:
    """Makes the CPU backend offer `num_devices` devices that share its cores.

    Call it before anything computes, to try a layer of several ranks on one machine. For work that has to be fast use
    accelerators, or one process per machine.

    It also turns off the CPU backend's concurrency-optimised schedule, unless `XLA_FLAGS` already says something about
    it. With that schedule independent collectives of one device wait in several threads of a pool that has one thread
    per device; as soon as a device finds no thread left, a program of large arrays hangs (jaxlib 0.12.0.1: a layer of
    8 x 4096 tokens within 20 steps; never in 40 steps without it).

    Args:
        num_devices: devices to offer, usually 8 for tests.

    Raises:
        RuntimeError: the backend is already up.

    Examples:
        Before JAX has computed anything:

        >>> import jax
        >>> from jax_moe_lb import use_virtual_cpu_devices
        >>> use_virtual_cpu_devices(8)  # doctest: +SKIP
        >>> len(jax.devices("cpu"))  # doctest: +SKIP
        8
    """
    # The flag has no option in jax.config, and XLA reads the variable when the backend starts.
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER_FLAG}=false".strip()
    jax.config.update("jax_num_cpu_devices", num_devices)
