"""Plain expert parallelism."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, State, iota


@dataclass(frozen=True)
class Plain(Balancer):
    """Every expert is served at home."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """The plan as it is."""
        del counts, topology
        return plan, state

    @property
    def needs_counts(self) -> bool:
        """No: nothing moves."""
        return False

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """None, but for what replicas serve already."""
        expert = iota(plan.num_experts)
        return jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > plan.quota[expert, expert // plan.num_home]
