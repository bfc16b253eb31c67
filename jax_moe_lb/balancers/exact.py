"""The lowest maximum load that the slots allow, as far as a search of fixed length finds it, then few replicas."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import Cost
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.planners.base import alike, is_on_host
from jax_moe_lb.planners.exact import check_exact, exact

SEARCH_ENDS = 1 / 4096
"""The planner looks no further where it misses the mean by less."""


@dataclass(frozen=True)
class Exact(Balancer):
    """Minimises the maximum load of every domain, then the number of replicas.

    Use it by default, and above all where slots are scarce. Where slots abound the
    maximum is the mean, rounded up, which nothing can better. Where they are scarce it is that of the best placement
    that a search of fixed length found; quotas are optimal for it, the placement need not be. The same counts always
    give the same plan.

    It plans from the counts alone. After another balancer (`Chain`) the replicas of that one are dropped, with their
    relays and rails: all slots are planned anew.

    With a `cost` it declines what does not pay, and leaves the plan as it was: all domains together, since a layer
    takes as long as its slowest rank. It asks twice. Before planning: is the busiest rank so far above the mean that
    bringing it there would make up for the planner and one replica? If not, the planner does not run. After it: are the
    token copies that the busiest rank loses worth the replicas?

    It plans in C++ on CPUs and NVIDIA GPUs where the custom calls are built. Elsewhere, as on a TPU, another search
    plans in the jitted program in jnp, which makes other plans to the same rules; or, with `call_host`, the C++ does
    through a host callback.

    Args:
        eps: the fraction by which the maximum load may be higher, where that saves replicas. 0 costs about one replica
            per rank; 0.01, the default, a third less.
        max_fan_out: how many replicas may be made of the experts of one home rank, which sends their weights. `None`,
            the default, allows any number.
        localize: whether replicas change places, within the same maximum, so that more tokens stay on their rank.
        cost: what a replica costs and a token copy saves, at the rates of the topology. With `None`, the default, it
            never declines.
        call_host: whether programs without the custom call plan in C++ on the host, for which the device waits. With
            `False`, the default, they plan on the device.

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
        """Returns it with the costs of a layer, where it has a `Cost` that leaves them to be derived."""
        return self if self.cost is None else replace(self, cost=self.cost.sized(facts))

    def bound(self, topology: Topology, num_home: int, slots: int) -> float:
        """Returns `1 + eps` for one domain whose ranks have a replica slot for each home expert, more for several.

        A rank above the limit has an expert with more than its `L`-th part. A receiver that takes such experts whole,
        the hottest of a rank each time, is full before it has taken `L`. With fewer slots nothing is promised, nor with
        a `max_fan_out` or a `cost`. Domains are levelled each for itself: one may have all tokens.
        """
        enough = slots - num_home >= min(num_home, num_home * (topology.ranks_per_domain - 1))
        if not enough or self.max_fan_out is not None or self.cost is not None:
            return super().bound(topology, num_home, slots)
        # The search ends where it is as near as that.
        return topology.num_domains * (1 + max(self.eps, SEARCH_ENDS))

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Makes one plan for all domains, each of which is planned for itself; see `Balancer.rebalance`.

        Raises:
            ValueError: with a `cost`, the topology lacks a rate, or the plan has relays or rails.
            RuntimeError: with `call_host`, the planner in C++ was not built.
        """
        if self.cost is None:
            return self._planned(counts, plan), state
        if plan.relay is not None or plan.rails is not None:
            name = "relay" if plan.relay is not None else "rails"
            raise ValueError(f"plan.{name} is set; expected None before a balancer that may leave the plan as it is")
        return self._declining(self.cost, counts, plan, topology), state

    def _planned(self, counts: Counts, plan: Plan) -> Plan:
        placement, quota = exact(
            counts, plan.slots, plan.domain, self.eps, self.max_fan_out, self.localize, self.call_host
        )
        return replace(plan, placement=placement, quota=quota, relay=None, rails=None)

    def _declining(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> Plan:
        # All ranks take the same branch: counts and plan are equal on all of them, and thresholds are integers.
        may_pay = cost.may_pay(plan, topology)
        if is_on_host(counts, plan.placement, plan.quota):
            other = self._planned(counts, plan) if may_pay else plan
            return other if cost.pays(plan, other, topology) else plan

        def weigh(counts: Counts, plan: Plan) -> Plan:
            other = self._planned(counts, plan)
            pays = cost.pays(plan, other, topology)
            # The planner has run by now, so that there is nothing left to branch around.
            return jax.tree.map(lambda new, old: jnp.where(pays, new, old), other, plan)

        # Both branches must return arrays that vary over the same mesh axes.
        counts, placement, quota = alike(counts, plan.placement, plan.quota)
        plan = replace(plan, placement=placement, quota=quota)
        return jax.lax.cond(may_pay, weigh, lambda counts, plan: plan, counts, plan)
