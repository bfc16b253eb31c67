"""Planning for the exact load and weight copies by this plan, concurrent with independent work.

    # As soon as the load is known:
    x, posted = post(placement, quota, home, x, planner=greedy_planner(...), route=route)
    y = exchange(x)
    y, plan, pending = plan_and_copy(posted, y)
    ...                                          # work that needs the plan but not the copies
    slots = join(pending)

On a GPU, a host thread plans when the load has arrived on the host. Then it starts the copies, which wait for the work
before `post`. Both run during the exchange, even if XLA's host thread waits for it. `plan_and_copy` is launched after
the exchange and returns the plan. This path ran on one H100, with copies inside its memory. On a CPU, a handler plans
when the operands of the second call are ready, and users of the plan wait for the copies.
"""

from dataclasses import field

import jax
from jaxtyping import Array, Int, PyTree

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
from jax_moe_lb.core.native_planner import NativePlanner, alike
from jax_moe_lb.core.types import Placement, Quota, pytree


@pytree
class Posted:
    """Inputs of planning and copies, from `post` to `plan_and_copy`."""

    # Keep both calls and `join` in one computation, and use it once.

    placement: Placement  # initial placement of the planner
    quota: Quota  # initial quota of the planner
    home: PyTree  # home weights, `[L, ...]` each
    # Uninitialized slots. They are allocated since `post`, so operations before `plan_and_copy` do not use their
    # memory.
    incoming: PyTree
    place: Int[Array, "2"]  # two integers, the participant and the group of this device
    ticket: Int[Array, "2"]  # two integers that pair `plan_and_copy` with its `post`
    route: Route = field(metadata={"static": True})  # ranks and options of the copies
    planner: NativePlanner = field(metadata={"static": True})  # native planner


def post(
    placement: Placement,
    quota: Quota,
    home: PyTree,
    before: PyTree,
    *,
    planner: NativePlanner,
    route: Route,
) -> tuple[PyTree, Posted]:
    """Register the inputs of `plan_and_copy`, and return without waiting."""
    # `TwoPhase` calls it when the load is known, before rows go home. Call it directly only to overlap custom work.
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
        # `before` is aliased: the call only orders operations and copies no data.
        aliases = {1 + first + i: 1 + len(home) + i for i in range(len(passed))}
        site = attributes(num_home, route) | {"plan_size": placement.size + quota.size, "num_kinds": len(home)}
        site |= {"planner": planner.name, "options": options}
        return tuple(call("copy_post", out, where, *arrays, aliases=aliases, **site))

    def reference(where: Array, *arrays: Array) -> Arrays:
        # Placeholders with the shapes of the slots; they are never read.
        return where, *(array[:1].repeat(num_rows, 0) for array in arrays[2:first]), *arrays[first:]

    operands = (where, placement, quota, *kinds, *waves)
    ticket, *results = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    home, slots = jax.tree.unflatten(tree, kinds), jax.tree.unflatten(tree, results[: len(kinds)])
    posted = Posted(placement, quota, home, slots, where, ticket, route, planner)
    return jax.tree.unflatten(structure, results[len(kinds) :]), posted


def plan_and_copy(posted: Posted, after: PyTree) -> tuple[PyTree, tuple[Placement, Quota], Pending]:
    """Compute the plan, and start its copies."""
    # It is not differentiable: write one rule for both calls and the operations in between, with `add_at_home`.
    # Returns `after`, unchanged; placement and quota of the plan; and the copies, for `join`. Slot `i` receives the
    # expert of `placement[:, L + i]`; empty slots are 0.
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
        # Aliased: the slots are written into the buffers of `post`, and `after` passes through.
        aliases = {3 + kinds + i: 3 + i for i in range(len(passed))}
        name = f"plan_{planner.name}_and_copy"
        return tuple(call(name, out, placement, quota, ticket, *arrays, aliases=aliases, **options))

    def reference(placement: Placement, quota: Quota, ticket: Array, *arrays: Array) -> Arrays:
        placement, quota = planner.reference(placement, quota, **options)
        wanted = placement[:, num_home:]
        slots = [fetch_reference(array, wanted, num_home, route) for array in arrays[:kinds]]
        return placement, quota, ticket, *slots, *arrays[2 * kinds :]

    # Copies read `place` until they end, so pass it along with `after`.
    operands = (posted.placement, posted.quota, posted.ticket, *home, *incoming, *waves, posted.place)
    placement, quota, ticket, *passed = by_platform(
        *operands, native=native, reference=reference, platforms=native_platforms(route)
    )
    # The home weights are read until `join`, so keep them alive.
    pending = Pending(jax.tree.unflatten(tree, passed[:kinds]), ticket, home, route)
    return jax.tree.unflatten(structure, passed[kinds:-1]), (placement, quota), pending
