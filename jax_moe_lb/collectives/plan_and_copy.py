"""Plans for the exact load, and copies of what they ask for, beside work that needs neither.

    # As soon as the load is known:
    x, posted = post(placement, quota, home, x, planner=greedy_planner(domain, min_tokens), route=route)
    y = exchange(x)
    y, plan, pending = plan_and_copy(posted, y)
    ...                                          # what needs the plan and not the copies
    slots = join(pending)

On a GPU a thread of the host plans as soon as the load has arrived there, and starts the copies, which wait for what
came before `post`: both run while the GPU is busy with the exchange, also where XLA's host waits for it.
`plan_and_copy` is launched after it and hands the plan on. That has been compiled and run on a stand-in for the CUDA
runtime; not run on a GPU. On a CPU a handler plans when the second call's operands are there, and what needs the plan
waits for the copies.
"""

from dataclasses import field
from typing import Any

import jax
from jaxtyping import Array, Int

from jax_moe_lb.collectives.peer_copy import (
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
from jax_moe_lb.core.custom_calls import by_platform, call, like
from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import Placement, Quota, pytree
from jax_moe_lb.planners.base import NativePlanner, alike


@pytree
class Posted:
    """What will be planned and copied, from `post` to `plan_and_copy`.

    Keep both calls, and `join`, in one computation, and use it once.

    Args:
        placement: `[R, S]` int32, which the planner starts from.
        quota: `[E, R]` int32, which the planner starts from.
        home: the pytree of home weights, `[L, ...]` each.
        incoming: the slots, not written yet. They are owned since `post`, so that what runs before `plan_and_copy`
            cannot be using their memory.
        place: two integers, which participant of which group this is.
        ticket: two integers that tie `plan_and_copy` to its `post`.
        route: between whom weights are copied, and how.
        planner: what plans.
    """

    placement: Placement
    quota: Quota
    home: Any
    incoming: Any
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
) -> tuple[Any, Posted]:
    """Says what `plan_and_copy` will plan and copy, and returns at once.

    `TwoPhase` calls it as soon as the load is known, before rows go home. Use it yourself only where you have work of
    your own beside it.

    Args:
        placement: `[R, S]` int32, the expert in each slot, the same on all ranks; the first `L` slots of a rank are its
            home experts.
        quota: `[E, R]` int32, the tokens of each expert that each rank serves, the same on all ranks.
        home: a pytree of at least one array `[L, ...]`, the kinds of weights of this rank's home experts.
        before: a pytree of arrays that what runs beside it uses: XLA calls this before what uses the result. It also
            keeps apart the posts of several layers, or turns of a loop, whose other operands are equal.
        planner: what a balancer's `native_planner` returned, such as that of `Greedy` or `FEPLB`.
        route: between whom weights are copied, and how.

    Returns:
        `before`, the same, and what `plan_and_copy` takes.

    Raises:
        ValueError: shapes that do not fit, or an option of the planner out of range.
    """
    placement, quota = alike(placement, quota)
    num_home = experts_per_rank(jax.tree.leaves(home), placement, route, "home")
    leaves, tree = jax.tree.flatten(home)
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
    num_rows = num_slots * ranks_here(placement, route)
    where = place(route)
    waves, structure = jax.tree.flatten(before)
    first = 2 + len(kinds)

    def native(where: Array, *arrays: Array) -> Arrays:
        home, passed = arrays[2:first], arrays[first:]
        slots = (like(array, (num_rows, *array.shape[1:])) for array in home)
        out = (like(where), *slots, *map(like, passed))
        # What goes in as `before` comes out in the same memory: the call only ties the order of things, and copies
        # nothing.
        aliases = {1 + first + i: 1 + len(home) + i for i in range(len(passed))}
        site = attributes(num_home, route) | {"plan_size": placement.size + quota.size, "num_kinds": len(home)}
        site |= {"planner": planner.name, "options": options}
        return tuple(call("copy_post", out, where, *arrays, aliases=aliases, **site))

    def reference(where: Array, *arrays: Array) -> Arrays:
        # As many rows, of the type of `home`; nothing reads them.
        return where, *(array[:1].repeat(num_rows, 0) for array in arrays[2:first]), *arrays[first:]

    operands = (where, placement, quota, *kinds, *waves)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    home, slots = jax.tree.unflatten(tree, kinds), jax.tree.unflatten(tree, results[: len(kinds)])
    posted = Posted(placement, quota, home, slots, where, ticket, route, planner)
    return jax.tree.unflatten(structure, results[len(kinds) :]), posted


def plan_and_copy(posted: Posted, after: Any) -> tuple[Any, tuple[Placement, Quota], Pending]:
    """Makes the plan, and starts the copies that it asks for.

    It is not differentiable: write one rule for the calls and what is between, with `add_at_home`.

    Args:
        posted: what `post` returned.
        after: a pytree of arrays that are computed before.

    Returns:
        `after`, the same; placement and quota of the plan; and the copies, for `join`: slot `i` becomes the expert of
        `placement[:, L + i]`, 0 where that is empty.

    Raises:
        JaxRuntimeError: where the custom calls run, a plan that breaks the planner's rules, plans that differ between
            ranks or a rank that does not come in time stop the program on all ranks, on a GPU too.
    """
    planner = posted.planner
    options = planner.checked_options(posted.placement, posted.quota)
    home = tuple(jax.tree.leaves(posted.home))
    incoming, tree = jax.tree.flatten(posted.incoming)
    waves, structure = jax.tree.flatten(after)
    route, kinds = posted.route, len(home)
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
        slots = [fetch_reference(array, wanted, num_home, route) for array in arrays[:kinds]]
        return placement, quota, ticket, *slots, *arrays[2 * kinds :]

    # Copies read `place` until they are over, so it goes along with `after`.
    operands = (posted.placement, posted.quota, posted.ticket, *home, *incoming, *waves, posted.place)
    placement, quota, ticket, *passed = by_platform(
        *operands, native=native, reference=reference, platforms=native_platforms(route)
    )
    # The home weights are read until `join`, which keeps them.
    pending = Pending(jax.tree.unflatten(tree, passed[:kinds]), ticket, home, route)
    return jax.tree.unflatten(structure, passed[kinds:-1]), (placement, quota), pending
