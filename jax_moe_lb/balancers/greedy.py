"""A quota balancer inside the jitted program: surplus goes to deficit, one expert at a time."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.base import NativePlanner, edit
from jax_moe_lb.planners.greedy import greedy_planner


@dataclass(frozen=True)
class Greedy(Balancer):
    """Moves the surplus of the busiest ranks to idle ones, inside each domain, until slots or surplus run out.

    Use it where a slot more costs little, or where the search of `Exact` in jnp takes too long, as it may on a TPU;
    elsewhere `Exact` needs fewer slots for the same maximum.

    A move takes from the busiest rank of a domain what it has above the domain's mean, rounded up. Either an existing
    replica takes it, or the idlest rank with a free slot gets a new replica of the hottest expert: whichever can take
    more, and on a tie the former, which moves no weights. A rank that can give nothing more is left alone. It is one
    pass without search: it ends at the mean when slots abound, above it when they are scarce.

    Args:
        min_tokens: the least that a new replica must take, in tokens; it bounds the weights that move for little. 1,
            the default, makes a replica for any.

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

    min_tokens: int = 1

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at least 1")

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, which are balanced side by side; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = edit(self.native_planner(plan.domain), plan.placement, plan.quota)
        return replace(plan, placement=placement, quota=quota), state

    def native_planner(self, domain: int) -> NativePlanner:
        """Returns the planner that `rebalance` applies, for domains of so many ranks."""
        return greedy_planner(domain, self.min_tokens)
