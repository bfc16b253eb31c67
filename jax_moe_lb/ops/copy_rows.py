"""Rows of tokens travel between homes and takers by copies like those of weights, beside what is computed meanwhile.

    x, pending = start_onward((rows,), room, moved, window, x, route=route)
    y = static_wave(x)
    (taken,) = join(pending, y)

`ops/moved_rows.py` says which rows go where. `move` and `move_back` there do the same by an exchange, which takes the
place of these calls where ranks do not reach each other's memory, and where the custom calls were not built.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_moe_lb._custom_calls import by_platform, call, like
from jax_moe_lb._varying import vary_alike
from jax_moe_lb.ops._peer import Arrays, Pending, Route, attributes, in_domain, native_platforms, place
from jax_moe_lb.ops.moved_rows import MovedRows, Window, move, move_back
from jax_moe_lb.ops.ragged_all_to_all import unwritten


def start_onward(
    rows: Arrays, room: int, moved: MovedRows, window: Window, before: Any = (), *, route: Route
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
    rows: Arrays, into: Arrays, moved: MovedRows, window: Window, before: Any = (), *, route: Route
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
    rows: Arrays, into: Arrays, room: int, moved: MovedRows, window: Window, before: Any, route: Route
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
        out = arrays[kinds : 2 * kinds] if back else tuple(unwritten(part, room) for part in arrays[:kinds])
        pairs, carry = zip(arrays[:kinds], out, strict=True), move_back if back else move
        passed = arrays[kinds + len(into) :]
        return where, *(carry(part, here, window, to, route.axis_name) for part, to in pairs), *passed

    operands = (place(route), *moved.tables, *arrays)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    # What is read lives until `join`.
    pending = Pending(tuple(results[:kinds]), ticket, (*operands[:4], *arrays[:kinds]), route)
    return jax.tree.unflatten(structure, results[kinds:]), pending
