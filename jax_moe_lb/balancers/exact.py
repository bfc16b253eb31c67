"""Balancer minimizing the maximum load by a search of bounded length, then the number of replicas."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.balancers.cost import MOST_COPIES, Cost, TimeScale, max_load_bounds, moved_copies, received
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.plan import IntScalar, Plan, load
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, Counts, State, iota, namespace
from jax_moe_lb.planners.base import is_on_host
from jax_moe_lb.planners.exact import check_exact, exact

SEARCH_ENDS = 1 / 4096
"""Relative distance to the mean load at which the planner stops its search."""

LIMITS = (1, 2, 4, 8)
"""Numbers of replicas sent and received by a rank that `Exact` with a cost tries, beside any number."""

MOST_PLANS = 2
"""Maximum number of plans made by `Exact` with a cost, each under another limit."""


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

    With a `cost`, it keeps the old plan unless a new one saves time. The decision holds for all domains together,
    because a layer takes as long as its slowest rank. The planner runs under the limit of replicas with the lowest
    bound on the time of its plans, and once more if the next bound is below the time found. If no bound saves time, the
    planner does not run. With rates of the device alone (`Cost.device`), the planner runs at most twice, under the
    limit that pays at twice the mean load and under none. A selection keeps the fastest plan, so that the program has
    no branch for the host to evaluate.

    On CPUs and NVIDIA GPUs with custom calls, the planner runs in C++; GPUs run it as a kernel if a domain has at most
    128 ranks and fits into shared memory. On other platforms, such as TPU, a different
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

    def plan_and_count(self, counts: Counts, plan: Plan, topology: Topology) -> tuple[Plan, int]:
        """Plan on a host as `rebalance`, and count the runs of the planner: with a `cost`, it may not run.

        Args:
            counts: `[R, E]` int32, a NumPy array.
            plan: plan in NumPy arrays.
            topology: topology of the group.
        """
        if self.cost is None or not self._weighs(plan, topology):
            return self._planned(counts, plan), 1
        if self.cost.is_of_device(topology):
            return self._kept(self.cost, counts, plan, topology), 1
        return self._weighed_on_host(self.cost, counts, plan, topology)

    def rebalance(self, counts: Counts, plan: Plan, topology: Topology, state: State) -> tuple[Plan, State]:
        """Plan each domain separately; see `Balancer.rebalance`.

        Raises:
            ValueError: with a required `cost`, the topology lacks a rate, or the plan has relays or rails.
            RuntimeError: with `call_host`, the C++ planner is not built.
        """
        if self.cost is None or not self._weighs(plan, topology):
            return self._planned(counts, plan), state
        if self.cost.is_of_device(topology):
            return self._kept(self.cost, counts, plan, topology), state
        return self._weighed(self.cost, counts, plan, topology), state

    def _weighs(self, plan: Plan, topology: Topology) -> bool:
        """Return whether plans are weighed by time: a cost is given, and its sizes and rates are known."""
        cost = self.cost
        if cost is None:
            return False
        name = "relay" if plan.relay is not None else "rails" if plan.rails is not None else None
        if name is not None and cost.required:
            raise ValueError(f"plan.{name} is set; expected None before Exact with a cost, which may keep the plan")
        may_move = plan.slots > plan.num_home and plan.domain > 1
        return name is None and may_move and cost.is_known(topology, plan.domain)

    def _planned(self, counts: Counts, plan: Plan, most: int | None = None) -> Plan:
        """Plan with at most `most` replicas sent and received by a rank; `None` for any number."""
        slots, fan_out = plan.slots, self.max_fan_out
        if most is not None:
            slots = plan.num_home + min(plan.slots - plan.num_home, most)
            fan_out = most if fan_out is None else min(most, fan_out)
        placement, quota = exact(counts, slots, plan.domain, self.eps, fan_out, self.localize, self.call_host)
        if slots < plan.slots:
            placement = namespace(placement).pad(placement, ((0, 0), (0, plan.slots - slots)), constant_values=-1)
        return replace(plan, placement=placement, quota=quota, relay=None, rails=None)

    def _limits(self, plan: Plan) -> tuple[int, ...]:
        """Return the numbers of replicas of a rank to try, ascending; the last one is no limit."""
        most = plan.domain * (plan.slots - plan.num_home)
        most = most if self.max_fan_out is None else min(most, self.max_fan_out)
        return (*(limit for limit in LIMITS if limit < most), most)

    def _scale(self, cost: Cost, plan: Plan, topology: Topology) -> TimeScale:
        """Return the times of replicas in token copies, for any number of replicas of a rank."""
        return cost.scale(topology, plan.domain, plan.domain * (plan.slots - plan.num_home))

    def _bounds(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> Int[AnyArray, "N"]:
        """Return a lower bound on the time of plans under each limit, in token copies."""
        limits, scale = self._limits(plan), self._scale(cost, plan, topology)
        # A plan within the replicas of a lower limit is one under this limit.
        moved = scale.table[[1, *(limit + 1 for limit in limits[:-1])]] + np.int32(scale.one_copy)
        loads = max_load_bounds(counts, plan, limits)
        times = loads + moved + scale.rounds(loads)
        # A plan without replicas serves the loads of the homes.
        homes = counts.sum(0, dtype=np.int32).reshape(plan.num_ranks, plan.num_home).sum(1, dtype=np.int32).max()
        return namespace(times).minimum(times, homes + scale.rounds(homes))

    def _choice(
        self, cost: Cost, bounds: Int[AnyArray, "N"], plan: Plan, time: IntScalar, planner_copies: int
    ) -> IntScalar:
        """Return the index of the limit with the lowest bound, plus one; 0 if no bound saves time."""
        xp = namespace(bounds)
        choice = xp.where(
            bounds.min() < time - np.int32(planner_copies), bounds.argmin().astype(np.int32) + np.int32(1), np.int32(0)
        )
        if cost.max_rows is not None:
            # A rank cannot serve its load at home, so save rows at any price.
            last, is_untried = np.int32(bounds.shape[0]), bounds[-1] < MOST_COPIES
            choice = xp.where((load(plan).max() > cost.max_rows) & is_untried, last, choice)
        return choice

    def _time(self, cost: Cost, plan: Plan, topology: Topology) -> IntScalar:
        """Return the time of a plan in token copies."""
        scale, loads = self._scale(cost, plan, topology), load(plan)
        served = loads + np.int32(scale.slot) * received(plan)
        return served.max() + moved_copies(plan, scale) + scale.rounds(loads.max())

    def _faster(self, cost: Cost, other: Plan, plan: Plan, pays: Any) -> Any:
        """Return whether another plan takes less time (`pays`), or has fewer rows if a rank cannot serve its rows."""
        if cost.max_rows is None:
            return pays
        most, were = load(other).max(), load(plan).max()
        return namespace(most).where((most > cost.max_rows) | (were > cost.max_rows), most < were, pays)

    def _kept(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> Plan:
        """Return the new plan with the least time if it saves time, without branches that the host would evaluate."""
        if not is_on_host(counts, plan.placement, plan.quota):
            # Both plans must vary over the same mesh axes.
            counts, placement, quota = alike(counts, plan.placement, plan.quota)
            plan = replace(plan, placement=placement, quota=quota)
        xp, most = namespace(plan.quota), self._limits(plan)[-1]
        scale = self._scale(cost, plan, topology)
        for limit in sorted({min(cost.worthwhile_replicas(scale), most), most}):
            other = self._planned(counts, plan, limit)
            pays = self._time(cost, other, topology) < self._time(cost, plan, topology)
            keep = partial(xp.where, self._faster(cost, other, plan, pays))
            plan = jax.tree.map(keep, other, plan)
        return plan

    def _weighed_on_host(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> tuple[Plan, int]:
        """Return the plan with the least time, and how often the planner ran."""
        limits, bounds = self._limits(plan), self._bounds(cost, counts, plan, topology)
        planner_copies, time = self._scale(cost, plan, topology).planner, self._time(cost, plan, topology)
        for run in range(MOST_PLANS):
            choice = int(self._choice(cost, bounds, plan, time, planner_copies))
            if not choice:
                return plan, run
            bounds[choice - 1] = MOST_COPIES
            other = self._planned(counts, plan, limits[choice - 1])
            took = self._time(cost, other, topology)
            if self._faster(cost, other, plan, took < time):
                plan, time = other, took
        return plan, MOST_PLANS

    def _weighed(self, cost: Cost, counts: Counts, plan: Plan, topology: Topology) -> Plan:
        """Return the plan with the least time under the limits with the lowest bounds, or the old one."""
        if is_on_host(counts, plan.placement, plan.quota):
            return self._weighed_on_host(cost, counts, plan, topology)[0]

        def keep(counts: Counts, plan: Plan) -> Plan:
            del counts
            return plan

        def weigh(limit: int, counts: Counts, plan: Plan) -> Plan:
            other = self._planned(counts, plan, limit)
            pays = self._time(cost, other, topology) < self._time(cost, plan, topology)
            is_faster = self._faster(cost, other, plan, pays)
            # The planner has already run, so a conditional would save no time.
            return jax.tree.map(lambda new, old: jnp.where(is_faster, new, old), other, plan)

        # All branches must return arrays varying over the same mesh axes.
        counts, placement, quota = alike(counts, plan.placement, plan.quota)
        plan = replace(plan, placement=placement, quota=quota)
        planner_copies = self._scale(cost, plan, topology).planner
        branches: list[Callable[..., Any]] = [keep, *(partial(weigh, limit) for limit in self._limits(plan))]

        def run(_: Array, carry: tuple[Plan, Array]) -> tuple[Plan, Array]:
            plan, bounds = carry
            # All ranks take the same branch: counts and plan are equal on all ranks, and times are integers.
            choice = self._choice(cost, bounds, plan, self._time(cost, plan, topology), planner_copies)
            tried = iota(bounds.shape[0]) == choice - 1
            return jax.lax.switch(choice, branches, counts, plan), jnp.where(tried, np.int32(MOST_COPIES), bounds)

        # A loop, so that the planners are compiled once.
        return jax.lax.fori_loop(0, MOST_PLANS, run, (plan, self._bounds(cost, counts, plan, topology)))[0]
