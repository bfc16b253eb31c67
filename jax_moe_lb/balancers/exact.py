"""Balancer minimizing the maximum load by a search of bounded length, then the number of replicas."""

from dataclasses import dataclass, replace

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import Cost
from jax_moe_lb.balancers.weighing import Weighing, weighing
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.exact import UNBOUNDED, Placements, Quotas, check_exact, exact_plans, fits_kernel

SEARCH_ENDS = 1 / 4096
"""Relative distance to the mean load at which the planner stops its search."""


@dataclass(frozen=True)
@checked_fields
class Exact(Balancer):
    """Balancer minimizing the maximum load of every domain, then the number of replicas, then those sent by one rank.

    Use it by default, especially with few replica slots. With many slots the maximum load equals the mean, rounded up,
    which is optimal. With few slots, a search of bounded length selects the placement. The quota is optimal for this
    placement, but the placement may not be optimal. With `eps=0` and without `max_fan_out`, no plan of `Greedy` has a
    lower maximum load. Equal counts give equal plans.

    It plans from the counts alone. After another balancer (`Chain`), the replicas, relays and rails of its plan are
    dropped.

    With a `cost`, it plans under several limits on the replicas of a rank, and keeps the plan with the least time, or
    the old plan. The decision holds for all domains together, because a layer takes as long as its slowest rank. A
    kernel of NVIDIA GPUs makes all plans at once, and a selection keeps one, without a branch. Outside of CUDA graphs
    the host would evaluate it. Without this kernel the planner does not run if no plan could save time.

    On CPUs and NVIDIA GPUs with custom calls, the planner runs in C++; GPUs run it as a kernel if a domain has at most
    128 ranks and fits into shared memory. On other platforms, such as TPU, a different search in jnp runs in the jitted
    program; its plans differ but follow the same rules. With `call_host`, these platforms run the C++ planner through a
    host callback.

    Args:
        eps: fraction by which the maximum load may be higher to save replicas. 0 costs about one replica per rank; 0.01
            (default) more than a quarter less.
        max_fan_out: maximum number of replicas of the experts of one home rank, which sends their weights; `None`
            (default) for no limit.
        localize: if True (default), exchange replicas within the same maximum load to keep more tokens on the rank.
        cost: cost of replicas and value of saved token copies; `None` (default) always uses the new plan.
        call_host: if True, programs without the custom call plan in C++ on the host, and the device waits. If False
            (default), they plan on the device.

    Raises:
        ValueError: `eps` or `max_fan_out` is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.balancers import Exact
        >>> from jax_moe_lb.core import load, plain_plan
        >>> counts = np.array([[3, 4, 2, 1], [3, 4, 2, 1], [3, 4, 2, 2], [3, 3, 1, 2]], np.int32)
        >>> topology = Topology.flat(num_ranks=4)
        >>> plan, _ = Exact(eps=0.0).rebalance(counts, plain_plan(counts, topology, slots=2), topology, ())
        >>> print(load(plan))  # of 12, 15, 7 and 6
        [10 10 10 10]
        >>> print(plan.placement[:, 1])  # the replicas: three are enough
        [ 1 -1  0  1]
    """

    eps: float = 0.01
    max_fan_out: int | None = None
    localize: bool = True
    cost: Cost | None = None
    call_host: bool = False

    def __post_init__(self) -> None:
        check_exact(self.eps, self.max_fan_out)

    def sized(self, facts: LayerCost) -> "Exact":
        """Return the balancer with unset sizes of `cost` derived from the layer."""
        return self if self.cost is None else replace(self, cost=self.cost.sized(facts))

    def bound(self, topology: Topology, num_home: int, slots: int) -> float:
        """Return a bound near `num_domains * (1 + eps)` with a replica slot per home expert, else the default bound.

        The exact value is `num_domains * (1 + max(eps, 1 / 4096))`.

        A rank above the limit has an expert with more than the `L`-th part of the load. A receiver taking such experts
        whole, the hottest of a rank each time, is full before it has taken `L`. There is no such bound with fewer
        slots, with `max_fan_out` or with a required `cost`. Domains are balanced separately, and one may have all
        tokens. With the cost of `exact()`, the bound holds if `Buffers.max_rounds` is set to the rounds that it allows:
        no plan above them is kept.
        """
        enough = slots - num_home >= min(num_home, num_home * (topology.ranks_per_domain - 1))
        weighs = self.cost is not None and self.cost.required
        if not enough or self.max_fan_out is not None or weighs:
            return super().bound(topology, num_home, slots)
        # The search stops at this distance from the mean.
        return topology.num_domains * (1 + max(self.eps, SEARCH_ENDS))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan the domains separately; see `Balancer.rebalance`.

        Raises:
            ValueError: with a required `cost`, the topology lacks a rate, or the plan has relays or rails.
            RuntimeError: with `call_host`, the C++ planner is not built.
        """
        plans = self._weighing(plan, topology)
        if plans is not None:
            return plans.fastest(counts, plan), state
        placement, quota = self._planned(counts, plan, (UNBOUNDED,))
        return replace(plan, placement=placement[0], quota=quota[0], relay=None, rails=None), state

    def _weighing(self, plan: Plan, topology: Topology) -> Weighing | None:
        """Return the comparison of plans by time; `None` without a cost, or if its sizes and rates are unknown."""
        cost = self.cost
        if cost is None:
            return None
        name = "relay" if plan.relay is not None else "rails" if plan.rails is not None else None
        if name is not None and cost.required:
            raise ValueError(f"plan.{name} is set; expected None before Exact with a cost, which may keep the plan")
        may_move = plan.slots > plan.num_home and plan.domain > 1
        if name is not None or not may_move or not cost.is_known(topology, plan.domain):
            return None
        in_kernel = fits_kernel((plan.num_ranks, plan.num_experts), plan.slots, plan.domain, self.eps, self.localize)
        return weighing(self._planned, cost, plan, topology, self.max_fan_out, in_kernel)

    def _planned(self, counts: Counts, plan: Plan, limits: tuple[int, ...]) -> tuple[Placements, Quotas]:
        """Return placements and quotas under each limit on the replicas sent and received by a rank."""
        options = plan.slots, plan.domain, self.eps, self.max_fan_out, self.localize, self.call_host
        return exact_plans(limits, counts, *options)
