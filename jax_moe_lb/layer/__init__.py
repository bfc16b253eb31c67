"""The executor `moe`, its parameters and state; `jax_moe_lb.systems` contains the systems for its configuration."""

from jax_moe_lb.layer import systems
from jax_moe_lb.layer.moe import CHECKPOINT_NAMES, MoEParams, MoEState, moe

__all__ = [
    "CHECKPOINT_NAMES",
    "moe",
    "MoEParams",
    "MoEState",
    "systems",
]


def __dir__() -> list[str]:
    return __all__
