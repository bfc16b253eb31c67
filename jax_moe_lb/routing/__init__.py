"""Routers and router losses."""

from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.more_routers import ExpertChoice, HashRouter, NoisyTopK
from jax_moe_lb.routing.routers import (
    ForceBalanced,
    GroupLimit,
    Router,
    RouterFunction,
    Routing,
    TokenInfo,
    TopK,
    updated_bias,
)

__all__ = [
    "ExpertChoice",
    "ForceBalanced",
    "GroupLimit",
    "HashRouter",
    "Losses",
    "NoisyTopK",
    "Router",
    "RouterFunction",
    "Routing",
    "TokenInfo",
    "TopK",
    "updated_bias",
]


def __dir__() -> list[str]:
    return __all__
