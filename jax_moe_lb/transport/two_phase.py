"""`TwoPhase`: all tokens to the homes of the experts without a plan, then rows of moved experts on from there.

FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3), forward and backward, overlapped with planning and weight
copies. The exchange home depends only on the counts, as does the planner, which runs concurrently. Rows and weights of
moved experts travel during the home wave, the products of the rows that stay at home. Then the moved wave runs, and its
outputs return to the homes of their experts. From the homes, all outputs return to their tokens.

If a balancer moves the busiest experts of a rank first, as FEPLB does, the rows of the experts that may move are the
last ones of a rank's stream, the busiest at the end. The rows that stay are then the first ones, which products read in
place. Rows of other balancers may move from anywhere; the rows that stay are then copied together and back.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.collectives.peer_copy import Pending, Route, after_start, join
from jax_moe_lb.collectives.peer_copy_rows import (
    CopyWindow,
    MovedRows,
    Taken,
    move,
    move_back,
    moved_from_the_end,
    moved_rows,
    served_quota,
    start_back,
    start_onward,
)
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.collectives.ragged_all_to_all import Group, concatenated, empty_buffer, empty_buffer_after, starts
from jax_moe_lb.core.checks import Positive, checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import first_order
from jax_moe_lb.core.native_planner import NativePlanner
from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, GroupSizes, Quota, Rows, State, Tokens, iota, pytree
from jax_moe_lb.core.validation import check_plan, fallback_to_plain
from jax_moe_lb.kernels.grouped_ffn import ExpertParts, grouped_ffn
from jax_moe_lb.kernels.operands import BackwardRows
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.direct import Direct, DirectReceipt
from jax_moe_lb.transport.dispatch import Routed, Served, check_rails
from jax_moe_lb.transport.exchange import (
    Buffers,
    Copies,
    RoutingWeights,
    combine,
    sum_of_copies,
    to_sending_order,
    weights_by_token,
    weights_in_order,
)
from jax_moe_lb.transport.one_round import Batch, OfCopies
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import overflow_rounds
from jax_moe_lb.transport.slot_weights import (
    Slots,
    added,
    apart_by_home,
    at_home,
    dtype_of_sums,
    optimization_barrier,
    widened,
)


@dataclass(frozen=True)
@checked_fields
class TwoPhase(Direct):
    """FEPLB's Two-Phase Dispatch: plain expert parallelism, except that rows of moved experts go on to other ranks.

    Use it inside one NVLink domain with `FEPLB`, or with another balancer that keeps some experts at home at any load
    (`Balancer.dynamic`).

    Phase 1 is the exchange of plain expert parallelism, which needs no plan. Each home then serves the rows that stay.
    Concurrently, in phase 2, rows and weights of moved experts go to their *takers*, in one copy each. The takers then
    serve them. Outputs return to the home of their expert, and from there, with all others, to their tokens. Partly
    moved experts, as those of `Greedy`, send on a part of their rows.

    Phase 1 receives the load *before* balancing: a rank whose home load is `m` times the mean runs
    `ceil(m / headroom)` rounds. So use a larger headroom than elsewhere. `Direct` receives the balanced load in less
    memory, but does not overlap its copies.

    Args:
        buffers: receive buffer of phase 1. Its headroom is 2.0 by default, for loads up to 2 x mean before balancing.
            `max_rounds` limits the rounds of phase 1.
        transfer: must be `None` (default): peer copies do not quantize rows.
        moved_headroom: rows that a rank can take from others in all rounds together, relative to the mean load; 1.0 by
            default. Rows beyond it stay at home and are served there, which leaves a higher imbalance. If a balancer
            moves busiest experts first, so do less busy ones of the same home. `Stats` contain the served quota.

    Raises:
        ValueError: `moved_headroom` is not positive and finite, or `transfer` is not `None`.

    Reference:
        FEPLB, arXiv 2604.19654, section 3.3.

    Examples:
        >>> from jax_moe_lb import Buffers, System
        >>> from jax_moe_lb.balancers import FEPLB
        >>> from jax_moe_lb.transport import PeerCopy
        >>> dispatch = System(FEPLB(), PeerCopy(), TwoPhase(Buffers(headroom=2.0)), replica_slots=4).dispatch
        >>> dispatch.buffers.rows(4096 * 8), dispatch.room(4096 * 8)
        (65536, 32768)
    """

    takes_chunks: ClassVar[bool] = False
    takes_saved: ClassVar[bool] = False

    buffers: Buffers = field(default_factory=lambda: Buffers(headroom=2.0))
    moved_headroom: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transfer is not None:
            raise ValueError(f"transfer is {self.transfer}; expected None, as peer copies do not quantize rows")

    def sends_one_slice_per_rank(self, topology: Topology) -> bool:
        """Return false: rows move on by the places in streams sorted by slot."""
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
        config = PhaseConfig.of(self, balancer, replicate, plan, topology)
        # A planner that runs concurrently with the exchange home is stateless: skip the balancer.
        if config.planner is None:
            with jax.named_scope("plan"):
                plan, state = balancer.rebalance(routed.counts, plan, topology, state)
        check_rails(plan, self)
        room = self.room(routed.experts.size)
        outputs, outcome = serve_in_phases(x, experts, routed, dynamic, plan, config, room)
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
        # Wave 1 sends all rows home, wave 2 sends the rows that move on from there.
        room = self.moved.rows(int(counts.sum(1).max()))
        dynamic, taken = map(np.asarray, _dynamic_and_taken(balancer, start, plan, room))
        check_plan(plan, counts, dynamic)
        is_home = np.repeat(np.eye(plan.num_ranks, dtype=counts.dtype), plan.num_home, 1)
        home = replace(start, quota=(is_home * counts.sum(0, dtype=counts.dtype)).T)
        return [(counts, home), (is_home * taken.sum(1, dtype=counts.dtype), replace(plan, quota=taken))]

    def buffer_rows(self, num_copies: int) -> int:
        return self.buffers.rows(num_copies) + self.moved.rows(num_copies)


@partial(jax.jit, static_argnames=("balancer", "room"))
def _dynamic_and_taken(balancer: Balancer, start: Plan, plan: Plan, room: int) -> tuple[Bool[Array, "E"], Quota]:
    """Return the movable experts, and the rows of each expert that each rank takes from the home."""
    # One program takes a tenth of the time of compiling each of its operations.
    num_last = balancer.busiest_moved(plan.num_home)
    streams = Streams.of(jnp.asarray(plan.quota).sum(1, dtype=jnp.int32), plan.num_ranks, num_last)
    return balancer.dynamic(start), moved_on(plan, streams, room, num_last).taken


# ---- addresses ---------------------------------------------------------------------
Dynamic = Bool[Array, "E"]
"""Whether the plan may move each expert; False for static experts, which only their homes serve."""


@pytree
class Streams:
    """Positions of the rows per expert in the stream of the home."""

    first: Int[Array, "E"]  # first row of each expert
    size: Int[Array, "E"]  # number of rows of each expert
    order: Int[Array, "R L"]  # home experts of each rank, numbered on it, in the order of its stream

    @classmethod
    def of(cls, size: Int[Array, "E"], num_ranks: int, num_last: int | None) -> "Streams":
        """Return the streams of all homes, in the order of the weights, or with the `num_last` busiest at the end."""
        by_rank = size.reshape(num_ranks, -1)
        number = jnp.broadcast_to(iota(by_rank.shape[1]), by_rank.shape)
        # The lower of equal experts is busier, as in planners, so that the busiest expert of all is the last one.
        busiest = jnp.argsort(by_rank, axis=1, descending=True, stable=True)
        place = jnp.argsort(busiest, axis=1).astype(jnp.int32)
        key = jnp.where(place < (num_last or 0), 2 * by_rank.shape[1] - place, number)
        order = jnp.argsort(key, axis=1).astype(jnp.int32)
        in_order = starts(jnp.take_along_axis(by_rank, order, 1), 1)
        first = jnp.zeros_like(by_rank).at[iota(num_ranks)[:, None], order].set(in_order)
        return cls(first.reshape(-1), size, order)

    def of_rank(self, me: Int[Array, ""]) -> tuple[Int[Array, "L"], Int[Array, "L"], Int[Array, "L"]]:
        """Return first row and number of rows of the home experts of rank `me`, and their order."""
        num_ranks = self.order.shape[0]
        first, size = (array.reshape(num_ranks, -1)[me] for array in (self.first, self.size))
        return first, size, self.order[me]


@pytree
class Phases:
    """Addresses of both phases."""

    receipt: DirectReceipt  # receipt of phase 1
    moved: MovedRows  # rows that move in phase 2
    staying: Streams  # rows of each expert that stay at home

    @classmethod
    def of(cls, receipt: DirectReceipt, streams: Streams, plan: Plan, room: int, num_last: int | None) -> "Phases":
        """Return the addresses of a plan."""
        moved = moved_on(plan, streams, room, num_last)
        taken = moved.taken.sum(1, dtype=jnp.int32)
        # Of an expert that moves in part, the first rows move, or, if all moved rows are at the end, the last ones.
        first = streams.first + taken if num_last is None else streams.first
        return cls(receipt, moved, replace(streams, first=first, size=streams.size - taken))


def moved_on(plan: Plan, streams: Streams, room: int, num_last: int | None) -> MovedRows:
    """Return the rows that move by a plan, with room for them, and at the end of the streams if these have an end."""
    moved = moved_rows(plan.placement, plan.quota, streams.first, room)
    if num_last is None:
        return moved
    return moved_from_the_end(moved, plan.placement, streams.order, streams.first, streams.size)


class HomeRows(NamedTuple):
    """Rows of a round that stay at home: the first ones of the buffer, or blocks that products require contiguous."""

    sizes: GroupSizes  # rows of each group: of each home expert, then of the copied ones
    last: Int[Array, "N"] | None  # home experts whose rows are last, in their order; their weights are copied
    of_row: Int[Array, "A"] | None = None  # source row of each row; `None` if the rows are the first ones
    to_row: Int[Array, "A"] | None = None  # position of each row after `take`; only valid if `inside`
    inside: Bool[Array, "A"] | None = None  # whether each row belongs to a block

    @classmethod
    def of(
        cls, phases: Phases, window: CopyWindow, num_rows: int, num_last: int | None, me: Int[Array, ""]
    ) -> "HomeRows":
        """Return the rows of rank `me` in a round, of a buffer of `num_rows`."""
        first, size, order = phases.staying.of_rank(me)
        first, size = window.of(first, size)
        if num_last is None:
            return cls.of_blocks(first, size, num_rows)
        last = order[order.shape[0] - num_last :]
        return cls(jnp.concatenate([size.at[last].set(0), size[last]]), last)

    @classmethod
    def of_blocks(cls, first: Int[Array, "L"], size: Int[Array, "L"], num_rows: int) -> "HomeRows":
        """Return the permutation of blocks in the order of the weights."""
        of_row, row = concatenated(first, size, num_rows), iota(num_rows)
        # Rows beyond the blocks get an index out of range, which the scatter drops.
        target = jnp.where(row < size.sum(dtype=jnp.int32), of_row, num_rows)
        to_row = jnp.full_like(row, -1).at[target].set(row, mode="drop")
        return cls(size, None, of_row, jnp.maximum(to_row, 0), to_row >= 0)

    def take(self, rows: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Return the rows contiguously; the rows after them are undefined."""
        return rows if self.of_row is None else rows[self.of_row]

    def put(self, rows: Float[Array, "A H"], out: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Write rows moved by `take` back to the positions in `out`."""
        if self.to_row is None or self.inside is None:
            return rows
        return jnp.where(self.inside[:, None], rows[self.to_row], out)

    def slots(self, experts: Experts) -> Slots:
        """Return the weights of all groups."""
        if self.last is None:
            return Slots(experts, None)
        # In the loop of rounds the barrier keeps XLA from hoisting the copies.
        last = optimization_barrier(self.sizes, self.last)
        return Slots(experts, jax.tree.map(lambda weights: weights[last], experts))

    def gradients(self, of_groups: Experts | ExpertParts, num_home: int) -> Experts:
        """Return the gradients of the home experts; each is in one group, and 0 in the other."""
        of_home, of_last = apart_by_home(of_groups, num_home)
        last = self.last
        if last is None or of_last is None:
            return of_home
        return jax.tree.map(lambda home, part: home[:num_home].at[last].set(part), of_home, of_last)


def address_home(
    direct: Direct, experts: Int[Array, "T K"], counts: Counts, num_last: int | None, topology: Topology
) -> tuple[DirectReceipt, Streams]:
    """Compute the home destination of every copy of this rank, without a plan."""
    plan = plain_plan(counts, topology)
    streams = Streams.of(counts.sum(0, dtype=jnp.int32), topology.num_ranks, num_last)
    in_order = plan.placement[:, :1] + streams.order
    return direct.address(experts, counts, replace(plan, placement=in_order), topology), streams


# ---- both phases -------------------------------------------------------------------
class PhaseConfig(NamedTuple):
    """Transports and planner: the static, hashable arguments of `serve_in_phases`."""

    direct: Direct  # dispatch of the tokens
    replicate: Replicate  # replication of the weights
    planner: NativePlanner | None  # planner that runs concurrently with the exchange; `None` if the plan already exists
    # Busiest experts of a rank whose rows are last in its stream; `None` if any may move. See `Balancer.busiest_moved`.
    num_last: int | None
    # Ranks of the copies of rows and weights that overlap with products; `None` if exchanges move the rows
    route: Route | None
    topology: Topology  # topology of the layer; rows and weights travel between the ranks of its expert axes

    @classmethod
    def of(
        cls,
        direct: Direct,
        balancer: Balancer,
        replicate: Replicate,
        plan: Plan,
        topology: Topology,
    ) -> "PhaseConfig":
        """Create the configuration, with a planner if one can run concurrently with the exchange."""
        # This requires a native planner for the whole balancer, a route that spans all ranks, and replica slots.
        route = replicate.route(topology) if plan.slots > plan.num_home else None
        # One planner serves all ranks of its copies.
        alone = route is not None and route.domain is None
        planner = balancer.native_planner(plan.domain) if alone else None
        return cls(direct, replicate, planner, balancer.busiest_moved(plan.num_home), route, topology)


class PhaseOutcome(NamedTuple):
    """Result of `serve_in_phases` besides the outputs."""

    plan: Plan  # legal plan of the served copies
    made: Plan  # plan returned by the planner or balancer
    phases: Phases  # addresses of both phases
    is_legal: Bool[Array, ""]  # whether `made` was legal
    is_whole: Bool[Array, ""]  # whether all rounds of the plan were run


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def serve_in_phases(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, config: PhaseConfig, room: int
) -> tuple[Tokens, PhaseOutcome]:
    """Send every token copy home and onward by the plan, and sum the expert outputs per token."""
    # The residuals are tokens, home weights, plan and receipts. The backward pass replays this plan. It copies the
    # weights again, concurrently with the gradients of rows that stay at home, and adds gradients of replicas at home.

    # Under `vmap`, microbatches run sequentially: `post`, its copies and `join` belong together.
    @jax.custom_batching.sequential_vmap
    def serve(
        tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan
    ) -> tuple[Tokens, PhaseOutcome]:
        return _serve(tokens, experts, routed, dynamic, plan, config, room)

    return serve(tokens, experts, routed, dynamic, plan)


# ---- forward -----------------------------------------------------------------------
class _Forward(NamedTuple):
    """Inputs of all rounds of the forward pass, available before the plan."""

    config: PhaseConfig
    experts: Experts
    tokens: Tokens
    routed: Routed
    receipt: DirectReceipt

    def come_home(self, i: Array) -> Rows:
        """Send the copies of round `i` home."""
        with jax.named_scope("dispatch/come_home"):
            copies = to_sending_order(self.tokens, self.receipt, self.routed.experts.shape[1])
            return self.config.direct.send(copies, self.receipt, i, self.config.topology)[0]

    def home_wave(self, rows: Rows, at_home: HomeRows) -> Rows:
        """Compute the outputs of the rows that stay at home, with home weights only; other rows are undefined."""
        with jax.named_scope("experts/home_wave"):
            experts = at_home.slots(self.experts).weights(at_home.sizes)
            return at_home.put(grouped_ffn(at_home.take(rows), experts, at_home.sizes), rows)

    def finish(self, i: Array, out: Rows, moved: "_Arrived", copies: Copies) -> Copies:
        """Compute the outputs of moved rows, and send all outputs back."""
        config, phases = self.config, moved.phases
        if moved.slots is not None and moved.rows is not None:
            with jax.named_scope("experts/moved_wave"):
                served = grouped_ffn(moved.rows, moved.slots, _taken(phases, i, out, config))
                _, returning = _start_back((served,), (out,), phases, i, config)
                (out,) = _arrived(returning, ())
        with jax.named_scope("combine"):
            return config.direct.send_back(out, self.receipt, i, copies, config.topology)


class _Arrived(NamedTuple):
    """Rows and weights taken from other ranks in a round."""

    phases: Phases
    slots: Experts | None
    rows: Taken | None


def _serve(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, config: PhaseConfig, room: int
) -> tuple[Tokens, PhaseOutcome]:
    direct, planner, route = config.direct, config.planner, config.route
    with jax.named_scope("address"):
        receipt, streams = address_home(direct, routed.experts, routed.counts, config.num_last, config.topology)
        is_whole = direct.within_rounds(receipt)
    first = jnp.int32(0)
    pending: Any
    if planner is not None and route is not None:
        # The exchange reads the receipt returned by `post`, which orders it after `post`.
        with jax.named_scope("plan"):
            receipt, posted = post(plan.placement, plan.quota, experts, receipt, planner=planner, route=route)
        forward = _Forward(config, experts, tokens, routed, receipt)
        # The rows order `plan_and_copy` after the exchange; the plan depends on the inputs of `post` only.
        rows = forward.come_home(first)
        with jax.named_scope("plan"):
            rows, tables, pending = plan_and_copy(posted, rows)
            made = replace(plan, placement=tables[0], quota=tables[1])
            plan, is_legal = fallback_to_plain(made, routed.counts, dynamic)
    else:
        made = plan
        with jax.named_scope("plan"):
            plan, is_legal = fallback_to_plain(made, routed.counts, dynamic)
        # Start the copies before the exchange and join them after the wave, to overlap them with both.
        tokens, pending = _start(experts, plan, config, tokens)
        forward = _Forward(config, experts, tokens, routed, receipt)
        rows = forward.come_home(first)
    phases = Phases.of(receipt, streams, plan, room, config.num_last)
    # The wave reads the sizes, which orders it after the start of the row copies.
    staying, onward = _start_onward((rows,), phases, first, room, config, _home_rows(phases, first, rows, config))
    out = forward.home_wave(rows, staying)
    slots = _join(pending, out, config)
    (taken,) = _arrived(onward, out)
    # In the loop, exchanges move the rows: they need no host, so CUDA graphs can contain them.
    by_exchange = forward._replace(config=config._replace(route=None))

    def one_round(i: Array, carry: tuple[Copies, None]) -> tuple[Copies, None]:
        rows = forward._replace(tokens=optimization_barrier(i, tokens)).come_home(i)
        _, onward = _start_onward((rows,), phases, i, room, by_exchange.config, ())
        (taken,) = _arrived(onward, ())
        out = forward.home_wave(rows, _home_rows(phases, i, rows, config))
        return by_exchange.finish(i, out, _Arrived(phases, slots, taken), carry[0]), None

    nothing = empty_buffer(tokens, routed.experts.size)
    copies = forward.finish(first, out, _Arrived(phases, slots, taken), nothing)
    copies, _ = overflow_rounds(receipt, direct, one_round, (copies, None))
    served = replace(plan, quota=served_quota(plan.quota, phases.moved))
    with jax.named_scope("combine"):
        outputs = combine(copies, routed.weights, receipt)
    return outputs, PhaseOutcome(served, made, phases, is_legal, is_whole)


@jax.named_scope("replicate")
def _start(experts: Experts, plan: Plan, config: PhaseConfig, before: Tokens) -> tuple[Tokens, Any]:
    """Start the copies; return `before`, whose users run after that, and the copies or `None`."""
    if plan.slots == plan.num_home:
        return before, None
    pending = config.replicate.start(experts, plan, config.topology)
    return after_start(pending, before) if isinstance(pending, Pending) else (before, pending)


@jax.named_scope("replicate")
def _join(pending: Any, after: PyTree, config: PhaseConfig) -> Experts | None:
    return None if pending is None else config.replicate.join(pending, after)


PendingRows = tuple[Array | None, ...] | Pending
"""Rows in transfer, for `_arrived`: arrived arrays, `None`s without replica slots, or an input of `join`."""


def _start_onward(
    parts: tuple[Array, ...], phases: Phases, i: Array, room: int, config: PhaseConfig, before: PyTree
) -> tuple[PyTree, PendingRows]:
    """Send rows of round `i` on to the takers; return `None`s without replica slots."""
    moved = phases.moved
    if moved.home.shape[1] == 0:
        return before, (None,) * len(parts)
    window = _window(i, parts[0])
    if config.route is not None:
        with jax.named_scope("rows_onward/dispatch"):
            return start_onward(parts, room, moved, window, before, route=config.route)
    group = Group.of(config.topology)
    with jax.named_scope("dispatch"):
        return before, tuple(move(part, moved, window, empty_buffer(part, room), group) for part in parts)


def _start_back(
    parts: tuple[Array, ...],
    into: tuple[Array, ...],
    phases: Phases,
    i: Array,
    config: PhaseConfig,
    before: PyTree = (),
) -> tuple[PyTree, PendingRows]:
    """Return results of moved rows to the home positions in round `i`; the transpose of `_start_onward`."""
    window = _window(i, into[0])
    if config.route is not None:
        with jax.named_scope("rows_back/combine"):
            return start_back(parts, into, phases.moved, window, before, route=config.route)
    group = Group.of(config.topology)
    with jax.named_scope("combine"):
        pairs = zip(parts, into, strict=True)
        return before, tuple(move_back(part, phases.moved, window, out, group) for part, out in pairs)


def _arrived(rows: PendingRows, after: PyTree) -> tuple[Any, ...]:
    return join(rows, after) if isinstance(rows, Pending) else rows


def _window(i: Array, rows: Rows) -> CopyWindow:
    """Return the part of the streams in the receive buffers of round `i`."""
    capacity = rows.shape[0]
    return CopyWindow(i * capacity, (i + 1) * capacity)


def _home_rows(phases: Phases, i: Array, rows: Rows, config: PhaseConfig) -> HomeRows:
    """Return the rows of round `i` that stay on this rank."""
    me = jax.lax.axis_index(config.topology.expert_axes)
    return HomeRows.of(phases, _window(i, rows), rows.shape[0], config.num_last, me)


def _taken(phases: Phases, i: Array, rows: Rows, config: PhaseConfig) -> Int[Array, "P"]:
    """Return the number of rows per replica slot of this rank in round `i`."""
    sizes = _window(i, rows).of(phases.moved.first, phases.moved.size)[1]
    return sizes[jax.lax.axis_index(config.topology.expert_axes)]


# ---- backward ----------------------------------------------------------------------
PhaseResiduals = tuple[Tokens, RoutingWeights, Experts, Plan, Phases]


def _save(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, config: PhaseConfig, room: int
) -> tuple[tuple[Tokens, PhaseOutcome], PhaseResiduals]:
    out, outcome = serve_in_phases(tokens, experts, routed, dynamic, plan, config, room)
    return (out, outcome), (tokens, routed.weights, experts, outcome.plan, outcome.phases)


def _backward(
    config: PhaseConfig, room: int, saved: PhaseResiduals, gradients: tuple[Tokens, Any]
) -> tuple[Tokens, Experts, Routed, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: PhaseResiduals, upstream: Tokens) -> tuple[Tokens, RoutingWeights, Experts]:
        return _gradients(config, room, saved, upstream)

    of_tokens, of_weights, of_experts = first_order(pull_back)(saved, gradients[0])
    none: Any = None  # Experts and counts are integers, without gradients.
    return of_tokens, of_experts, Routed(none, none, of_weights), None, None


class _Backward(NamedTuple):
    """Inputs of all rounds of the backward pass."""

    config: PhaseConfig
    batch: Batch
    experts: Experts
    phases: Phases
    has_replica: Bool[Array, "S"]
    is_first: bool = True

    @jax.named_scope("dispatch")
    def come_home(self, i: Array) -> tuple[Array, ...]:
        """Send copies, their weights and the output gradients home, in round `i`."""
        (tokens, weights, upstream), receipt = self.batch, self.phases.receipt
        per_token = weights.shape[1]
        copies = (
            to_sending_order(tokens, receipt, per_token),
            weights_in_order(weights, receipt),
            to_sending_order(upstream, receipt, per_token),
        )
        return tuple(self.config.direct.send(part, receipt, i, self.config.topology)[0] for part in copies)

    def at_home(self, parts: tuple[Array, ...], rows: HomeRows) -> tuple[tuple[Array, ...], Experts]:
        """Compute the gradients of the rows that stay at home."""
        with jax.named_scope("experts/home_wave"):
            taken, fused = tuple(map(rows.take, parts)), self._gate_goes_in_up(parts[0])
            *of_rows, of_groups = self._gradients(taken, rows.slots(self.experts), rows.sizes, fused)
            of_experts = rows.gradients(of_groups, self.experts.up.shape[0])
            return tuple(rows.put(part, part) for part in of_rows), of_experts

    def finish(
        self, i: Array, of_rows: tuple[Array, ...], parts: tuple[Any, ...], slots: Experts | None, out: OfCopies
    ) -> Any:
        """Compute the gradients of moved rows, and send all gradients back."""
        config, phases, of_slots = self.config, self.phases, None
        rows = of_rows[0]
        if slots is not None:
            with jax.named_scope("experts/moved_wave"):
                fused = self._gate_goes_in_up(rows)
                filled, sizes = Slots(slots, None, self.has_replica), _taken(phases, i, rows, config)
                *of_moved, of_slots = self._gradients(parts, filled, sizes, fused)
            _, returning = _start_back(tuple(of_moved), of_rows, phases, i, config)
            of_rows = _arrived(returning, ())
        back = partial(config.direct.send_back, receipt=phases.receipt, i=i, topology=config.topology)
        with jax.named_scope("combine"):
            return tuple(back(part, out=into) for part, into in zip(of_rows, out, strict=True)), of_slots

    def _gate_goes_in_up(self, rows: Rows) -> bool:
        # Both waves use the same form, because their gradients are added.
        return Slots(self.experts, None).fuse_gate_up(rows)

    def _gradients(self, parts: tuple[Array, ...], slots: Slots, sizes: Array, fused: bool) -> tuple[Rows, Array, Any]:
        dtype = dtype_of_sums(self.experts, self.config.direct, is_first=self.is_first)
        rows, weights, upstream = parts
        return slots.gradients(BackwardRows(rows, weights, upstream), sizes, dtype, fused=fused)


@jax.named_scope("backward")
def _gradients(
    config: PhaseConfig, room: int, saved: PhaseResiduals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Compute the gradients of tokens, weights and home experts, in the rounds of the forward pass."""
    tokens, weights, experts, plan, phases = saved
    again = config.replicate.again()
    route = None if config.route is None else again.route(config.topology)
    config = config._replace(replicate=again, route=route)
    # Without the barrier, XLA merges these replicas and rows with the equal ones of the forward pass and keeps them
    # until now. The barrier ties them to the gradients, which exist only in the backward pass.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    upstream, pending = _start(experts, plan, config, upstream)
    has_replica = plan.placement[jax.lax.axis_index(config.topology.expert_axes), plan.num_home :] >= 0
    backward = _Backward(config, Batch(tokens, weights, upstream), experts, phases, has_replica)
    first = jnp.int32(0)
    nothing = empty_buffer_after(tokens, weights.size), empty_buffer(weights.reshape(-1, 1), weights.size)
    parts = backward.come_home(first)
    # The wave at home reads the blocks, which orders it after the start of the row copies.
    staying, onward = _start_onward(parts, phases, first, room, config, _home_rows(phases, first, parts[0], config))
    of_rows, of_home = backward.at_home(parts, staying)
    slots = _join(pending, of_rows, config)
    moved = _arrived(onward, of_rows)
    of_copies, of_slots = backward.finish(first, of_rows, moved, slots, nothing)
    by_exchange = backward._replace(config=config._replace(route=None), is_first=False)

    def one_round(i: Array, carry: tuple[OfCopies, Any]) -> tuple[OfCopies, Any]:
        parts = by_exchange._replace(batch=optimization_barrier(i, by_exchange.batch)).come_home(i)
        staying, onward = _start_onward(
            parts, phases, i, room, by_exchange.config, _home_rows(phases, i, parts[0], config)
        )
        of_rows, of_home = by_exchange.at_home(parts, staying)
        of_copies, of_slots = by_exchange.finish(i, of_rows, _arrived(onward, of_rows), slots, carry[0])
        return of_copies, added(carry[1], (of_home, of_slots))

    carry = of_copies, (of_home, of_slots)
    (of_copies, of_weights), (home, of_slots) = overflow_rounds(
        phases.receipt, config.direct, one_round, carry, widened
    )
    home = at_home(experts, home, of_slots, plan, config.replicate, config.topology)
    per_token = weights.shape[1]
    with jax.named_scope("combine"):
        of_tokens = sum_of_copies(of_copies, phases.receipt, per_token)
        return of_tokens, weights_by_token(of_weights, phases.receipt, per_token), home


serve_in_phases.defvjp(_save, _backward)
