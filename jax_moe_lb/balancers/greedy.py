"""Quota balancer in the jitted program, moving surplus to deficit one expert at a time."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import Count, checked_fields
from jax_moe_lb.core.native_planner import NativePlanner
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.base import edit
from jax_moe_lb.planners.greedy import greedy_planner


@dataclass(frozen=True)
@checked_fields
class Greedy(Balancer):
    """Greedy balancer moving the surplus of the busiest ranks to idle ranks inside each domain.

    Use it if slots are cheap, or if the jnp search of `Exact` takes too long, such as on TPU. Otherwise `Exact` needs
    fewer slots for the same maximum load.

    Each move takes the surplus of the busiest rank above the domain's mean, rounded up. Either an existing replica
    takes it, or the least loaded rank with a free slot gets a new replica of the hottest expert. The option taking more
    tokens is used; on a tie the existing replica, which moves no weights. A rank with no possible move is left as it
    is. The algorithm is one pass without search. It reaches the mean with many slots, and stays above it with few.

    Args:
        min_tokens: minimum number of tokens of a new replica, which limits weight transfers of little use; 1 by
            default.

    Raises:
        ValueError: `min_tokens` is below 1.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Greedy
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[4, 0, 0, 0], [3, 1, 0, 0], [2, 1, 1, 0], [1, 0, 3, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan = plain_plan(counts, topology, slots=2)
        >>> print(load(plan))
        [10  2  4  0]
        >>> plan, _ = Greedy().rebalance(counts, plan, topology, ())
        >>> print(load(plan))
        [4 4 4 4]
    """

    min_tokens: Count = 1

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan all domains side by side; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = edit(self.native_planner(plan.domain), plan.placement, plan.quota)
        return replace(plan, placement=placement, quota=quota), state

    def native_planner(self, domain: int) -> NativePlanner:
        """Return the planner applied by `rebalance`, for `domain` ranks per domain."""
        return greedy_planner(domain, self.min_tokens)
