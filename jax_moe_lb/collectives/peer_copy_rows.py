"""Copies of rows between the homes of experts and the ranks that take over their tokens.

This is the second phase of FEPLB (arXiv 2604.19654, section 3.3). All token copies have arrived at home, where the rows
of an expert are one block of the rank's stream. Each replica slot of a rank, the *taker*, takes a part of such a block,
usually all of it, in one copy. The rest stays at home. All ranks compute these blocks from the plan, so ranks exchange
no addresses.

    x, pending = start_onward((rows,), room, moved, window, x, route=route)
    y = static_wave(x)
    (taken,) = join(pending, y)

`move` and `move_back` do the same by an exchange. They replace these calls if ranks cannot access each other's memory,
and without the custom calls.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.collectives.peer_copy import Arrays, Pending, Route, attributes, in_domain, native_platforms, place
from jax_moe_lb.collectives.ragged_all_to_all import empty_buffer, ragged_all_to_all
from jax_moe_lb.core.custom_calls import by_platform, call, like
from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import Axes, Placement, Quota, Rows, iota, pytree

PerReplica = Int[Array, "R P"]
"""One number for each replica slot of each rank."""

Taken = Float[Array, "B H"]
"""Rows of others that a rank has taken, sorted by slot, in as many rows as it has room for."""


@pytree
class MovedRows:
    """Says which rows replica slots take. It is equal on all ranks.

    Args:
        home: `[R, P]` int32, the rank from which a slot takes rows; `R` for an empty slot.
        first: `[R, P]` int32, where these rows start in that rank's stream.
        size: `[R, P]` int32, how many they are; those of a rank are `room` or fewer.
        taken: `[E, R]` int32, how many rows of each expert each rank takes.
    """

    home: PerReplica
    first: PerReplica
    size: PerReplica
    taken: Quota

    @property
    def tables(self) -> tuple[PerReplica, PerReplica, PerReplica]:
        """The numbers of the slots: `home`, `first` and `size`."""
        return self.home, self.first, self.size


class CopyWindow(NamedTuple):
    """Says which part of the streams is at home: one filling of the receive buffers.

    Args:
        first: int32, the row of the stream that stands first.
        last: int32, the row after the last one.
    """

    first: Int[Array, ""]
    last: Int[Array, ""]

    def of(self, first: Int[Array, "*N"], size: Int[Array, "*N"]) -> tuple[Int[Array, "*N"], Int[Array, "*N"]]:
        """Returns what is in the window of blocks of the stream: where it starts there, and its rows.

        Args:
            first: int32, where each block starts in the stream.
            size: int32, its rows.
        """
        start, end = (jnp.clip(at, self.first, self.last) for at in (first, first + size))
        return start - self.first, end - start


def moved_rows(placement: Placement, quota: Quota, first_row: Int[Array, "E"], room: int) -> MovedRows:
    """Computes which rows go from home to which slot.

    What a rank has no room for stays at home: slots take rows in their order, until it is full. Of an expert that
    several ranks take rows of, lower ranks take the first ones, and home keeps the last.

    Args:
        placement: `[R, S]` int32, a legal plan's.
        quota: `[E, R]` int32, a legal plan's.
        first_row: `[E]` int32, where the rows of each expert start in its home's stream.
        room: how many rows of others a rank can take.
    """
    num_experts, num_ranks = quota.shape
    num_home = num_experts // num_ranks
    wanted, rank = placement[:, num_home:], iota(num_ranks)[:, None]
    filled, expert = wanted >= 0, jnp.maximum(wanted, 0)
    asked = jnp.where(filled, quota[expert, rank], 0)
    before = asked.cumsum(1, dtype=jnp.int32) - asked
    size = jnp.clip(room - before, 0, asked)
    # An empty slot adds to an expert that does not exist, and is dropped.
    taken = jnp.zeros_like(quota).at[jnp.where(filled, wanted, num_experts), rank].add(size, mode="drop")
    earlier = taken.cumsum(1, dtype=jnp.int32) - taken
    home = jnp.where(filled, wanted // num_home, num_ranks)
    return MovedRows(home, first_row[expert] + earlier[expert, rank], size, taken)


def served_quota(quota: Quota, moved: MovedRows) -> Quota:
    """Returns what each rank serves when all that is not taken stays at home.

    Args:
        quota: `[E, R]` int32, the plan's.
        moved: what `moved_rows` computed for it.
    """
    num_experts, num_ranks = quota.shape
    stays = (quota.sum(1, dtype=jnp.int32) - moved.taken.sum(1, dtype=jnp.int32))[:, None]
    at_home = iota(num_experts)[:, None] // (num_experts // num_ranks) == iota(num_ranks)[None]
    return jnp.where(at_home, stays, moved.taken)


def move(
    rows: Rows, moved: MovedRows, window: CopyWindow, out: Taken, axis_name: Axes, in_one_process: bool = False
) -> Taken:
    """Brings rows that are at home to the slots that take them.

    It is not differentiable: `move_back` is its transpose.

    Args:
        rows: `[A, H]`, the window of this rank's stream.
        moved: which slots take which rows.
        window: the part of the streams that is at home.
        out: `[B, H]`, room for the rows of others that this rank takes.
        axis_name: the mesh axes of the ranks, outermost first.
        in_one_process: as of `ragged_all_to_all`.

    Returns:
        `[B, H]`, sorted by slot; rows beyond those of the last slot stay as they are.
    """
    me = jax.lax.axis_index(axis_name)
    first, size = window.of(moved.first, moved.size)
    return ragged_all_to_all(
        rows,
        out,
        input_offsets=first.reshape(-1),
        send_sizes=_of(moved.home == me, size),
        output_offsets=_landing(size).reshape(-1),
        recv_sizes=_of(_sources(moved, me), size[me][None]),
        axis_name=axis_name,
        disjoint=True,
        in_one_process=in_one_process,
        site="moved rows",
    )


def move_back(
    rows: Taken, moved: MovedRows, window: CopyWindow, out: Rows, axis_name: Axes, in_one_process: bool = False
) -> Rows:
    """Writes what became of moved rows over those rows at home: the transpose of `move`.

    Args:
        rows: `[room, H]`, one for each row that `move` returned.
        moved: that of `move`.
        window: that of `move`.
        out: `[A, H]`; rows that nobody took stay as they are.
        axis_name: that of `move`.
        in_one_process: that of `move`.
    """
    me = jax.lax.axis_index(axis_name)
    first, size = window.of(moved.first, moved.size)
    sources = _sources(moved, me)
    return ragged_all_to_all(
        rows,
        out,
        input_offsets=jnp.broadcast_to(_landing(size)[me], sources.shape).reshape(-1),
        send_sizes=_of(sources, size[me][None]),
        output_offsets=jnp.broadcast_to(first[me], sources.shape).reshape(-1),
        recv_sizes=_of(moved.home == me, size),
        axis_name=axis_name,
        disjoint=True,
        in_one_process=in_one_process,
        site="outputs of moved rows",
    )


def _sources(moved: MovedRows, me: Int[Array, ""]) -> Bool[Array, "R P"]:
    """Whether each of this rank's slots takes rows from each rank, `[R, P]`."""
    return moved.home[me][None] == iota(moved.home.shape[0])[:, None]


def _of(which: Bool[Array, "R P"], size: Int[Array, "*N"]) -> Int[Array, "U"]:
    return jnp.where(which, size, 0).reshape(-1)


def _landing(size: PerReplica) -> PerReplica:
    """Where the rows of each slot start among those that its rank takes."""
    return size.cumsum(1, dtype=jnp.int32) - size


def start_onward(
    rows: Arrays, room: int, moved: MovedRows, window: CopyWindow, before: Any = (), *, route: Route
) -> tuple[Any, Pending]:
    """Begins to bring rows to the slots that take them; `join` returns them.

    It is not differentiable: `start_back` is its transpose.

    Args:
        rows: arrays `[A, H]`, kinds of rows that travel alike.
        room: `B`, how many rows of others a rank can take.
        moved: which slots take which rows.
        window: the part of the streams that is at home.
        before: a pytree of arrays that is passed through, so that what uses it is launched after this.
        route: between whom rows are copied. Each rank has a device of its own.

    Returns:
        `before`, the same; and what `join` takes, a tuple of `[B, H]`, sorted by slot. Rows beyond those of the last
        slot hold anything.

    Raises:
        ValueError: there are no rows, or the route has no mesh axes. Where the custom calls run, rows beyond an array
            and tables that differ between ranks stop the program on all ranks.
    """
    return _start(rows, (), room, moved, window, before, replace(route, site=f"{route.site}, moved rows"))


def start_back(
    rows: Arrays, into: Arrays, moved: MovedRows, window: CopyWindow, before: Any = (), *, route: Route
) -> tuple[Any, Pending]:
    """Begins to write what became of moved rows over those rows at home; `join` returns them.

    Args:
        rows: arrays `[B, H]`, one row for each that `start_onward` brought.
        into: an array `[A, H]` for each of them. Do not use them again: they are written over. Rows that nobody took
            stay as they are.
        moved: that of `start_onward`.
        window: that of `start_onward`.
        before: that of `start_onward`.
        route: that of `start_onward`.

    Returns:
        `before`, the same; and what `join` takes, a tuple of arrays like `into`.

    Raises:
        ValueError: as `start_onward`, and another number of arrays than of rows.
    """
    if len(rows) != len(into):
        raise ValueError(f"into has {len(into)} arrays; expected {len(rows)}, as many as rows")
    route = replace(route, site=f"{route.site}, outputs of moved rows")
    return _start(rows, into, 0, moved, window, before, route)


def _start(
    rows: Arrays, into: Arrays, room: int, moved: MovedRows, window: CopyWindow, before: Any, route: Route
) -> tuple[Any, Pending]:
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
        # XLA allocates what rows land in when the call comes; an array of ours would be there from the beginning.
        landing = () if back else tuple(like(part, (room, part.shape[1])) for part in arrays[:kinds])
        out = (like(where), *landing, *map(like, arrays[kinds:]))
        # Written over, and passed on in the same memory.
        aliases = {4 + i: 1 + len(landing) + i - kinds for i in range(kinds, len(arrays))}
        site = attributes(1, route) | {"back": back, "num_kinds": kinds}
        return tuple(call("copy_rows", out, where, *tables, *arrays, aliases=aliases, **site))

    def reference(where: Array, home: Array, first: Array, size: Array, *arrays: Array) -> Arrays:
        here = replace(moved, home=home, first=first, size=size)
        out = arrays[kinds : 2 * kinds] if back else tuple(empty_buffer(part, room) for part in arrays[:kinds])
        pairs, carry = zip(arrays[:kinds], out, strict=True), move_back if back else move
        passed = arrays[kinds + len(into) :]
        return where, *(carry(part, here, window, to, route.axis_name) for part, to in pairs), *passed

    operands = (place(route), *moved.tables, *arrays)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    # What is read lives until `join`.
    pending = Pending(tuple(results[:kinds]), ticket, (*operands[:4], *arrays[:kinds]), route)
    return jax.tree.unflatten(structure, results[kinds:]), pending
