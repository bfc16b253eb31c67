"""`serve_in_phases`: both phases of `TwoPhase`, forward and backward, overlapped with planning and weight copies.

The exchange home depends only on the counts, as does the planner, which runs concurrently. Rows and weights of moved
experts travel during the static wave. Then the dynamic wave runs. Its outputs return to the homes of their experts
during the products of the rows that stayed. From the homes, all outputs return to their tokens.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.collectives.peer_copy import Pending, Route, after_start, join
from jax_moe_lb.collectives.peer_copy_rows import (
    Taken,
    move,
    move_back,
    moved_rows,
    served_quota,
    start_back,
    start_onward,
)
from jax_moe_lb.collectives.plan_and_copy import plan_and_copy, post
from jax_moe_lb.collectives.ragged_all_to_all import empty_buffer
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import first_order
from jax_moe_lb.core.native_planner import NativePlanner
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Rows, Tokens
from jax_moe_lb.core.validation import fallback_to_plain
from jax_moe_lb.kernels.grouped_ffn import grouped_ffn
from jax_moe_lb.transport.direct import Direct, DirectReceipt
from jax_moe_lb.transport.dispatch import Routed
from jax_moe_lb.transport.exchange import (
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
from jax_moe_lb.transport.rounds import no_gradients, overflow_rounds
from jax_moe_lb.transport.slot_weights import (
    added,
    at_home,
    dtype_of_sums,
    fuse_gate_up,
    gradients_of_round,
    optimization_barrier,
    widened,
)
from jax_moe_lb.transport.two_phase_receipts import Blocks, Dynamic, Phases, Streams, address_home, window


class PhaseConfig(NamedTuple):
    """Transports and planner: the static, hashable arguments of `serve_in_phases`."""

    direct: Direct  # dispatch of the tokens
    replicate: Replicate  # replication of the weights
    planner: NativePlanner | None  # planner that runs concurrently with the exchange; `None` if the plan already exists
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
        return cls(direct, replicate, planner, route, topology)


class PhaseOutcome(NamedTuple):
    """Result of `serve_in_phases` besides the outputs."""

    plan: Plan  # legal plan of the served copies
    made: Plan  # plan returned by the planner or balancer
    phases: Phases  # addresses of both phases
    is_legal: Bool[Array, ""]  # whether `made` was legal
    is_whole: Bool[Array, ""]  # whether all rounds of the plan were run


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def serve_in_phases(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: PhaseConfig, room: int
) -> tuple[Tokens, PhaseOutcome]:
    """Send every token copy home and onward by the plan, and sum the expert outputs of each token."""
    # The residuals are tokens, home weights, plan and receipts. The backward pass replays this plan. It copies the
    # weights again, concurrently with the gradients of rows that stay at home, and adds gradients of replicas at home.

    # Under `vmap`, microbatches run sequentially: `post`, its copies and `join` belong together.
    @jax.custom_batching.sequential_vmap
    def serve(
        tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan
    ) -> tuple[Tokens, PhaseOutcome]:
        return _serve(tokens, experts, routed, dynamic, plan, ways, room)

    return serve(tokens, experts, routed, dynamic, plan)


# ---- forward -----------------------------------------------------------------------
class _Forward(NamedTuple):
    """Inputs of all rounds of the forward pass, available before the plan."""

    ways: PhaseConfig
    experts: Experts
    tokens: Tokens
    routed: Routed
    dynamic: Dynamic
    receipt: DirectReceipt
    streams: Streams

    def come_home(self, i: Array) -> Rows:
        """Send the copies of round `i` home."""
        with jax.named_scope("dispatch/come_home"):
            copies = to_sending_order(self.tokens, self.receipt, self.routed.experts.shape[1])
            return self.ways.direct.send(copies, self.receipt, i, self.ways.topology)[0]

    def static_sizes(self, i: Array, rows: Rows) -> Int[Array, "L"]:
        """Return the row counts of static experts, which come first; 0 for dynamic experts."""
        static = replace(self.streams, size=jnp.where(self.dynamic, 0, self.streams.size))
        return _here(static, i, rows, self.ways)[1]

    def static_wave(self, rows: Rows, sizes: Int[Array, "L"]) -> Rows:
        """Compute the outputs of the static rows, with home weights only; other rows are undefined."""
        with jax.named_scope("experts/static_wave"):
            return grouped_ffn(rows, self.experts, sizes)

    def finish(self, i: Array, rows: Rows, out: Rows, moved: "_Arrived", copies: Copies) -> Copies:
        """Compute the outputs of dynamic experts, at home and on takers, and send all outputs back."""
        ways, phases = self.ways, moved.phases
        with jax.named_scope("experts/dynamic_wave"):
            staying = replace(phases.staying, size=jnp.where(self.dynamic, phases.staying.size, 0))
            blocks = Blocks.of(*_here(staying, i, rows, ways), rows.shape[0])
            returning: Any = (out,)
            if moved.slots is not None and moved.rows is not None:
                served = grouped_ffn(moved.rows, moved.slots, _taken(phases, i, rows, ways))
                # Start the return of moved rows first, to overlap it with the products of rows that stayed.
                blocks, returning = _start_back((served,), (out,), phases, i, ways, blocks)
            stayed = grouped_ffn(blocks.take(rows), self.experts, blocks.sizes)
            (out,) = _arrived(returning, stayed)
            out = blocks.put(stayed, out)
        with jax.named_scope("combine"):
            return ways.direct.send_back(out, self.receipt, i, copies, ways.topology)


class _Arrived(NamedTuple):
    """Rows and weights taken from other ranks in a round."""

    phases: Phases
    slots: Experts | None
    rows: Taken | None


def _serve(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: PhaseConfig, room: int
) -> tuple[Tokens, PhaseOutcome]:
    direct, topology = ways.direct, ways.topology
    with jax.named_scope("address"):
        receipt, streams = address_home(direct, routed.experts, routed.counts, dynamic, topology)
        is_whole = direct.within_rounds(receipt)
    first = jnp.int32(0)
    pending: Any
    if ways.planner is not None and ways.route is not None:
        # The exchange reads the receipt returned by `post`, which orders it after `post`.
        with jax.named_scope("plan"):
            receipt, posted = post(plan.placement, plan.quota, experts, receipt, planner=ways.planner, route=ways.route)
        forward = _Forward(ways, experts, tokens, routed, dynamic, receipt, streams)
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
        tokens, pending = _start(experts, plan, ways, tokens)
        forward = _Forward(ways, experts, tokens, routed, dynamic, receipt, streams)
        rows = forward.come_home(first)
    phases = Phases(receipt, streams, moved_rows(plan.placement, plan.quota, streams.first, room))
    # The wave reads the sizes, which orders it after the start of the row copies.
    sizes, onward = _start_onward((rows,), phases, first, room, ways, forward.static_sizes(first, rows))
    out = forward.static_wave(rows, sizes)
    slots = _join(pending, out, ways)
    (taken,) = _arrived(onward, out)
    # In the loop, exchanges move the rows: they need no host, so CUDA graphs can contain them.
    by_exchange = forward._replace(ways=ways._replace(route=None))

    def one_round(i: Array, carry: tuple[Copies, None]) -> tuple[Copies, None]:
        rows = forward._replace(tokens=optimization_barrier(i, tokens)).come_home(i)
        (taken,) = _start_onward((rows,), phases, i, room, by_exchange.ways, ())[1]
        out = forward.static_wave(rows, forward.static_sizes(i, rows))
        return by_exchange.finish(i, rows, out, _Arrived(phases, slots, taken), carry[0]), None

    nothing = empty_buffer(tokens, routed.experts.size)
    copies = forward.finish(first, rows, out, _Arrived(phases, slots, taken), nothing)
    copies, _ = overflow_rounds(receipt, direct, one_round, (copies, None))
    served = replace(plan, quota=served_quota(plan.quota, phases.moved))
    with jax.named_scope("combine"):
        outputs = combine(copies, routed.weights, receipt)
    return outputs, PhaseOutcome(served, made, phases, is_legal, is_whole)


@jax.named_scope("replicate")
def _start(experts: Experts, plan: Plan, ways: PhaseConfig, before: Tokens) -> tuple[Tokens, Any]:
    """Start the copies; return `before`, whose users run after that, and the copies or `None`."""
    if plan.slots == plan.num_home:
        return before, None
    pending = ways.replicate.start(experts, plan, ways.topology)
    return after_start(pending, before) if isinstance(pending, Pending) else (before, pending)


@jax.named_scope("replicate")
def _join(pending: Any, after: Any, ways: PhaseConfig) -> Experts | None:
    return None if pending is None else ways.replicate.join(pending, after)


PendingRows = Any
"""Rows in transfer, for `_arrived`: a tuple of arrived arrays, or an input of `join`."""


def _start_onward(
    parts: tuple[Array, ...], phases: Phases, i: Array, room: int, ways: PhaseConfig, before: Any
) -> tuple[Any, PendingRows]:
    """Send rows of round `i` on to their takers; return `None`s without replica slots."""
    moved = phases.moved
    if moved.home.shape[1] == 0:
        return before, (None,) * len(parts)
    window = _window(i, parts[0])
    if ways.route is not None:
        with jax.named_scope("rows_onward/dispatch"):
            return start_onward(parts, room, moved, window, before, route=ways.route)
    axes, local = ways.topology.expert_axes, ways.topology.in_one_process
    with jax.named_scope("dispatch"):
        return before, tuple(move(part, moved, window, empty_buffer(part, room), axes, local) for part in parts)


def _start_back(
    parts: tuple[Array, ...], into: tuple[Array, ...], phases: Phases, i: Array, ways: PhaseConfig, before: Any = ()
) -> tuple[Any, PendingRows]:
    """Return results of moved rows to the home positions in round `i`; the transpose of `_start_onward`."""
    window = _window(i, into[0])
    if ways.route is not None:
        with jax.named_scope("rows_back/combine"):
            return start_back(parts, into, phases.moved, window, before, route=ways.route)
    axes, local = ways.topology.expert_axes, ways.topology.in_one_process
    with jax.named_scope("combine"):
        pairs = zip(parts, into, strict=True)
        return before, tuple(move_back(part, phases.moved, window, out, axes, local) for part, out in pairs)


def _arrived(rows: PendingRows, after: Any) -> tuple[Any, ...]:
    return join(rows, after) if isinstance(rows, Pending) else rows


def _window(i: Array, rows: Rows) -> Any:
    return window(i, rows.shape[0])


def _here(streams: Streams, i: Array, rows: Rows, ways: PhaseConfig) -> tuple[Int[Array, "L"], Int[Array, "L"]]:
    """Return the offsets and counts of this rank's home experts among the rows of round `i`."""
    mine = streams.of_rank(jax.lax.axis_index(ways.topology.expert_axes), ways.topology.num_ranks)
    return _window(i, rows).of(mine.first, mine.size)


def _taken(phases: Phases, i: Array, rows: Rows, ways: PhaseConfig) -> Int[Array, "P"]:
    """Return the number of rows for each replica slot of this rank in round `i`."""
    sizes = _window(i, rows).of(phases.moved.first, phases.moved.size)[1]
    return sizes[jax.lax.axis_index(ways.topology.expert_axes)]


# ---- backward ----------------------------------------------------------------------
PhaseResiduals = tuple[Tokens, RoutingWeights, Experts, Plan, Phases]


def _save(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: PhaseConfig, room: int
) -> tuple[tuple[Tokens, PhaseOutcome], PhaseResiduals]:
    out, outcome = serve_in_phases(tokens, experts, routed, dynamic, plan, ways, room)
    return (out, outcome), (tokens, routed.weights, experts, outcome.plan, outcome.phases)


def _backward(
    ways: PhaseConfig, room: int, saved: PhaseResiduals, gradients: tuple[Tokens, Any]
) -> tuple[Tokens, Experts, Routed, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: PhaseResiduals, upstream: Tokens) -> tuple[Tokens, RoutingWeights, Experts]:
        return _gradients(ways, room, saved, upstream)

    of_tokens, of_weights, of_experts = first_order(pull_back)(saved, gradients[0])
    none: Any = None  # Experts and counts are integers, without gradients.
    return of_tokens, of_experts, Routed(none, none, of_weights), None, None


class _Backward(NamedTuple):
    """Inputs of all rounds of the backward pass."""

    ways: PhaseConfig
    batch: Batch
    experts: Experts
    phases: Phases
    is_first: bool = True

    @jax.named_scope("dispatch")
    def come_home(self, i: Array) -> tuple[Array, ...]:
        """Send copies, their weights and the gradients of their outputs home, in round `i`."""
        (tokens, weights, upstream), receipt = self.batch, self.phases.receipt
        per_token = weights.shape[1]
        copies = (
            to_sending_order(tokens, receipt, per_token),
            weights_in_order(weights, receipt),
            to_sending_order(upstream, receipt, per_token),
        )
        return tuple(self.ways.direct.send(part, receipt, i, self.ways.topology)[0] for part in copies)

    def staying(self, i: Array, rows: Rows) -> Blocks:
        """Return the blocks of rows that stay at home, of static and dynamic experts."""
        return Blocks.of(*_here(self.phases.staying, i, rows, self.ways), rows.shape[0])

    def at_home(self, parts: tuple[Array, ...], blocks: Blocks) -> tuple[tuple[Array, ...], Experts]:
        """Compute the gradients of the rows that stay at home."""
        with jax.named_scope("experts/home_wave"):
            taken, fused = tuple(map(blocks.take, parts)), self._gate_goes_in_up(parts[0])
            *of_rows, of_experts = self._gradients(taken, self.experts, blocks.sizes, fused)
            return tuple(blocks.put(part, part) for part in of_rows), of_experts

    def finish(self, i: Array, of_rows: tuple[Array, ...], parts: Any, slots: Any, out: OfCopies) -> Any:
        """Compute the gradients of moved rows, and send all gradients back."""
        ways, phases, of_slots = self.ways, self.phases, None
        rows = of_rows[0]
        if slots is not None:
            with jax.named_scope("experts/moved_wave"):
                fused = self._gate_goes_in_up(rows)
                *of_moved, of_slots = self._gradients(parts, slots, _taken(phases, i, rows, ways), fused)
            _, returning = _start_back(tuple(of_moved), of_rows, phases, i, ways)
            of_rows = _arrived(returning, ())
        back = partial(ways.direct.send_back, receipt=phases.receipt, i=i, topology=ways.topology)
        with jax.named_scope("combine"):
            return tuple(back(part, out=into) for part, into in zip(of_rows, out, strict=True)), of_slots

    def _gate_goes_in_up(self, rows: Rows) -> bool:
        # Both waves use the same form, because their gradients are added.
        return fuse_gate_up(self.experts, rows, are_joined=False)

    def _gradients(
        self, parts: tuple[Array, ...], experts: Experts, sizes: Array, fused: bool
    ) -> tuple[Rows, Array, Any]:
        rows, weights, upstream = parts
        dtype = dtype_of_sums(self.experts, self.ways.direct, is_first=self.is_first)

        def again(after: Array) -> Experts:
            return optimization_barrier(after, experts)

        return gradients_of_round(rows, weights, experts, again, sizes, upstream, dtype, fused=fused)


@jax.named_scope("backward")
def _gradients(
    ways: PhaseConfig, room: int, saved: PhaseResiduals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Compute the gradients of tokens, weights and home experts, in the rounds of the forward pass."""
    tokens, weights, experts, plan, phases = saved
    again = ways.replicate.again()
    route = None if ways.route is None else again.route(ways.topology)
    ways = ways._replace(replicate=again, route=route)
    # Without the barrier, XLA merges these replicas and rows with the equal ones of the forward pass and keeps them
    # until now. The barrier ties them to the gradients, which exist only in the backward pass.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    upstream, pending = _start(experts, plan, ways, upstream)
    backward = _Backward(ways, Batch(tokens, weights, upstream), experts, phases)
    first, nothing = jnp.int32(0), no_gradients(tokens, weights)
    parts = backward.come_home(first)
    # The wave at home reads the blocks, which orders it after the start of the row copies.
    staying, onward = _start_onward(parts, phases, first, room, ways, backward.staying(first, parts[0]))
    of_rows, of_home = backward.at_home(parts, staying)
    slots = _join(pending, of_rows, ways)
    moved = _arrived(onward, of_rows)
    of_copies, of_slots = backward.finish(first, of_rows, moved, slots, nothing)
    by_exchange = backward._replace(ways=ways._replace(route=None), is_first=False)

    def one_round(i: Array, carry: tuple[OfCopies, Any]) -> tuple[OfCopies, Any]:
        parts = by_exchange._replace(batch=optimization_barrier(i, by_exchange.batch)).come_home(i)
        staying, onward = _start_onward(parts, phases, i, room, by_exchange.ways, by_exchange.staying(i, parts[0]))
        of_rows, of_home = by_exchange.at_home(parts, staying)
        of_copies, of_slots = by_exchange.finish(i, of_rows, _arrived(onward, of_rows), slots, carry[0])
        return of_copies, added(carry[1], (of_home, of_slots))

    carry = of_copies, (of_home, of_slots)
    (of_copies, of_weights), (home, of_slots) = overflow_rounds(phases.receipt, ways.direct, one_round, carry, widened)
    home = at_home(experts, home, of_slots, plan, ways.replicate, ways.topology)
    per_token = weights.shape[1]
    with jax.named_scope("combine"):
        of_tokens = sum_of_copies(of_copies, phases.receipt, per_token)
        return of_tokens, weights_by_token(of_weights, phases.receipt, per_token), home


serve_in_phases.defvjp(_save, _backward)
