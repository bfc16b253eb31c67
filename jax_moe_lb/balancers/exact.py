"""Balancer minimizing the maximum load by a search of bounded length, then the number of replicas."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import Cost
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.base import alike, is_on_host
from jax_moe_lb.planners.exact import check_exact, exact

SEARCH_ENDS = 1 / 4096
"""Relative distance to the mean load at which the planner stops its search."""


@dataclass(frozen=True)
@checked_fields
class Exact(Balancer):
    """Balancer minimizing the maximum load of every domain, then the number of replicas.

    Use it by default, especially with few replica slots. With many slots the maximum load equals the mean, rounded up,
    which is optimal. With few slots, a search of bounded length selects the placement. The quota is optimal for this
    placement, but the placement may not be optimal. Equal counts give equal plans.

    It plans from the counts alone. After another balancer (`Chain`), the replicas, relays and rails of its plan are
    dropped.

    With a `cost`, it keeps the old plan unless the new one saves time. The decision holds for all domains together,
    because a layer takes as long as its slowest rank. Before planning, it tests whether bringing the busiest rank to
    the mean would pay for the planner and one replica. If not, the planner does not run. After planning, it tests
    whether the token copies saved on the busiest rank pay for the replicas.

    On CPUs and NVIDIA GPUs with custom calls, the planner runs in C++. On other platforms, such as TPU, a different
    search in jnp runs in the jitted program; its plans differ but follow the same rules. With `call_host`, these
    platforms run the C++ planner through a host callback.

    Args:
        eps: fraction by which the maximum load may be higher to save replicas. 0 costs about one replica per rank; 0.01
            (default) a third less.
        max_fan_out: maximum number of replicas of the experts of one home rank, which sends their weights; `None`
            (default) for no limit.
        localize: if True (default), exchange replicas within the same maximum load to keep more tokens on their rank.
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
        """Return the balancer with unset sizes of its `cost` derived from the layer."""
        return self if self.cost is None else replace(self, cost=self.cost.sized(facts))

    def bound(self, topology: Topology, num_home: int, slots: int) -> float:
        """Return a bound near `num_domains * (1 + eps)` with a replica slot per home expert, else the default bound.

        The exact value is `num_domains * (1 + max(eps, 1 / 4096))`.

        A rank above the limit has an expert with more than the `L`-th part of its load. A receiver taking such experts
        whole, the hottest of a rank each time, is full before it has taken `L`. There is no such bound with fewer
        slots, with `max_fan_out` or with `cost`. Domains are balanced separately, and one may have all tokens.
        """
        enough = slots - num_home >= min(num_home, num_home * (topology.ranks_per_domain - 1))
        if not enough or self.max_fan_out is not None or self.cost is not None:
            return super().bound(topology, num_home, slots)
        # The search stops at this distance from the mean.
        return topology.num_domains * (1 + max(self.eps, SEARCH_ENDS))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan each domain separately; see `Balancer.rebalance`.

        Raises:
            ValueError: with a `cost`, the topology lacks a rate, or the plan has relays or rails.
            RuntimeError: with `call_host`, the C++ planner is not built.
        """
        if self.cost is None:
            return self._planned(counts, plan), state
        if plan.relay is not None or plan.rails is not None:
            name = "relay" if plan.relay is not None else "rails"
            raise ValueError(f"plan.{name} is set; expected None before Exact with a cost, which may keep the plan")
        return self._declining(self.cost, counts, plan, topology), state

    def _planned(self, counts: Counts, plan: Plan) -> Plan:
        placement, quota = exact(
            counts, plan.slots, plan.domain, self.eps, self.max_fan_out, self.localize, self.call_host
        )
        return replace(plan, placement=placement, quota=quota, relay=None, rails=None)

    def _declining(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> Plan:
        # All ranks take the same branch: counts and plan are equal on all ranks, and thresholds are integers.
        may_pay = cost.may_pay(plan, topology)
        if is_on_host(counts, plan.placement, plan.quota):
            other = self._planned(counts, plan) if may_pay else plan
            return other if cost.pays(plan, other, topology) else plan

        def weigh(counts: Counts, plan: Plan) -> Plan:
            other = self._planned(counts, plan)
            pays = cost.pays(plan, other, topology)
            # The planner has already run, so a conditional would save no time.
            return jax.tree.map(lambda new, old: jnp.where(pays, new, old), other, plan)

        # Both branches must return arrays varying over the same mesh axes.
        counts, placement, quota = alike(counts, plan.placement, plan.quota)
        plan = replace(plan, placement=placement, quota=quota)
        return jax.lax.cond(may_pay, weigh, lambda counts, plan: plan, counts, plan)
