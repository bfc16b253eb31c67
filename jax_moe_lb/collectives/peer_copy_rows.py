"""Copies of rows between the homes of experts and the ranks that serve them.

This is the second phase of FEPLB (arXiv 2604.19654, section 3.3). All token copies have arrived at home, and the rows
of an expert are one block of the home's stream. A replica slot of a rank, the *taker*, takes a part of such a block,
usually all of it, in one copy. The rest stays at home. All ranks compute these blocks from the plan, without an
exchange of addresses.

    x, pending = start_onward((rows,), room, moved, window, x, route=route)
    y = home_wave(x)
    (taken,) = join(pending, y)

`move` and `move_back` do the same by an exchange. They are the fallback if ranks cannot access each other's memory, or
without the custom calls.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_moe_lb.collectives.peer_copy import Arrays, Pending, Route, attributes, in_domain, native_platforms, place
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, empty_buffer, ragged_all_to_all, starts
from jax_moe_lb.core.custom_calls import by_platform, call, like
from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import Placement, Quota, Rows, iota, pytree

PerReplica = Int[Array, "R P"]
"""One number per rank and replica slot."""

Taken = Float[Array, "B H"]
"""Rows taken from other ranks, sorted by slot, in a buffer of `B` rows."""


@pytree
class MovedRows:
    """Rows taken by replica slots; equal on all ranks."""

    home: PerReplica  # source rank of each slot; `R` for empty slots
    first: PerReplica  # first row of each slot in the stream of its source rank
    size: PerReplica  # rows of each slot; at most `room` per rank
    taken: Quota  # rows of each expert taken by each rank

    @property
    def tables(self) -> tuple[PerReplica, PerReplica, PerReplica]:
        """Tables `home`, `first` and `size` of the slots."""
        return self.home, self.first, self.size


class CopyWindow(NamedTuple):
    """Part of the streams in the receive buffers at home, in one round."""

    first: Int[Array, ""]  # first row of the stream
    last: Int[Array, ""]  # row after the last one

    def of(self, first: Int[Array, "*N"], size: Int[Array, "*N"]) -> tuple[Int[Array, "*N"], Int[Array, "*N"]]:
        """Return the offset in the window and the row count per block inside it."""
        start, end = (jnp.clip(at, self.first, self.last) for at in (first, first + size))
        return start - self.first, end - start


def moved_rows(placement: Placement, quota: Quota, first_row: Int[Array, "E"], room: int) -> MovedRows:
    """Compute the rows moving from home, by slot."""
    # Slots take rows in slot order until the rank has `room` rows; further rows stay at home. If several ranks take
    # rows of one expert, lower ranks take the first ones, and home keeps the last.
    num_experts, num_ranks = quota.shape
    num_home = num_experts // num_ranks
    wanted, rank = placement[:, num_home:], iota(num_ranks)[:, None]
    filled, expert = wanted >= 0, jnp.maximum(wanted, 0)
    asked = jnp.where(filled, quota[expert, rank], 0)
    before = starts(asked, 1)
    size = jnp.clip(room - before, 0, asked)
    # Empty slots add to an expert out of range, which the scatter drops.
    taken = jnp.zeros_like(quota).at[jnp.where(filled, wanted, num_experts), rank].add(size, mode="drop")
    home = jnp.where(filled, wanted // num_home, num_ranks)
    return MovedRows(home, _first_of_slots(first_row, taken, expert), size, taken)


def moved_from_the_end(
    moved: MovedRows, placement: Placement, order: Int[Array, "R L"], first_row: Int[Array, "E"], size: Int[Array, "E"]
) -> MovedRows:
    """Move only the end of a stream: rows stay at home if any later row of the stream stays."""
    # `order` has the home experts of ranks in the order of the stream, `size` the rows of all experts there.
    num_experts, num_ranks = moved.taken.shape
    num_home, rank = num_experts // num_ranks, iota(num_ranks)[:, None]
    in_order = order + num_home * rank
    is_whole = (moved.taken.sum(1, dtype=jnp.int32) == size)[in_order].astype(jnp.int32)
    # Whether all experts behind an expert in the stream move as a whole.
    from_here = jnp.flip(jnp.cumprod(jnp.flip(is_whole, 1), 1), 1)
    behind = jnp.concatenate([from_here[:, 1:], jnp.ones_like(from_here[:, :1])], 1)
    may_move = jnp.zeros_like(size).at[in_order].set(behind) > 0
    taken, expert = jnp.where(may_move[:, None], moved.taken, 0), jnp.maximum(placement[:, num_home:], 0)
    first = _first_of_slots(first_row + size - taken.sum(1, dtype=jnp.int32), taken, expert)
    return MovedRows(moved.home, first, jnp.where(may_move[expert], moved.size, 0), taken)


def _first_of_slots(first_row: Int[Array, "E"], taken: Quota, expert: PerReplica) -> PerReplica:
    """Return the first rows of slots, from the first moving rows of experts: lower ranks take the first."""
    earlier = starts(taken, 1)
    return first_row[expert] + earlier[expert, iota(taken.shape[1])[:, None]]


def served_quota(quota: Quota, moved: MovedRows) -> Quota:
    """Return the served quota: home serves all other rows."""
    num_experts, num_ranks = quota.shape
    stays = (quota.sum(1, dtype=jnp.int32) - moved.taken.sum(1, dtype=jnp.int32))[:, None]
    at_home = iota(num_experts)[:, None] // (num_experts // num_ranks) == iota(num_ranks)[None]
    return jnp.where(at_home, stays, moved.taken)


def move(rows: Rows, moved: MovedRows, window: CopyWindow, out: Taken, group: Group) -> Taken:
    """Send rows at home to the slots."""
    # It is not differentiable; `move_back` is its transpose.
    me = group.me
    first, size = window.of(moved.first, moved.size)
    slices = Slices(
        first=first.reshape(-1),
        sent=_of(moved.home == me, size),
        lands=starts(size, 1).reshape(-1),
        arriving=_of(_sources(moved, me), size[me][None]),
    )
    return ragged_all_to_all(rows, out, slices, group, disjoint=True, site="moved rows")


def move_back(rows: Taken, moved: MovedRows, window: CopyWindow, out: Rows, group: Group) -> Rows:
    """Write results of moved rows over these rows at home; the transpose of `move`."""
    me = group.me
    first, size = window.of(moved.first, moved.size)
    sources = _sources(moved, me)
    slices = Slices(
        first=jnp.broadcast_to(starts(size, 1)[me], sources.shape).reshape(-1),
        sent=_of(sources, size[me][None]),
        lands=jnp.broadcast_to(first[me], sources.shape).reshape(-1),
        arriving=_of(moved.home == me, size),
    )
    return ragged_all_to_all(rows, out, slices, group, disjoint=True, site="outputs of moved rows")


def _sources(moved: MovedRows, me: Int[Array, ""]) -> Bool[Array, "R P"]:
    """Return whether the slots of this rank take rows from other ranks, `[R, P]`."""
    return moved.home[me][None] == iota(moved.home.shape[0])[:, None]


def _of(which: Bool[Array, "R P"], size: Int[Array, "*N"]) -> Int[Array, "U"]:
    return jnp.where(which, size, 0).reshape(-1)


def start_onward(
    rows: Arrays, room: int, moved: MovedRows, window: CopyWindow, before: PyTree = (), *, route: Route
) -> tuple[PyTree, Pending]:
    """Begin to send rows to the slots; `join` returns them."""
    # It is not differentiable; `start_back` is its transpose.
    # Returns `before`, unchanged; and the input of `join`, a tuple of `[B, H]`, sorted by slot. Rows after the last
    # slot are uninitialized.
    return _start(rows, (), room, moved, window, before, replace(route, site=f"{route.site}, moved rows"))


def start_back(
    rows: Arrays, into: Arrays, moved: MovedRows, window: CopyWindow, before: PyTree = (), *, route: Route
) -> tuple[PyTree, Pending]:
    """Begin to write results of moved rows over these rows at home; `join` returns them."""
    if len(rows) != len(into):
        raise ValueError(f"into has {len(into)} arrays; expected {len(rows)}, as many as rows")
    route = replace(route, site=f"{route.site}, outputs of moved rows")
    return _start(rows, into, 0, moved, window, before, route)


def _start(
    rows: Arrays, into: Arrays, room: int, moved: MovedRows, window: CopyWindow, before: PyTree, route: Route
) -> tuple[PyTree, Pending]:
    if not rows:
        raise ValueError("rows is empty; expected at least one kind")
    if not route.axis_name:
        raise ValueError("route.axis_name is empty; expected mesh axes of the ranks, as rows travel between them")
    kinds, back = len(rows), bool(into)
    waves, structure = jax.tree.flatten(before)
    arrays = vary_alike((*rows, *into, *waves), *moved.tables)

    def native(where: Array, home: Array, first: Array, size: Array, *arrays: Array) -> Arrays:
        first, size = window.of(first, size)
        home = in_domain(jnp.where(home == home.shape[0], -1, home), 1, route)
        tables = home, *(in_domain(table, 0, route) for table in (first, size))
        # XLA allocates results of the call at its launch; an operand would occupy memory from the start.
        landing = () if back else tuple(like(part, (room, part.shape[1])) for part in arrays[:kinds])
        out = (like(where), *landing, *map(like, arrays[kinds:]))
        # Aliased: `into` is overwritten, and `before` passes through.
        aliases = {4 + i: 1 + len(landing) + i - kinds for i in range(kinds, len(arrays))}
        site = attributes(1, route) | {"back": back, "num_kinds": kinds}
        return tuple(call("copy_rows", out, where, *tables, *arrays, aliases=aliases, **site))

    def reference(where: Array, home: Array, first: Array, size: Array, *arrays: Array) -> Arrays:
        here = replace(moved, home=home, first=first, size=size)
        out = arrays[kinds : 2 * kinds] if back else tuple(empty_buffer(part, room) for part in arrays[:kinds])
        pairs, carry = zip(arrays[:kinds], out, strict=True), move_back if back else move
        group = Group(route.axis_name, limited_routing=route.limited_routing)
        passed = arrays[kinds + len(into) :]
        return where, *(carry(part, here, window, to, group) for part, to in pairs), *passed

    operands = (place(route), *moved.tables, *arrays)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    # Keep the operands alive until `join`.
    pending = Pending(tuple(results[:kinds]), ticket, (*operands[:4], *arrays[:kinds]), route)
    return jax.tree.unflatten(structure, results[kinds:]), pending
