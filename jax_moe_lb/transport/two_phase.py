"""`TwoPhase` brings all tokens home while there is no plan, and those of moved experts on from there."""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.collectives.peer_copy_rows import moved_rows, served_quota
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.stats import OnFault
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.exchange import Buffers
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
        buffers: rows that a rank can receive from phase 1 in one round; headroom 1.5 by default, for ranks whose load
            is up to half above the mean before balancing. `max_rounds` limits these rounds.
        moved_headroom: rows that a rank can take from others, over the mean, in all rounds together; 1, the default, is
            usual. What a rank has no room for stays at home and is served there: no token is lost, and the load is
            less level. `Stats` say what was served.

    Examples:
        >>> from jax_moe_lb import Buffers, System
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.transport import PeerCopy
        >>> dispatch = System(FEPLB(), PeerCopy(), TwoPhase(Buffers(headroom=1.5)), replica_slots=4).dispatch
        >>> dispatch.buffers.rows(4096 * 8), dispatch.room(4096 * 8)
        (49152, 32768)
    """

    buffers: Buffers = field(default_factory=lambda: Buffers(headroom=1.5))
    moved_headroom: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.moved_headroom < math.inf:
            raise ValueError(f"moved_headroom is {self.moved_headroom}; expected a finite number above 0")
        if self.transfer is not None:
            raise ValueError(f"transfer is {self.transfer}; expected None: peer copies carry rows as they are")

    def sends_one_slice_per_rank(self, topology: Topology) -> bool:
        """Return false: rows move on by their places in streams sorted by slot."""
        del topology
        return False

    def room(self, num_copies: int) -> int:
        """Computes how many rows of other ranks' experts a rank can take.

        Args:
            num_copies: `T * K`, the copies of every rank.
        """
        return Buffers(self.moved_headroom).rows(num_copies)

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
        on_fault: OnFault,
    ) -> tuple[Served, State]:
        """Brings all copies home while there is no plan, then those of moved experts on; see `Dispatch.serve`.

        Raises:
            ValueError: the plan sprays over rails.
        """
        dynamic = balancer.dynamic(plan)
        ways = PhaseConfig.of(self, balancer, replicate, plan, topology, on_fault)
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

    def cost(self) -> TransportCost:
        """Return two waves, with a buffer for the rows that come home and one for those of other ranks' experts."""
        return _TwoPhaseCost(self.buffers, Buffers(self.moved_headroom))


@dataclass(frozen=True)
class _TwoPhaseCost(TransportCost):
    moved: Buffers
    passes_home = True

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        # All rows on their way home, then those of dynamic experts from there.
        dynamic = np.asarray(balancer.dynamic(start))
        check_plan(plan, counts, dynamic)
        num_ranks, num_home = plan.num_ranks, plan.num_home
        room = self.moved.rows(int(counts.sum(1).max()))
        # Where the rows of an expert start decides nothing about how many move.
        quota = jnp.asarray(plan.quota)
        moved = moved_rows(jnp.asarray(plan.placement), quota, jnp.asarray(counts[0]), room)
        served = np.asarray(served_quota(quota, moved))
        at_home = np.repeat(np.eye(num_ranks, dtype=counts.dtype), num_home, 1) * counts.sum(0, dtype=counts.dtype)
        moving = replace(plan, quota=np.where(dynamic[:, None], served, 0))
        return [(counts, replace(start, quota=at_home.T)), (np.where(dynamic[None], at_home, 0), moving)]

    def buffer_rows(self, num_copies: int) -> int:
        return self.buffers.rows(num_copies) + self.moved.rows(num_copies)
