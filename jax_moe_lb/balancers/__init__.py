"""Balancers: strategies editing a `Plan`, one file per paper."""

from jax_moe_lb.balancers.base import Balancer, Chain, LayerCost, Plain
from jax_moe_lb.balancers.cost import Cost
from jax_moe_lb.balancers.eplb import EPLB, EPLBPlus
from jax_moe_lb.balancers.exact import Exact
from jax_moe_lb.balancers.fastermoe import FasterMoE
from jax_moe_lb.balancers.feplb import FEPLB
from jax_moe_lb.balancers.given import Given, plan_all
from jax_moe_lb.balancers.greedy import Greedy
from jax_moe_lb.balancers.host_callback import HostCallback
from jax_moe_lb.balancers.hybridep import HybridEP
from jax_moe_lb.balancers.rails import RailS, interface_rows
from jax_moe_lb.balancers.ultraep import UltraEP

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


def __dir__() -> list[str]:
    return __all__
