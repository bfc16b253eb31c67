"""EPLB+: the greedy rule of EPLB on the exact load of every microbatch."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.eplb_plus import eplb_plus
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class EPLBPlus(Balancer):
    """Fills all slots with replicas of the experts of the highest load per copy, and splits tokens evenly.

    Use it as the baseline that the UltraEP paper (arXiv 2606.04101, section 7) calls EPLB+, or where tokens must be
    split evenly. It is EPLB's algorithm, with the microbatch's own load in place of history. Copies are packed onto
    ranks with the longest processing time first. Its even split is what it has in common with EPLB, and what a quota
    does better: a copy takes its share even where its rank has too much already.

    Here homes stay: an expert's first copy is at home, and only the others are packed, onto the loads that homes leave.
    EPLB packs all copies afresh (`rebalance_experts`). Replicas that another balancer made (`Chain`) stay too and count
    as copies; its quotas do not.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import EPLBPlus, Topology, load, plain_plan
        >>> counts = np.array([[4, 0, 1, 0], [3, 1, 1, 0], [3, 1, 1, 0], [3, 0, 1, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = EPLBPlus().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 13, 2, 4 and 0
        [6 5 5 3]
    """

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        del topology
        placement, quota = eplb_plus(counts.sum(0, dtype=jnp.int32), plan.placement, plan.domain)
        return replace(plan, placement=placement, quota=quota), state
