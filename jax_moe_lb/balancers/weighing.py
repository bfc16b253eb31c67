"""Selection of the plan with the least time, among plans under limits on the replicas of a rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb.balancers.cost import Cost, TimeScale, lowest_max_load, moved_copies, received
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.plan import BoolScalar, IntScalar, Plan, load
from jax_moe_lb.core.topology import INT32_MAX, Topology
from jax_moe_lb.core.types import AnyArray, Counts, Placement, Quota, namespace
from jax_moe_lb.planners.base import is_on_host
from jax_moe_lb.planners.exact import Placements, Quotas

LIMITS = (1, 2, 3, 5, 8, 13, 21)
"""Numbers of replicas sent and received by a rank to try, beside any number."""

LEAST_SHARE = 50
"""Inverse share of the mean load from which on the time of one replica is worth plans under limits."""

PlanUnder = Callable[[Counts, Plan, tuple[int, ...]], tuple[Placements, Quotas]]
"""Planner: placements and quotas under each limit on the replicas sent and received by a rank."""


@dataclass(frozen=True)
class Weighing:
    """Plans of a planner under limits of replicas, compared by time in token copies."""

    planned: PlanUnder
    limits: tuple[int, ...]  # ascending; the last one is no limit
    scale: TimeScale
    max_rows: int | None
    in_kernel: bool  # whether a kernel of NVIDIA GPUs makes all plans at once

    def fastest(self, counts: Counts, plan: Plan) -> Plan:
        """Return the plan with the least time, in NumPy and in programs."""
        if is_on_host(counts, plan.placement, plan.quota):
            return self._fastest_of_all(counts, plan) if self._may_pay(counts, plan) else plan
        # Compared plans must vary over the same mesh axes.
        counts, placement, quota = alike(counts, plan.placement, plan.quota)
        plan = replace(plan, placement=placement, quota=quota)
        if self.in_kernel:
            # Outside of CUDA graphs a branch waits for the host, and the kernel takes less than that.
            return self._fastest_of_all(counts, plan)
        # All ranks take the same branch: counts and plan are equal on all ranks, and times are integers.
        return jax.lax.cond(self._may_pay(counts, plan), lambda: self._fastest_of_all(counts, plan), lambda: plan)

    def time(self, plan: Plan) -> IntScalar:
        """Return the time of a plan."""
        loads = load(plan)
        served = loads + np.int32(self.scale.slot) * received(plan)
        return served.max() + moved_copies(plan, self.scale) + self.scale.rounds(loads.max())

    def _may_pay(self, counts: Counts, plan: Plan) -> BoolScalar:
        """Return whether a lower bound on the time of other plans is below that of this one."""
        lowest = lowest_max_load(plan)
        least = lowest + self.scale.table[1] + np.int32(self.scale.one_copy) + self.scale.rounds(lowest)
        # A plan without replicas serves the loads of the homes.
        homes = counts.sum(0, dtype=np.int32).reshape(plan.num_ranks, plan.num_home).sum(1, dtype=np.int32).max()
        pays = namespace(homes).minimum(least, homes + self.scale.rounds(homes)) < self.time(plan)
        return pays if self.max_rows is None else pays | (load(plan).max() > self.max_rows)

    def _fastest_of_all(self, counts: Counts, plan: Plan) -> Plan:
        """Return the fastest of the plans under all limits and the old one, without branches."""
        xp, (placements, quotas) = namespace(plan.quota), self.planned(counts, plan, self.limits)

        def measured(placement: Placement, quota: Quota) -> tuple[IntScalar, IntScalar]:
            other = replace(plan, placement=placement, quota=quota)
            return self.time(other), load(other).max()

        if xp is np:
            others = [measured(*other) for other in zip(placements, quotas, strict=True)]
            times, max_loads = map(np.array, zip(*others, strict=True))
        else:
            times, max_loads = jax.vmap(measured)(placements, quotas)
        time, max_load = measured(plan.placement, plan.quota)
        best = self._best(xp.append(time, times), xp.append(max_load, max_loads))
        new = replace(plan, placement=placements[best - 1], quota=quotas[best - 1])
        return jax.tree.map(lambda new, old: xp.where(best > 0, new, old), new, plan)

    def _best(self, times: Int[AnyArray, "N"], max_loads: Int[AnyArray, "N"]) -> IntScalar:
        """Return the index of the least time, or of the lowest maximum if a rank cannot serve the rows of any."""
        xp = namespace(times)
        if self.max_rows is None:
            return xp.argmin(times)
        is_served = max_loads <= self.max_rows
        return xp.argmin(xp.where(is_served.any(), xp.where(is_served, times, np.int32(INT32_MAX)), max_loads))


def weighing(
    planned: PlanUnder, cost: Cost, plan: Plan, topology: Topology, max_fan_out: int | None, in_kernel: bool
) -> Weighing:
    """Return the comparison of the plans of a planner by a cost."""
    any_number = plan.domain * (plan.slots - plan.num_home)
    most = any_number if max_fan_out is None else min(any_number, max_fan_out)
    scale = cost.scale(topology, plan.domain, any_number)
    # With cheaper replicas a limit saves less than the longer time of the planner.
    is_cheap = LEAST_SHARE * (int(scale.table[1]) + scale.one_copy) < (cost.num_copies or 0)
    limits = (*(limit for limit in LIMITS if limit < most and not is_cheap), most)
    max_rows = None if cost.max_rows is None else min(cost.max_rows, INT32_MAX)
    return Weighing(planned, limits, scale, max_rows, in_kernel)
