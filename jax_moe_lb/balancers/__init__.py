"""Balancers: strategies editing a `Plan`, one file per paper."""

from lazy_loader import attach_stub

__all__ = [
    "Balancer",
    "Chain",
    "Cost",
    "EPLB",
    "EPLBPlus",
    "Exact",
    "FasterMoE",
    "FEPLB",
    "Given",
    "Greedy",
    "HostCallback",
    "HybridEP",
    "interface_rows",
    "LayerCost",
    "Plain",
    "plan_all",
    "RailS",
    "UltraEP",
]

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)
