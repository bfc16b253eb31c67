"""Plain expert parallelism: no balancing."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Bool

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import AnyArray, Counts, State, iota


@dataclass(frozen=True)
class Plain(Balancer):
    """Serves every expert at home.

    Use it where routing is balanced, or as the baseline of a comparison.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Plain, Topology, load, plain_plan
        >>> counts = np.array([[4, 0, 0, 0], [3, 1, 0, 0], [2, 1, 1, 0], [1, 0, 3, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = Plain().rebalance(counts, plain_plan(counts, topology), topology, ())
        >>> print(load(plan))
        [10  2  4  0]
    """

    def why_idle(self, topology: Topology, num_home: int, slots: int) -> None:
        """Says nothing: nobody expects it to change anything."""

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Returns the plan as it is."""
        del counts, topology
        return plan, state

    @property
    def needs_counts(self) -> bool:
        """It is false: nothing moves, whatever the load."""
        return False

    def dynamic(self, plan: Plan) -> Bool[AnyArray, "E"]:
        """Names only the experts that replicas of another balancer (`Chain`) serve already."""
        expert = iota(plan.num_experts)
        return jnp.asarray(plan.quota).sum(1, dtype=jnp.int32) > plan.quota[expert, expert // plan.num_home]
