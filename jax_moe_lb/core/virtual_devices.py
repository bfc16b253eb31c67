"""Virtual CPU devices for tests and experiments."""

import os

import jax

from jax_moe_lb.core.checks import check_integer

SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def use_virtual_cpu_devices(num_devices: int) -> None:
    """Configure the CPU backend with `num_devices` devices sharing its cores.

    Call it before the first JAX computation, to run a layer of several ranks on one machine. The devices are slow: use
    accelerators or one process per machine for performance.

    It also sets `--xla_cpu_enable_concurrency_optimized_scheduler=false`, unless `XLA_FLAGS` already contains this
    flag. With that scheduler, independent collectives of one device wait in several threads of a pool with one thread
    per device. If no thread is left for a device, a program of large arrays hangs. With jaxlib 0.12.0.1, a layer of 8 x
    4096 tokens hung within 20 steps; without the scheduler it ran 40 steps.

    Args:
        num_devices: number of CPU devices, usually 8 for tests.

    Raises:
        RuntimeError: the backend is already initialized.
        ValueError: `num_devices` is below 1.

    Examples:
        Before the first JAX computation:

        >>> import jax
        >>> from jax_moe_lb import use_virtual_cpu_devices
        >>> use_virtual_cpu_devices(8)  # doctest: +SKIP
        >>> len(jax.devices("cpu"))  # doctest: +SKIP
        8
    """
    check_integer("num_devices", num_devices)
    # jax.config has no option for this flag. XLA reads the variable when the backend starts.
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER_FLAG}=false".strip()
    jax.config.update("jax_num_cpu_devices", num_devices)
