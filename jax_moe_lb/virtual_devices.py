"""Several devices out of one CPU, for tests and for trying things out."""

import os

import jax

SCHEDULER_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


def use_virtual_cpu_devices(num_devices: int) -> None:
    """Makes the CPU backend offer `num_devices` devices that share its cores.

    Call it before anything computes. Elsewhere use accelerators, or one process per machine.

    It also turns off the CPU backend's concurrency-optimised schedule, unless `XLA_FLAGS`
    already says something about it. With that schedule independent collectives of one
    device wait in several threads of a pool that has one thread per device; as soon as a
    device finds no thread left, a program of large arrays hangs (jaxlib 0.12.0.1: a layer
    of 8 x 4096 tokens within 20 steps; never in 40 steps without it).

    Raises:
        RuntimeError: the backend is already up.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if SCHEDULER_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{SCHEDULER_FLAG}=false".strip()
    jax.config.update("jax_num_cpu_devices", num_devices)
