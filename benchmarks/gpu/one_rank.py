"""One rank of an expert-parallel group on one device, with local copies in place of transfers.

It runs the package's own code for a rank: the sending order, the rounds of `in_rounds` with their receive buffers, the
grouped products and their gradients, and `combine`. Its receipt has the sizes that the plan of the whole group gives
this rank.

These parts differ from a rank of a group:

- Rows that arrive are copies of this rank's own rows, at the rate of this device's memory. NVLink is not used. As in
  the exchange of one process, with one slice per slot, they arrive sorted by slot.
- Replicas are copies of home experts, and gradients of as many replicas are added at home. Empty slots are neither
  copied nor added.
- Routing, the all-gather of counts and the planner are left out.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Int

from jax_moe_lb import Experts, Plan, Topology
from jax_moe_lb.core.manual_axes import unvarying_call
from jax_moe_lb.core.plan import load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.types import Counts, GroupSizes, Rows, Tokens, iota, pytree
from jax_moe_lb.routing.capacity import within_capacity
from jax_moe_lb.transport.exchange import (
    Copies,
    Exchange,
    Receipt,
    RoutingWeights,
    arriving_rows,
    inverse_order,
    landings,
    sending_order,
    sent_to_slots,
)
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import in_rounds

ROWS_AT_ONCE, COLUMNS_AT_ONCE, FEWEST_COLUMNS = 8, 1024, 64
"""Tile of `copy_rows` on GPUs: rows, and most and fewest columns."""

WEIGHTS_AT_ONCE = 4096
"""Tile of `copy_slots` and `add_slots` on GPUs."""


@pytree
class LocalReceipt(Receipt):
    """Addresses of a rank's copies, and the rows that arrive from each rank for each slot, `[R, S]` int32."""

    arriving: Int[Array, "R S"]


@dataclass(frozen=True)
class LocalExchange(Exchange[LocalReceipt]):
    """Exchange of one rank as in `Direct` with one slice per slot, with local copies of as many rows."""

    takes_saved = True

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> LocalReceipt:
        """Return the receipt of rank 0; see `receipt_of`."""
        del topology
        return self.receipt_of(jnp.int32(0), experts, counts, plan)

    def receipt_of(self, me: Int[Array, ""], experts: Int[Array, "T K"], counts: Counts, plan: Plan) -> LocalReceipt:
        """Return the receipt of a rank, as `Direct.address` does."""
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order, sent = sending_order(experts.reshape(-1), going, plan), sent_to_slots(going, plan)
        capacity = self.buffers.rows(experts.size)
        return LocalReceipt(
            order=order,
            place=inverse_order(order),
            num_going=sent.sum(dtype=jnp.int32),
            rounds=((load(plan).max() + capacity - 1) // capacity).astype(jnp.int32),
            follows_plan=None,
            arriving=arriving_rows(counts, plan, me),
        )

    def send(
        self, copies: Copies, receipt: LocalReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Copy as many rows of `copies` as arrive in round `i`."""
        del topology
        capacity = self.buffers.chunk_rows(copies.shape[0])
        group_sizes = _arriving_by_slot(receipt, i, capacity)
        first = jax.lax.rem(i * capacity, jnp.int32(copies.shape[0]))
        buffer = jax.lax.empty((capacity, copies.shape[1]), copies.dtype)
        return copy_rows(copies, buffer, first, 0, group_sizes.sum()), group_sizes

    def send_back(
        self, rows: Rows, receipt: LocalReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """Copy the outputs of round `i` into `out`."""
        del topology
        first = jax.lax.rem(i * rows.shape[0], jnp.int32(out.shape[0]))
        return copy_rows(rows, out, 0, first, _arriving_by_slot(receipt, i, rows.shape[0]).sum())


def _arriving_by_slot(receipt: LocalReceipt, i: Int[Array, ""], capacity: int) -> GroupSizes:
    # The stream of this form is sorted by slot, then by source.
    return landings(receipt.arriving.T, i, capacity).sum(1, dtype=jnp.int32)


@dataclass(frozen=True)
class LocalReplicas(Replicate):
    """Replicas copied from this rank's home experts. Row 0 of the plan's placement is the one of this rank."""

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Copy home experts into the occupied replica slots."""
        del topology
        return jax.tree.map(partial(copy_slots, sources=_sources(plan)), experts)

    def join(self, pending: Experts, after: Any) -> Experts:
        """Return the result of `start`."""
        del after
        return pending

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Add the gradients of the occupied slots to the experts that `start` copied."""
        del topology
        return jax.tree.map(partial(add_slots, sources=_sources(plan)), sums, gradients)


def _sources(plan: Plan) -> Int[Array, "P"]:
    # From the plan, unknown to the compiler: otherwise it reads home experts instead of copying them.
    held = plan.placement[0, plan.num_home :]
    return jnp.where(held >= 0, held % plan.num_home, -1)


def copy_slots(home: Array, sources: Int[Array, "P"]) -> Array:
    """Return `[P, ...]` replicas; slots without a source are uninitialized, and 0 on CPUs."""

    def gather(home: Array, sources: Array) -> Array:
        return jnp.where((sources >= 0)[:, None], home[jnp.maximum(sources, 0)], 0)

    flat = home.reshape(home.shape[0], -1)
    kernel = gather if flat.shape[1] % WEIGHTS_AT_ONCE else _copy_kernel
    replicas = jax.lax.platform_dependent(flat, sources, cuda=kernel, default=gather)
    return replicas.reshape(-1, *home.shape[1:])


def add_slots(sums: Array, gradients: Array, sources: Int[Array, "P"]) -> Array:
    """Return `sums` with the gradients of occupied slots, in place if the caller does not use them again."""

    def scatter(sums: Array, gradients: Array, sources: Array) -> Array:
        expert = jnp.where(sources < 0, sums.shape[0], sources)
        return sums.at[expert].add(gradients.astype(sums.dtype), mode="drop")

    flat, of_slots = sums.reshape(sums.shape[0], -1), gradients.reshape(gradients.shape[0], -1)
    kernel = scatter if flat.shape[1] % WEIGHTS_AT_ONCE else _add_kernel
    return jax.lax.platform_dependent(flat, of_slots, sources, cuda=kernel, default=scatter).reshape(sums.shape)


def _copy_kernel(home: Array, sources: Array) -> Array:
    # XLA's gather would write the empty slots, too.
    shape = sources.shape[0], home.shape[1]

    def copy_tile(sources: Any, home: Any, _: Any, out: Any) -> None:
        slot, at = pl.program_id(0), pl.ds(pl.program_id(1) * WEIGHTS_AT_ONCE, WEIGHTS_AT_ONCE)
        source = triton.load(sources.at[slot])
        is_occupied = jnp.broadcast_to(source >= 0, (WEIGHTS_AT_ONCE,))
        tile = triton.load(home.at[jnp.maximum(source, 0), at], mask=is_occupied, other=0)
        triton.store(out.at[slot, at], tile, mask=is_occupied)

    grid = shape[0], shape[1] // WEIGHTS_AT_ONCE
    return _call(copy_tile, "copy_slots", grid, sources, home, jax.lax.empty(shape, home.dtype))


def _add_kernel(sums: Array, gradients: Array, sources: Array) -> Array:
    # XLA's scatter-add would read the gradients of empty slots, too.
    def add_tile(sources: Any, gradients: Any, sums: Any, out: Any) -> None:
        expert, at = pl.program_id(0), pl.ds(pl.program_id(1) * WEIGHTS_AT_ONCE, WEIGHTS_AT_ONCE)

        def add(slot: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            is_from = triton.load(sources.at[slot]) == expert
            mask = jnp.broadcast_to(is_from, (WEIGHTS_AT_ONCE,))
            of_slot = triton.load(gradients.at[slot, at], mask=mask, other=0)
            return carry[0] + of_slot.astype(jnp.float32), carry[1] | is_from

        zeros = jnp.zeros(WEIGHTS_AT_ONCE, jnp.float32)
        total, has_any = jax.lax.fori_loop(0, gradients.shape[0], add, (zeros, expert < 0))
        mask = jnp.broadcast_to(has_any, (WEIGHTS_AT_ONCE,))
        total += triton.load(sums.at[expert, at], mask=mask, other=0).astype(jnp.float32)
        triton.store(out.at[expert, at], total.astype(out.dtype), mask=mask)

    return _call(add_tile, "add_slots", (sums.shape[0], sums.shape[1] // WEIGHTS_AT_ONCE), sources, gradients, sums)


def copy_rows(source: Rows, target: Rows, first: Any, to: Any, number: Array) -> Rows:
    """Return `target` with `number` rows of `source`, in place if the caller does not use it again.

    Both positions wrap around at the end of their array. If `number` exceeds the rows of `target`, several rows are
    written to one place, and any of them may remain.
    """
    bounds = jnp.stack([jnp.int32(first), jnp.int32(to), number.astype(jnp.int32)])

    def gather(source: Rows, target: Rows, bounds: Array) -> Rows:
        at = iota(max(source.shape[0], target.shape[0]))
        place = jnp.where(at < bounds[2], (bounds[1] + at) % target.shape[0], target.shape[0])
        return target.at[place].set(source[(bounds[0] + at) % source.shape[0]], mode="drop")

    in_tiles = not any(array.shape[0] % ROWS_AT_ONCE for array in (source, target))
    kernel = _kernel if in_tiles and columns_at_once(source.shape[1]) >= FEWEST_COLUMNS else gather
    return jax.lax.platform_dependent(source, target, bounds, cuda=kernel, default=gather)


def columns_at_once(width: int) -> int:
    """Return the columns of a tile: a power of two that divides the width."""
    return math.gcd(width, COLUMNS_AT_ONCE)


def _kernel(source: Rows, target: Rows, bounds: Array) -> Rows:
    # XLA's gathers and scatters would write or read rows that do not exist, of the whole buffer.
    at_most, columns = max(source.shape[0], target.shape[0]), columns_at_once(source.shape[1])

    def copy_tile(bounds: Any, source: Any, _: Any, out: Any) -> None:
        start, column = pl.program_id(0) * ROWS_AT_ONCE, pl.program_id(1) * columns
        inside = (start + iota(ROWS_AT_ONCE) < bounds[2])[:, None]
        from_row = jax.lax.rem(bounds[0] + start, source.shape[0])
        to_row = jax.lax.rem(bounds[1] + start, out.shape[0])
        tile = triton.load(source.at[pl.ds(from_row, ROWS_AT_ONCE), pl.ds(column, columns)], mask=inside, other=0)
        triton.store(out.at[pl.ds(to_row, ROWS_AT_ONCE), pl.ds(column, columns)], tile, mask=inside)

    return _call(copy_tile, "copy_rows", (at_most // ROWS_AT_ONCE, source.shape[1] // columns), bounds, source, target)


def _call(kernel: Any, name: str, grid: tuple[int, int], *operands: Array) -> Array:
    """Run a kernel whose result takes the memory of the last of three operands."""
    call: Any = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(operands[2].shape, operands[2].dtype),
        input_output_aliases={2: 0},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name=name,
    )
    return unvarying_call(call, *operands)


@pytree
class RankInputs:
    me: Int[Array, ""]
    routed: Int[Array, "T K"]
    weights: RoutingWeights
    counts: Counts
    plan: Plan
    x: Tokens
    experts: Experts
    upstream: Tokens


def rank_step(inputs: RankInputs, *, exchange: LocalExchange, capacity: int | None, topology: Topology) -> Any:
    """Return the outputs of a rank's tokens, and the gradients of tokens, weights and home experts."""
    routed = inputs.routed
    if capacity is not None:
        routed = within_capacity(routed, inputs.plan.num_experts, capacity)
    receipt = exchange.receipt_of(inputs.me, routed, inputs.counts, inputs.plan)
    # `LocalReplicas` reads the slots of this rank in the first row; the rest of the plan is in the receipt.
    plan = replace(inputs.plan, placement=jnp.roll(inputs.plan.placement, -inputs.me, 0))

    def serve(x: Tokens, weights: RoutingWeights, experts: Experts) -> Tokens:
        return in_rounds((x, weights, experts, plan, receipt), LocalReplicas(), exchange, topology)

    y, pull_back = jax.vjp(serve, inputs.x, inputs.weights, inputs.experts)
    # In a model, gradients exist only after the outputs. Without the barrier, XLA merges operations of both passes.
    y, upstream = jax.lax.optimization_barrier((y, inputs.upstream))
    return y, pull_back(upstream)
