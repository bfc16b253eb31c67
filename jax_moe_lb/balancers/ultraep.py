"""UltraEP (arXiv 2606.04101): replicas for the surplus above a limit near the mean, per microbatch."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.core.checks import Count, checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import Split, Tier
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.ultraep import check_eps, ultraep

PUBLISHED_MIN = 1024
"""Minimum number of tokens per replica in the paper."""

COPIES_PER_MIN = 64
"""Token copies of a rank divided by `PUBLISHED_MIN` in the paper: 8192 tokens with 8 experts each."""


@dataclass(frozen=True)
@checked_fields
class UltraEP(Balancer):
    """UltraEP: load of every rank limited to a search result near the mean of the domain.

    Use it in large domains with fast links and two or more replica slots per rank. Do not use its defaults with few
    slots, few ranks or small microbatches: if the first attempts fail, `min_tokens` is a hard minimum.

    Ranks above the limit give tokens of the busiest experts to new replicas on the ranks furthest below it. The limit
    starts at `1 + eps` times the mean. If the surplus does not fit into the empty slots, it is raised twice, by a
    hundredth of the largest load each. Then a search follows, with replicas of at least `min_tokens`.

    This is the planner of the authors' released code. The printed Algorithm 1 demands `min_tokens` of every replica, so
    the last tokens of a rank rarely fit and most limits fail. Here, during the first three attempts, a replica can be
    smaller than `min_tokens`: it must take its share of the remaining surplus only.

    Tokens are split as in the authors' code, up to rounding: here quotas are met exactly. Deviation: the destinations
    of a source's tokens of one expert are not interleaved, since the tokens are sorted by destination before dispatch.

    After another balancer (`Chain`), existing replicas keep their slots and quota and count in the load of the ranks.

    Args:
        eps: first limit above the mean, as a fraction of the mean, 0 to 1; 0.01 by default.
        min_tokens: minimum number of token copies per replica in the search. `None` (default) takes 1/64 of the token
            copies of a rank in a layer, and 1024 outside a layer. 1024 is the paper's value for 8192 tokens with 8
            experts each.
        tier: split over the serving ranks, see `Split`. `"proportional"` (default) splits in proportion to their quota,
            as the authors do; `"nearest"` sends most tokens of a source to one rank.
        locality: if True (default), tokens go to their own rank first.

    Raises:
        ValueError: an option is out of range.

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

    Reference:
        UltraEP, arXiv 2606.04101, and the authors' released code.
    """

    eps: float = 0.01
    min_tokens: Count | None = None
    tier: Tier = "proportional"
    locality: bool = True

    def __post_init__(self) -> None:
        check_eps(self.eps)
        Split(self.tier, self.locality)

    def sized(self, facts: LayerCost) -> "UltraEP":
        """Return the balancer with `min_tokens` derived from the layer."""
        if self.min_tokens is not None:
            return self
        return replace(self, min_tokens=max(1, facts.num_copies // COPIES_PER_MIN))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately; see `Balancer.rebalance`."""
        del counts, topology
        placement, quota = ultraep(plan.placement, plan.quota, plan.domain, self.eps, self.min_tokens or PUBLISHED_MIN)
        return replace(plan, placement=placement, quota=quota, split=Split(self.tier, self.locality)), state
