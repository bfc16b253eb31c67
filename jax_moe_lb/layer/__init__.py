"""The executor `moe` and the systems that configure it."""

from jax_moe_lb.layer.moe import CHECKPOINT_NAMES, moe
from jax_moe_lb.layer.systems import (
    System,
    eplb,
    eplb_plus,
    exact,
    fastermoe,
    feplb,
    greedy,
    hybridep,
    lplb,
    plain,
    rails,
    two_tier,
    ultraep,
)

__all__ = [
    "CHECKPOINT_NAMES",
    "eplb",
    "eplb_plus",
    "exact",
    "fastermoe",
    "feplb",
    "greedy",
    "hybridep",
    "lplb",
    "moe",
    "plain",
    "rails",
    "System",
    "two_tier",
    "ultraep",
]


def __dir__() -> list[str]:
    return __all__
