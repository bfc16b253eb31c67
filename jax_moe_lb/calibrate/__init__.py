"""Measurement of the rates of this machine, for the simulator."""

from jax_moe_lb.calibrate.measure import benchmark_seconds

__all__ = [
    "benchmark_seconds",
]


def __dir__() -> list[str]:
    return __all__
