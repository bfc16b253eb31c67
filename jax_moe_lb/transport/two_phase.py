"""`TwoPhase`: all tokens to the homes of their experts without a plan, then rows of moved experts on from there."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.collectives.peer_copy_rows import moved_rows, served_quota
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, Quota, State, Tokens
from jax_moe_lb.core.validation import check_plan
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.exchange import Buffers
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.two_phase_schedule import PhaseConfig, serve_in_phases


@dataclass(frozen=True)
@checked_fields
class TwoPhase(Direct):
    """FEPLB's Two-Phase Dispatch: plain expert parallelism, except that rows of moved experts go on to other ranks.

    Use it inside one NVLink domain with `FEPLB`, or with another balancer that keeps some experts at home at any load
    (`Balancer.dynamic`).

    Phase 1 is the exchange of plain expert parallelism, which needs no plan. Each home then serves its static experts.
    Concurrently, in phase 2, rows and weights of moved experts go to their *takers*, in one copy each. The takers and
    homes then serve the dynamic experts. Outputs return to the home of their expert, and from there, with all others,
    to their tokens. Partly moved experts, as those of `Greedy`, send on a part of their rows.

    Phase 1 receives the load *before* balancing: a rank whose home load is `m` times the mean runs
    `ceil(m / headroom)` rounds. So use a larger headroom than elsewhere. `Direct` receives the balanced load in less
    memory, but does not overlap its copies.

    Args:
        buffers: receive buffer of phase 1. Its headroom is 1.5 by default, for loads up to 1.5 x mean before balancing.
            `max_rounds` limits the rounds of phase 1.
        transfer: must be `None` (default): peer copies do not quantize rows.
        moved_headroom: rows that a rank can take from others in all rounds together, relative to the mean load; 1.0 by
            default. Rows beyond it stay at home and are served there, which leaves a higher imbalance. `Stats` contain
            the served quota.

    Raises:
        ValueError: `moved_headroom` is not positive and finite, or `transfer` is not `None`.

    Reference:
        FEPLB, arXiv 2604.19654, section 3.3.

    Examples:
        >>> from jax_moe_lb import Buffers, System
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.transport import PeerCopy
        >>> dispatch = System(FEPLB(), PeerCopy(), TwoPhase(Buffers(headroom=1.5)), replica_slots=4).dispatch
        >>> dispatch.buffers.rows(4096 * 8), dispatch.room(4096 * 8)
        (49152, 32768)
    """

    takes_chunks: ClassVar[bool] = False
    takes_saved: ClassVar[bool] = False

    buffers: Buffers = field(default_factory=lambda: Buffers(headroom=1.5))
    moved_headroom: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.moved_headroom < math.inf:
            raise ValueError(f"moved_headroom is {self.moved_headroom}; expected a finite number above 0")
        if self.transfer is not None:
            raise ValueError(f"transfer is {self.transfer}; expected None, as peer copies do not quantize rows")

    def sends_one_slice_per_rank(self, topology: Topology) -> bool:
        """Return false: rows move on by their places in streams sorted by slot."""
        del topology
        return False

    def room(self, num_copies: int) -> int:
        """Return the maximum number of rows that a rank takes from other ranks.

        Args:
            num_copies: `T * K`, token copies of a rank.
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
    ) -> tuple[Served, State]:
        """Send all copies home without a plan, then rows of moved experts on; see `Dispatch.serve`.

        Raises:
            ValueError: `plan.rails` is set.
        """
        dynamic = balancer.dynamic(plan)
        ways = PhaseConfig.of(self, balancer, replicate, plan, topology)
        # A planner that runs concurrently with the static wave is stateless: skip the balancer.
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
        """Return two waves, with one buffer for rows at home and one for rows taken from other ranks."""
        return _TwoPhaseCost(self.buffers, Buffers(self.moved_headroom))


@dataclass(frozen=True)
class _TwoPhaseCost(TransportCost):
    moved: Buffers
    passes_home = True

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        # Wave 1 sends all rows home, wave 2 sends rows of dynamic experts from there.
        room = self.moved.rows(int(counts.sum(1).max()))
        dynamic, served = map(np.asarray, _dynamic_and_served(balancer, start, plan, room))
        check_plan(plan, counts, dynamic)
        num_ranks, num_home = plan.num_ranks, plan.num_home
        at_home = np.repeat(np.eye(num_ranks, dtype=counts.dtype), num_home, 1) * counts.sum(0, dtype=counts.dtype)
        moving = replace(plan, quota=np.where(dynamic[:, None], served, 0))
        return [(counts, replace(start, quota=at_home.T)), (np.where(dynamic[None], at_home, 0), moving)]

    def buffer_rows(self, num_copies: int) -> int:
        return self.buffers.rows(num_copies) + self.moved.rows(num_copies)


@partial(jax.jit, static_argnames=("balancer", "room"))
def _dynamic_and_served(balancer: Balancer, start: Plan, plan: Plan, room: int) -> tuple[Bool[Array, "E"], Quota]:
    """Return the movable experts, and the quota with the rows that do not fit `room` at home."""
    # One program takes a tenth of the time of compiling each of its operations.
    # The number of moved rows does not depend on their first row, so any offsets will do.
    first_row = jnp.zeros(plan.num_experts, jnp.int32)
    return balancer.dynamic(start), served_quota(plan.quota, moved_rows(plan.placement, plan.quota, first_row, room))
