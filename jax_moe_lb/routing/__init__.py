"""Routers and router losses."""

from lazy_loader import attach_stub

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

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)
