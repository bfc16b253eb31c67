"""Integer arithmetic of the balancers, in C++ if built and in jnp otherwise."""

from lazy_loader import attach_stub

__all__ = [
    "domain_lower_bound",
    "apply_relocation",
    "moved_experts",
    "plan_relocation",
    "rebalance_experts",
]

# Imported at first use: a layer needs few of them.
__getattr__, __dir__, _ = attach_stub(__name__, __file__)
