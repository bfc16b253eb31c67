"""Integer arithmetic of the balancers, in C++ if built and in jnp otherwise."""

from .eplb import rebalance_experts as rebalance_experts
from .relocation import apply_relocation as apply_relocation
from .relocation import domain_lower_bound as domain_lower_bound
from .relocation import moved_experts as moved_experts
from .relocation import plan_relocation as plan_relocation
