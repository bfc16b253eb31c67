"""EPLB+: EPLB's greedy rule on the exact load of every microbatch."""

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

    The baseline that the UltraEP paper (arXiv 2606.04101, section 7) calls EPLB+: EPLB's algorithm, with
    the microbatch's own load in place of history. Copies are packed onto ranks with the longest
    processing time first. Its even split is what it has in common with EPLB, and what a quota does
    better: a copy takes its share even where its rank has too much already.

    Here homes stay: an expert's first copy is at home, and only the others are packed, onto the loads
    that homes leave. EPLB packs all copies afresh (`rebalance_experts`). Replicas that another balancer
    made (`Chain`) stay too and count as copies; its quotas do not.
    """

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """One plan for all domains, each of which is planned for itself."""
        del topology
        placement, quota = eplb_plus(counts.sum(0, dtype=jnp.int32), plan.placement, plan.domain)
        return replace(plan, placement=placement, quota=quota), state
