"""Plans for the exact load, and copies of what they ask for, beside work that needs neither.

    # As soon as the load is known:
    x, posted = post(placement, quota, home, x, planner=greedy_planner(domain, min_tokens), route=route)
    y = static_wave(x)
    y, plan, pending = plan_and_copy(posted, y)
    ...                                          # what needs the plan and not the copies
    slots = join(pending)

On a GPU a thread of the host plans as soon as the load has arrived there, and starts the copies, which wait for what
came before `post`: both run while the GPU is busy with the static wave, also where XLA's host waits for that wave.
`plan_and_copy` is launched after it and hands the plan on. That has been compiled and run on a stand-in for the CUDA
runtime; not run on a GPU. On a CPU a handler plans when the static wave is done, and what needs the plan waits for the
copies.
"""

from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb._custom_calls import by_platform, call, like
from jax_moe_lb._pytree import pytree
from jax_moe_lb._varying import vary_alike
from jax_moe_lb.ops._peer import (
    Arrays,
    Pending,
    Route,
    attributes,
    experts_per_rank,
    fetch_reference,
    native_platforms,
    place,
    ranks_here,
)
from jax_moe_lb.ops.moved_rows import Window, move, moved_rows
from jax_moe_lb.planners.native import NativePlanner, alike
from jax_moe_lb.types import Placement, Quota, Rows


@pytree
class RowsAtHome:
    """Holds rows that travel beside the weights of their experts; see `ops/moved_rows.py`.

    Args:
        rows: `[A, H]`, the first rows of this rank's stream.
        first_row: `[E]` int32, where the rows of each expert start in its home's stream; equal on all ranks.
        room: how many rows of others this rank can take.
    """

    rows: Rows
    first_row: Int[Array, "E"]
    room: int = field(metadata={"static": True})


@pytree
class Posted:
    """What will be planned and copied, from `post` to `plan_and_copy`.

    Keep both calls, and `join`, in one computation, and use it once.

    Args:
        placement: `[R, S]` int32, which the planner starts from.
        quota: `[E, R]` int32, which the planner starts from.
        home: the pytree of home weights, `[L, ...]` each; with rows, a pair of it and these.
        incoming: the slots, not written yet, and room for rows. They are owned since `post`, so that the static wave
            cannot be using their memory.
        rows: the rows that travel, too, if any.
        place: two integers, which participant of which group this is.
        ticket: two integers that tie `plan_and_copy` to its `post`.
        route: between whom weights are copied, and how.
        planner: what plans.
    """

    placement: Placement
    quota: Quota
    home: Any
    incoming: Any
    rows: RowsAtHome | None
    place: Int[Array, "2"]
    ticket: Int[Array, "2"]
    route: Route = field(metadata={"static": True})
    planner: NativePlanner = field(metadata={"static": True})


def post(
    placement: Placement,
    quota: Quota,
    home: Any,
    before: Any,
    *,
    planner: NativePlanner,
    route: Route,
    rows: RowsAtHome | None = None,
) -> tuple[Any, Posted]:
    """Says what `plan_and_copy` will plan and copy, and returns at once.

    `TwoPhase` calls it when all rows are at home. Use it yourself only where you make waves of your own.

    Args:
        placement: `[R, S]` int32, the expert in each slot, the same on all ranks; the first `L` slots of a rank are its
            home experts.
        quota: `[E, R]` int32, the tokens of each expert that each rank serves, the same on all ranks.
        home: a pytree of at least one array `[L, ...]`, the kinds of weights of this rank's home experts.
        before: a pytree of arrays, the input of the static wave: XLA calls this before what uses the result. It also
            keeps apart the posts of several layers, or turns of a loop, whose other operands are equal.
        planner: what a balancer's `native_planner` returned, such as that of `Greedy` or `FEPLB`.
        route: between whom weights are copied, and how.
        rows: rows of which some travel with the weights; `None`: none do.

    Returns:
        `before`, the same, and what `plan_and_copy` takes.

    Raises:
        ValueError: shapes that do not fit, or an option of the planner out of range; rows where one device holds the
            arrays of all ranks.
    """
    placement, quota = alike(placement, quota)
    num_home = experts_per_rank(jax.tree.leaves(home), placement, route, "home")
    if rows is not None and not route.axis_name:
        raise ValueError("route.axis_name is empty; expected mesh axes of the ranks, as rows travel between them")
    leaves, tree = jax.tree.flatten(home if rows is None else (home, rows.rows))
    num_slots = placement.shape[1] - num_home
    if route.domain not in (None, placement.shape[0]):
        raise ValueError(f"route.domain is {route.domain}; expected None, as one planner serves all ranks")
    if num_slots < 1 or num_home * placement.shape[0] != quota.shape[0]:
        raise ValueError(
            f"placement has shape {placement.shape}, quota {quota.shape} and a rank {num_home} home experts; expected "
            "[R, S], [E, R] and L = E / R below S"
        )
    options = planner.checked_options(placement, quota)
    # Operands of a custom call must vary over the same mesh axes.
    kinds = vary_alike(leaves, placement, quota)
    # How many rows of each kind of weights arrive, and of what else travels.
    num_rows = [num_slots * ranks_here(placement, route)] * len(kinds)
    tables: Arrays = (placement, quota)
    if rows is not None:
        num_rows[-1] = rows.room
        tables = alike(*tables, rows.first_row[None])
    where = place(route)
    waves, structure = jax.tree.flatten(before)
    num_tables = len(tables)
    first = num_tables + len(kinds)

    def native(where: Array, *arrays: Array) -> Arrays:
        home, passed = arrays[num_tables:first], arrays[first:]
        slots = (like(array, (size, *array.shape[1:])) for array, size in zip(home, num_rows, strict=True))
        out = (like(where), *slots, *map(like, passed))
        # What goes in as `before` comes out in the same memory: the call only ties the order of things, and copies
        # nothing.
        aliases = {1 + first + i: 1 + len(home) + i for i in range(len(passed))}
        site = attributes(num_home, route) | {"plan_size": placement.size + quota.size, "num_kinds": len(home)}
        site |= {"num_row_kinds": num_tables - 2, "planner": planner.name, "options": options}
        return tuple(call("copy_post", out, where, *arrays, aliases=aliases, **site))

    def reference(where: Array, *arrays: Array) -> Arrays:
        # As many rows, of the type of `home`; nothing reads them.
        home = zip(arrays[num_tables:first], num_rows, strict=True)
        return where, *(array[:1].repeat(size, 0) for array, size in home), *arrays[first:]

    operands = (where, *tables, *kinds, *waves)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    home, slots = jax.tree.unflatten(tree, kinds), jax.tree.unflatten(tree, results[: len(kinds)])
    posted = Posted(placement, quota, home, slots, rows, where, ticket, route, planner)
    return jax.tree.unflatten(structure, results[len(kinds) :]), posted


def plan_and_copy(posted: Posted, after: Any) -> tuple[Any, tuple[Placement, Quota], Pending]:
    """Makes the plan, and starts the copies that it asks for.

    It is not differentiable: write one rule for the calls and what is between, with `add_at_home`.

    Args:
        posted: what `post` returned.
        after: a pytree of arrays that are computed before: the static wave.

    Returns:
        `after`, the same; placement and quota of the plan; and the copies, for `join`: slot `i` becomes the expert of
        `placement[:, L + i]`, 0 where that is empty. With rows it is a pair: the slots, and `[room, H]` rows, as `move`
        returns them for the first window of as many rows as there are at home.

    Raises:
        JaxRuntimeError: where the custom calls run, a plan that breaks the planner's rules, plans that differ between
            ranks or a rank that does not come in time stop the program on all ranks, on a GPU too.
    """
    planner = posted.planner
    options = planner.checked_options(posted.placement, posted.quota)
    home = tuple(jax.tree.leaves(posted.home))
    incoming, tree = jax.tree.flatten(posted.incoming)
    waves, structure = jax.tree.flatten(after)
    route, kinds, rows = posted.route, len(home), posted.rows
    # Copies read these until they are over, so they go along with `after`.
    live: Arrays = (posted.place,) if rows is None else (posted.place, rows.first_row)
    num_home = posted.quota.shape[0] // posted.quota.shape[1]

    def native(placement: Placement, quota: Quota, ticket: Array, *arrays: Array) -> Arrays:
        passed = arrays[kinds:]
        out = tuple(like(array) for array in (placement, quota, ticket, *passed))
        # The slots are written where `post` allocated them, and `after` passes through: both in the same memory.
        aliases = {3 + kinds + i: 3 + i for i in range(len(passed))}
        name = f"plan_{planner.name}_and_copy"
        return tuple(call(name, out, placement, quota, ticket, *arrays, aliases=aliases, **options))

    def reference(placement: Placement, quota: Quota, ticket: Array, *arrays: Array) -> Arrays:
        placement, quota = planner.reference(placement, quota, **options)
        wanted = placement[:, num_home:]
        num_weights = kinds if rows is None else kinds - 1
        slots = [fetch_reference(array, wanted, num_home, route) for array in arrays[:num_weights]]
        if rows is not None:
            at_home, first_row = arrays[num_weights], arrays[-1]
            moved = moved_rows(placement, quota, first_row, rows.room)
            window = Window(jnp.int32(0), jnp.int32(at_home.shape[0]))
            slots.append(move(at_home, moved, window, rows.room, route.axis_name))
        return placement, quota, ticket, *slots, *arrays[2 * kinds :]

    operands = (posted.placement, posted.quota, posted.ticket, *home, *incoming, *waves, *live)
    placement, quota, ticket, *passed = by_platform(
        *operands, native=native, reference=reference, platforms=native_platforms(route)
    )
    # The home weights are read until `join`, which keeps them.
    pending = Pending(jax.tree.unflatten(tree, passed[:kinds]), ticket, home, route)
    return jax.tree.unflatten(structure, passed[kinds : -len(live)]), (placement, quota), pending
