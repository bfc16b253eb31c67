"""UltraEP (arXiv 2606.04101): replicas for the surplus above a limit near the mean, planned for every microbatch."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import Split, Tier
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.ultraep import check_eps, ultraep

PUBLISHED_MIN = 1024
"""The least that a replica takes in the paper, in tokens."""

COPIES_PER_MIN = 64
"""So many times that is what its ranks have: 8192 tokens, of which each goes to 8 experts."""


@dataclass(frozen=True)
class UltraEP(Balancer):
    """Brings every rank of a domain under one limit, as near to the domain's mean as its search gets.

    Use it in large domains with fast links and two slots or more on each rank, and where `Exact` is not built. Do not
    use it with few slots, few ranks or small microbatches as it stands: where the first attempts fail, `min_tokens` is
    a hard floor.

    Homes above the limit give tokens of their busiest experts to new replicas on the ranks furthest below it. The limit
    starts at `1 + eps` times the mean and is raised twice, by a hundredth of the largest load each, if the surplus does
    not fit into the empty slots; then a search takes over whose replicas are of at least `min_tokens`.

    This is the planner of the authors' released code. Algorithm 1 as printed in the paper differs: it demands
    `min_tokens` of every replica, so that the last tokens of a rank rarely fit anywhere and most limits fail. Here a
    replica can be smaller than `min_tokens`: during the first three attempts it must take its share of what is still to
    be moved, no more.

    Tokens are split as the authors do, up to rounding: here quotas come out exactly. It deviates in that it does not
    interleave which of a source's tokens of an expert go where: they travel sorted by destination anyway.

    After another balancer (`Chain`), replicas that exist keep their slots and quota, and count in their ranks' loads.

    Args:
        eps: what the first limit is above the mean, as a fraction, 0 to 1; 0.01 by default.
        min_tokens: the least that a replica takes in the search, in token copies. `None`, the default, is a 64th of a
            rank's in a layer, which is the paper's 1024 for 8192 tokens of 8 experts each, and 1024 off any layer.
        tier: how tokens are split over the ranks that serve their expert. `"proportional"`, the default, is in
            proportion to what they serve, as the authors do; `"nearest"` sends most of a source's tokens to one rank.
            See `Split`.
        locality: whether tokens go to their own rank first.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import UltraEP
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = 1000 * np.array([[4, 0, 0, 0], [3, 1, 0, 0], [2, 1, 1, 0], [1, 0, 3, 0]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = UltraEP().rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 10000, 2000, 4000 and 0; the limit is 4040
        [4040 3920 4000 4040]
    """

    eps: float = 0.01
    min_tokens: int | None = None
    tier: Tier = "proportional"
    locality: bool = True

    def __post_init__(self) -> None:
        check_eps(self.eps)
        if self.min_tokens is not None and self.min_tokens < 1:
            raise ValueError(f"min_tokens is {self.min_tokens}; expected at least 1")
        Split(self.tier, self.locality)

    def sized(self, facts: LayerCost) -> "UltraEP":
        """Returns it with the `min_tokens` of a layer."""
        if self.min_tokens is not None:
            return self
        return replace(self, min_tokens=max(1, facts.num_copies // COPIES_PER_MIN))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = ultraep(plan.placement, plan.quota, plan.domain, self.eps, self.min_tokens or PUBLISHED_MIN)
        return replace(plan, placement=placement, quota=quota, split=Split(self.tier, self.locality)), state
