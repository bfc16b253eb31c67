"""Each rank shares its first expert with the next rank of its domain."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State


@dataclass(frozen=True)
class Halve(Balancer):
    """Move half of the tokens of each rank's first expert to the next rank of the domain.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Halve
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[8, 0], [0, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=2)
        >>> print(load(Halve().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())[0]))
        [4 4]
    """

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Add one replica per rank; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = jnp.asarray(plan.placement), jnp.asarray(plan.quota)
        rank = jnp.arange(plan.num_ranks, dtype=jnp.int32)
        helper = rank // plan.domain * plan.domain + (rank + 1) % plan.domain
        if plan.domain == 1 or placement.shape[1] == plan.num_home:
            return plan, state
        expert = placement[:, 0]
        half = quota[expert, rank] // 2
        placement = placement.at[helper, plan.num_home].set(expert)
        quota = quota.at[expert, rank].add(-half).at[expert, helper].add(half)
        return replace(plan, placement=placement, quota=quota), state
