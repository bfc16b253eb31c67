"""Plain expert parallelism."""

from dataclasses import dataclass

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class Plain(Balancer):
    """Every expert is served at home."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """The plan as it is."""
        del counts, topology
        return plan, state
