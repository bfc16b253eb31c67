"""Plans of a system on a host, as NumPy arrays, for the simulator and for reports on compiled programs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.core.validation import check_plans
from jax_moe_lb.layer.systems import System


class HostPlan(NamedTuple):
    """Plan of one layer."""

    plan: Plan  # plan with the relays of the system's replication
    waves: list[tuple[Counts, Plan]]  # counts and plan of each wave of tokens; see `TransportCost.waves`
    state: State  # state of the balancer after the plan


def plan_on_host(
    system: System, counts: Counts, topology: Topology, num_home: int | None = None, state: State | None = None
) -> HostPlan:
    """Compute the plan of a layer with the system's own balancer."""
    (found,) = plan_groups(system, [counts], topology, num_home, [state])
    return found


def plan_groups(
    system: System,
    counts: Sequence[Counts],
    topology: Topology,
    num_home: int | None = None,
    states: Sequence[State | None] | None = None,
) -> list[HostPlan]:
    """Compute the plans of several groups of ranks with equal topologies; see `plan_on_host`."""
    num_experts, cost = counts[0].shape[1], system.dispatch.cost()
    num_home = num_experts // topology.num_ranks if num_home is None else num_home
    slots = num_home + system.limit_slots(num_experts, num_home).replica_slots
    starts = [plain_plan(routed, topology, slots) for routed in counts]
    made = []
    for routed, start, state in zip(counts, starts, states or [None] * len(counts), strict=True):
        before = system.balancer.init(routed.shape) if state is None else state
        plan, after = system.balancer.rebalance(routed, start, topology, before)
        # A balancer may return JAX arrays; the rest runs on NumPy arrays on the host.
        made.append((jax.tree.map(np.asarray, plan), after))
    check_plans([plan for plan, _ in made], counts)
    found = []
    for routed, start, (plan, after) in zip(counts, starts, made, strict=True):
        # Unsigned quotas would wrap in differences.
        plan = jax.tree.map(np.int32, plan)
        waves = cost.waves(routed, start, plan, system.balancer)
        plan = system.replicate.plan(plan) if plan.slots > num_home else plan
        found.append(HostPlan(plan, waves, after))
    return found
