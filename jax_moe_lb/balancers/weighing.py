"""Selection of the plan with the least time, among plans under limits on the replicas of a rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.balancers.cost import MOST_COPIES, Cost, TimeScale, max_load_bounds, moved_copies, received
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.plan import BoolScalar, IntScalar, Plan, load
from jax_moe_lb.core.topology import INT32_MAX, Topology
from jax_moe_lb.core.types import AnyArray, Counts, iota, namespace
from jax_moe_lb.planners.base import is_on_host

LIMITS = (1, 2, 4, 8)
"""Numbers of replicas sent and received by a rank to try, beside any number."""

PlanUnder = Callable[[Counts, Plan, tuple[int, ...]], list[Plan]]
"""Planner: the plans under each limit on the replicas sent and received by a rank."""

MOST_PLANS = 2
"""Maximum number of plans made, each under another limit."""


@dataclass(frozen=True)
class Weighing:
    """Plans of a planner under ascending limits of replicas, compared by time in token copies."""

    planned: PlanUnder
    limits: tuple[int, ...]  # the last one is no limit
    scale: TimeScale
    max_rows: int | None
    worthwhile: tuple[int, ...]  # limits to try with rates of a device alone; empty otherwise

    def fastest(self, counts: Counts, plan: Plan) -> Plan:
        """Return the plan with the least time, in NumPy and in programs."""
        if is_on_host(counts, plan.placement, plan.quota):
            return self.on_host(counts, plan)[0]
        # Compared plans must vary over the same mesh axes.
        counts, placement, quota = alike(counts, plan.placement, plan.quota)
        plan = replace(plan, placement=placement, quota=quota)
        return self._fastest_of(self.worthwhile, counts, plan) if self.worthwhile else self._branched(counts, plan)

    def on_host(self, counts: Counts, plan: Plan) -> tuple[Plan, int]:
        """Return the plan with the least time, and how often the planner ran."""
        if self.worthwhile:
            return self._fastest_of(self.worthwhile, counts, plan), 1
        bounds, time = self._bounds(counts, plan), self.time(plan)
        for run in range(MOST_PLANS):
            choice = int(self._choice(bounds, plan, time))
            if not choice:
                return plan, run
            bounds[choice - 1] = MOST_COPIES
            (other,) = self.planned(counts, plan, (self.limits[choice - 1],))
            other_time = self.time(other)
            if self._is_faster(other, plan, other_time < time):
                plan, time = other, other_time
        return plan, MOST_PLANS

    def time(self, plan: Plan) -> IntScalar:
        """Return the time of a plan."""
        loads = load(plan)
        served = loads + np.int32(self.scale.slot) * received(plan)
        return served.max() + moved_copies(plan, self.scale) + self.scale.rounds(loads.max())

    def _bounds(self, counts: Counts, plan: Plan) -> Int[AnyArray, "N"]:
        """Return a lower bound on the time of plans under each limit."""
        # A plan within the replicas of a lower limit is one under this limit.
        lowest = [1, *(limit + 1 for limit in self.limits[:-1])]
        moved = self.scale.table[lowest] + np.int32(self.scale.one_copy)
        loads = max_load_bounds(counts, plan, self.limits)
        times = loads + moved + self.scale.rounds(loads)
        # A plan without replicas serves the loads of the homes.
        homes = counts.sum(0, dtype=np.int32).reshape(plan.num_ranks, plan.num_home).sum(1, dtype=np.int32).max()
        return namespace(times).minimum(times, homes + self.scale.rounds(homes))

    def _choice(self, bounds: Int[AnyArray, "N"], plan: Plan, time: IntScalar) -> IntScalar:
        """Return the index of the limit with the lowest bound, plus one; 0 if no bound saves time."""
        xp = namespace(bounds)
        saves = bounds.min() < time - np.int32(self.scale.planner)
        choice = xp.where(saves, bounds.argmin().astype(np.int32) + np.int32(1), np.int32(0))
        if self.max_rows is not None:
            # A rank cannot serve its load at home, so save rows at any price.
            last, is_untried = np.int32(bounds.shape[0]), bounds[-1] < MOST_COPIES
            choice = xp.where((load(plan).max() > self.max_rows) & is_untried, last, choice)
        return choice

    def _is_faster(self, other: Plan, plan: Plan, saves: BoolScalar) -> BoolScalar:
        """Return `saves`, or whether another plan has fewer rows if a rank cannot serve the rows of one of both."""
        if self.max_rows is None:
            return saves
        most, were = load(other).max(), load(plan).max()
        return namespace(most).where((most > self.max_rows) | (were > self.max_rows), most < were, saves)

    def _fastest_of(self, limits: tuple[int, ...], counts: Counts, plan: Plan) -> Plan:
        """Return the fastest plan under these limits, or the old one, without branches that the host would evaluate."""
        for other in self.planned(counts, plan, limits):
            saves = self.time(other) < self.time(plan)
            plan = jax.tree.map(partial(namespace(plan.quota).where, self._is_faster(other, plan, saves)), other, plan)
        return plan

    def _branched(self, counts: Counts, plan: Plan) -> Plan:
        """Return the fastest plan under the limits with the lowest bounds, or the old one."""

        def keep(counts: Counts, plan: Plan) -> Plan:
            del counts
            return plan

        branches: list[Any] = [keep, *(partial(self._fastest_of, (limit,)) for limit in self.limits)]

        def run(_: Array, carry: tuple[Plan, Array]) -> tuple[Plan, Array]:
            plan, bounds = carry
            # All ranks take the same branch: counts and plan are equal on all ranks, and times are integers.
            choice = self._choice(bounds, plan, self.time(plan))
            tried = iota(bounds.shape[0]) == choice - 1
            plan = jax.lax.switch(choice, branches, counts, plan)
            return plan, namespace(bounds).where(tried, np.int32(MOST_COPIES), bounds)

        # A loop, so that the planners are compiled once.
        return jax.lax.fori_loop(0, MOST_PLANS, run, (plan, self._bounds(counts, plan)))[0]


def weighing(planned: PlanUnder, cost: Cost, plan: Plan, topology: Topology, max_fan_out: int | None) -> Weighing:
    """Return the comparison of the plans of a planner by a cost."""
    any_number = plan.domain * (plan.slots - plan.num_home)
    most = any_number if max_fan_out is None else min(any_number, max_fan_out)
    scale = cost.scale(topology, plan.domain, any_number)
    worthwhile = {min(cost.worthwhile_replicas(scale), most), most} if cost.is_of_device(topology) else ()
    limits = (*(limit for limit in LIMITS if limit < most), most)
    max_rows = None if cost.max_rows is None else min(cost.max_rows, INT32_MAX)
    return Weighing(planned, limits, scale, max_rows, tuple(sorted(worthwhile)))
