"""`TwoPhase` brings all tokens home while there is no plan, and those of moved experts on from there."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.collectives.peer_copy_rows import moved_rows, served_quota
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.stats import Checks
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.two_phase_schedule import PhaseConfig, serve_in_phases


@dataclass(frozen=True)
class TwoPhase(Direct):
    """Serves as plain expert parallelism does, save for experts that move: their rows go on, and their outputs return.

    FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3); take it for that balancer, or for another that leaves
    some experts at home whatever the load of the others (`Balancer.dynamic`), inside one NVLink domain. Phase 1 is the
    exchange of plain expert parallelism, which needs no plan. Then home serves its static experts; beside that, in
    phase 2, rows and weights of experts that move go to their *takers*, each in one copy. Dynamic experts are served
    where they are then. Outputs return to the home of their expert, and from there, with all others, to their tokens.
    Experts that move in part, as those of `Greedy` do, send on a part of their rows.

    A receive buffer must take the load as it was *before* balancing: a rank that homes `m` times the mean takes
    `ceil(m / headroom)` rounds. So give more headroom than elsewhere; `Direct` receives what is balanced, in less
    memory, and hides no copies.

    Args:
        headroom: rows that a rank can receive from phase 1 in one round, over the mean. 1.5 is usual: ranks then have
            up to half more than the mean before balancing. `max_rounds` counts these rounds.
        moved_headroom: rows that a rank can take from others, over the mean, in all rounds together; 1, the default, is
            usual. What a rank has no room for stays at home and is served there: no token is lost, and the load is
            less level. `Stats` say what was served.

    Examples:
        >>> from jax_moe_lb import System
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.transport import PeerCopy
        >>> dispatch = System(FEPLB(), PeerCopy(), TwoPhase(headroom=1.5), replica_slots=4).dispatch
        >>> dispatch.capacity(4096 * 8), dispatch.room(4096 * 8)
        (49152, 32768)
    """

    headroom: float = 1.5
    moved_headroom: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.moved_headroom < math.inf:
            raise ValueError(f"moved_headroom is {self.moved_headroom}; expected a finite number above 0")
        if self.wire is not None:
            raise ValueError(f"wire is {self.wire}; expected None: peer copies carry rows as they are")

    def room(self, num_copies: int) -> int:
        """Computes how many rows of other ranks' experts a rank can take.

        Args:
            num_copies: `T * K`, the copies of every rank.
        """
        return replace(self, headroom=self.moved_headroom).capacity(num_copies)

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
        """Brings all copies home while there is no plan, then those of moved experts on; see `Dispatch.serve`.

        Raises:
            ValueError: the plan sprays over rails.
        """
        dynamic = balancer.dynamic(plan)
        ways = PhaseConfig.of(self, balancer, replicate, plan, topology, checks)
        # A planner that runs beside the static wave keeps no state, so there is nothing to ask the balancer for then.
        if ways.planner is None:
            with jax.named_scope("plan"):
                plan, state = balancer.rebalance(routed.counts, plan, topology, state)
        if plan.rails is not None:
            raise ValueError("plan.rails is set; expected None, as TwoPhase does not spray")
        room = self.room(routed.experts.size)
        outputs, outcome = serve_in_phases(x, experts, routed, dynamic, plan, ways, room)
        rounds, made = outcome.phases.receipt.rounds, outcome.made
        return Served(outputs, outcome.plan, rounds, made, dynamic, outcome.is_legal, outcome.is_whole), state

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Returns all rows on their way home, then those of dynamic experts from there; see `Dispatch.waves`.

        Raises:
            ValueError: the plan is not legal, or takes a static expert from home.
        """
        dynamic = np.asarray(balancer.dynamic(start))
        check_plan(plan, counts, dynamic)
        num_ranks, num_home = plan.num_ranks, plan.num_home
        room = self.room(int(counts.sum(1).max()))
        # Where the rows of an expert start decides nothing about how many move.
        quota = jnp.asarray(plan.quota)
        moved = moved_rows(jnp.asarray(plan.placement), quota, jnp.asarray(counts[0]), room)
        served = np.asarray(served_quota(quota, moved))
        at_home = np.repeat(np.eye(num_ranks, dtype=counts.dtype), num_home, 1) * counts.sum(0, dtype=counts.dtype)
        moving = replace(plan, quota=np.where(dynamic[:, None], served, 0))
        return [(counts, replace(start, quota=at_home.T)), (np.where(dynamic[None], at_home, 0), moving)]

    @property
    def passes_home(self) -> bool:
        """Says yes: rows of the second wave come from the homes of their experts, and their outputs return there."""
        return True

    def buffer_rows(self, num_copies: int) -> int:
        """Counts the rows that a rank has room for: those that come home, and those that it takes from others.

        Args:
            num_copies: `T * K`, the copies of every rank.
        """
        return self.capacity(num_copies) + self.room(num_copies)
