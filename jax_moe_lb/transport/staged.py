"""`Staged` serves tokens in two waves over one plan: those of static experts do not wait for it."""

from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.experts import Experts
from jax_moe_lb.faults import Checks
from jax_moe_lb.legality import check_plan
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.waves import Ways, serve_in_waves
from jax_moe_lb.types import Counts, State, Tokens


@dataclass(frozen=True)
class Staged(Direct):
    """Serves as `Direct` in two waves: tokens of static experts go home at once, the others follow with the plan.

    Take it for a balancer that leaves some experts at home whatever the load of the others, as FEPLB does
    (`Balancer.dynamic`). Wave 1 needs neither plan nor copies of weights, and where the copies need no compute
    (`PeerCopy`), they run beside it. With a balancer that is a planner in C++ (`Balancer.native_planner`) and
    `PeerCopy`, so does the planner: see `ops/plan_and_copy.py`. That is so in the compiled program; on a CPU nothing
    overlaps. A balancer whose experts are all dynamic makes wave 1 empty, and then `Direct` does the same.

    Deviates from the paper: its phase 1 brings all tokens home, and phase 2 those of moved experts from there to their
    new rank. Here tokens of dynamic experts travel once, from their source to the rank that serves them. A row that is
    served away from home then crosses once instead of twice, and no rank holds rows of others that it does not serve;
    in return, rows of dynamic experts leave their source only when the plan is there.

    Both waves use the same receive buffer, one after the other, so each takes at least a round if it has rows.

    Args:
        headroom: rows that a rank can receive in one round of either wave, over the mean; 1.05 is usual.

    Examples:
        >>> from jax_moe_lb import FEPLB, PeerCopy, System
        >>> System(FEPLB(), PeerCopy(), Staged(), replica_slots=4).dispatch.capacity(4096 * 8)
        34432
    """

    def serve(
        self,
        x: Tokens,
        routed: Routed,
        experts: Experts,
        plan: Plan,
        state: State,
        *,
        balancer: Balancer,
        replicate: Replicate,
        topology: Topology,
        checks: Checks,
    ) -> tuple[Served, State]:
        """Serves static copies while there is no plan, then the others; see `Dispatch.serve`."""
        dynamic = balancer.dynamic(plan)
        ways = Ways.of(self, balancer, replicate, plan, topology, checks)
        # A planner that runs beside wave 1 keeps no state, so there is nothing to ask the balancer for then.
        if ways.planner is None:
            plan, state = balancer.rebalance(routed.counts, plan, topology, state)
        outputs, outcome = serve_in_waves(x, experts, routed, dynamic, plan, ways)
        rounds, made = outcome.waves.rounds, outcome.made
        return Served(outputs, outcome.plan, rounds, made, dynamic, outcome.is_legal, outcome.is_whole), state

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Returns static experts at home, then dynamic ones by the plan; see `Dispatch.waves`.

        Raises:
            ValueError: the plan is not legal, or takes a static expert from home.
        """
        dynamic = np.asarray(balancer.dynamic(start))
        check_plan(plan, counts, dynamic)
        static = np.where(dynamic[None], 0, counts)
        at_home = replace(plan, quota=np.where(dynamic[:, None], 0, plan.quota))
        moving = replace(plan, quota=np.where(dynamic[:, None], plan.quota, 0))
        return [(static, at_home), (counts - static, moving)]
