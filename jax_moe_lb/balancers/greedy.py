"""In-graph quota balancer: surplus to deficit, one expert at a time."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.greedy import greedy_planner
from jax_moe_lb.planners.native import NativePlanner, edit
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class Greedy(Balancer):
    """Moves the surplus of the busiest ranks to idle ones, inside each domain, until slots or surplus run out.

    A move takes from the busiest rank of a domain what it has above the domain's mean,
    rounded up. Either an existing replica takes it, or the idlest rank with a free slot
    gets a new replica of the hottest expert: whichever can take more, and on a tie the
    former, which moves no weights. A rank that can give nothing more is left alone.
    One pass, no search: at the mean when slots abound, above it when they are scarce.

    Args:
        min_tokens: a new replica must take at least so many tokens; bounds the weights that
            move for little. 1, the default, always moves.
    """

    min_tokens: int = 1

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at least 1")

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """One plan for all domains, which are balanced side by side."""
        del counts, topology
        placement, quota = edit(self.native_planner(plan.domain), plan.placement, plan.quota)
        return replace(plan, placement=placement, quota=quota), state

    def native_planner(self, domain: int) -> NativePlanner:
        """See `planners/greedy.py`."""
        return greedy_planner(domain, self.min_tokens)
