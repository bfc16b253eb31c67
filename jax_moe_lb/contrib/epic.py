"""EPIC: the busiest and the idlest rank of a host swap experts, if that saves more time than it takes."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.host_callback import PlannedOnHost, served_at_home
from jax_moe_lb.core.checks import Count, checked_fields
from jax_moe_lb.core.plan import Plan


@dataclass(frozen=True)
@checked_fields
class EPIC(PlannedOnHost):
    """EPIC's swaps of expert pairs between the ranks of a domain.

    Use it as a baseline; one replica slot is enough. Ranks are paired by load, the busiest with the idlest, the second
    busiest with the second idlest, and so on. A pair swaps the two experts that reduce the maximum of the loads most,
    if it falls by at least `min_saved` token copies.

    The original moves both experts and keeps them until the next swap, without slots. In a plan home experts stay, so
    each of the two gets a replica on the other rank, which serves all its tokens, in this layer only. Its replicas for
    hot experts, made from past loads as by `EPLB`, are not part of this balancer. It plans in Python on the host.

    Args:
        min_saved: minimum token copies by which the maximum of a pair falls: the time of a swap over the time of a
            copy. 1 (default) for any.

    Raises:
        ValueError: `min_saved` is below 1.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.contrib import EPIC
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.diag([9, 6, 5, 4, 1, 3, 2, 2]).reshape(4, 2, 8).sum(1).astype(np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = EPIC().rebalance(counts, plain_plan(counts, topology, slots=3), topology, ())
        >>> print(load(plan), plan.placement[:, 2])  # of 15, 9, 4 and 4
        [ 8  7  6 11] [6 5 2 0]

    Reference:
        Balancing and Beyond: Communication-Centric Optimizations in Expert Parallelism, SIGCOMM 2026,
        doi 10.1145/3789240.3829201, by the summary in AI-Infra-Team/awesome-papers, issue 228.
    """

    min_saved: Count = 1

    def plan_on_host(self, counts: np.ndarray, plan: Plan) -> Plan:
        """Return EPIC's plan; see `PlannedOnHost`."""
        tokens, num_home = counts.sum(0).astype(np.int64), plan.num_home
        placement, quota = served_at_home(counts, plan)
        by_rank = tokens.reshape(plan.num_ranks, num_home)
        for first in range(0, plan.num_ranks if plan.slots > num_home else 0, plan.domain):
            order = first + np.argsort(-by_rank[first : first + plan.domain].sum(1), kind="stable")
            for busy, idle in zip(order[: plan.domain // 2], order[::-1], strict=False):
                # The maximum falls most if the pair's difference comes nearest to 0.
                load = by_rank[busy].sum(), by_rank[idle].sum()
                given = by_rank[busy][:, None] - by_rank[idle][None]
                most = np.maximum(load[0] - given, load[1] + given)
                best = np.unravel_index(most.argmin(), most.shape)
                if load[0] - most[best] >= self.min_saved:
                    for home, other, at in ((busy, idle, best[0]), (idle, busy, best[1])):
                        expert = home * num_home + at
                        placement[other, num_home] = expert
                        quota[expert, [home, other]] = quota[expert, [other, home]]
        return replace(plan, placement=placement, quota=quota.astype(np.int32))
