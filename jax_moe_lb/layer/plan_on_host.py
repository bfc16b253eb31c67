"""Plans of a system on a host, as NumPy arrays, for the simulator and for reports on compiled programs."""

from typing import NamedTuple

import jax
import numpy as np

from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.layer.systems import System


class HostPlan(NamedTuple):
    """Plan of one layer.

    Args:
        plan: Plan with the relays of the system's replication.
        waves: Counts and plan of each wave of tokens; see `TransportCost.waves`.
        state: State of the balancer after the plan.
    """

    plan: Plan
    waves: list[tuple[Counts, Plan]]
    state: State


def plan_on_host(
    system: System, counts: Counts, topology: Topology, num_home: int | None = None, state: State | None = None
) -> HostPlan:
    """Compute the plan of a layer with the system's own balancer.

    Args:
        system: System whose balancer makes the plan, whose replication may add relays, and whose dispatch gives the
            waves.
        counts: `[R, E]` int32, token copies from each rank to each expert.
        topology: Ranks of the layer.
        num_home: Home experts `L` of a rank, including gathered ones; `E / R` (default).
        state: State of the balancer; None (default) before the first step.

    Raises:
        ValueError: The balancer rejects the counts, or its plan is not legal.
    """
    num_home = counts.shape[1] // topology.num_ranks if num_home is None else num_home
    # A single rank has all experts at home, and no rank needs an expert twice.
    slots = num_home + (system.replica_slots if topology.num_ranks > 1 else 0)
    start = plain_plan(counts, topology, min(slots, counts.shape[1]))
    state = system.balancer.init(counts.shape) if state is None else state
    plan, state = system.balancer.rebalance(counts, start, topology, state)
    # A balancer may return JAX arrays; the rest runs on NumPy arrays on the host.
    plan = jax.tree.map(np.asarray, plan)
    waves = system.dispatch.cost().waves(counts, start, plan, system.balancer)
    return HostPlan(system.replicate.plan(plan) if plan.slots > num_home else plan, waves, state)
