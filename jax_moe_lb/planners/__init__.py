"""Integer arithmetic of the balancers, in C++ if built and in jnp otherwise."""

from jax_moe_lb.planners.eplb import rebalance_experts
from jax_moe_lb.planners.relocation import apply_relocation, domain_lower_bound, moved_experts, plan_relocation

__all__ = [
    "domain_lower_bound",
    "apply_relocation",
    "moved_experts",
    "plan_relocation",
    "rebalance_experts",
]


def __dir__() -> list[str]:
    return __all__
