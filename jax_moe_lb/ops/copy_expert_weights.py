"""Copies of expert weights between ranks that run beside whatever a program computes meanwhile.

`start` begins the copies and `join` returns them; what a program computes in between, and does not need them for, runs
at the same time. `copy_expert_weights` is both at once, with a gradient: use it unless there is such work.

On a CPU the copies are made by a thread of each receiving device, on a GPU by its copy engines on a stream of their
own. Where ranks do not reach each other's memory, and where the custom calls were not built, `start` is the exchange of
`ops/fetch.py`, and nothing overlaps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb._custom_calls import by_platform, call, like
from jax_moe_lb._varying import vary_alike
from jax_moe_lb.ops._peer import (
    Arrays,
    Pending,
    Route,
    add_reference,
    attributes,
    experts_per_rank,
    fetch_reference,
    in_domain,
    native_platforms,
    num_participants,
    place,
    ranks_here,
)
from jax_moe_lb.ops.arrivals import Wanted, add_in_turns, owner_of, room_at_home, rounded, zero_sums
from jax_moe_lb.types import iota


def copy_expert_weights(home: Any, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Any:
    """Fills slots with the experts that they want, out of the home weights of all ranks.

    `PeerCopy` calls it; call it yourself to move weights in another pattern. It is differentiable in `home`: the
    transpose adds the gradients of all replicas at home, see `add_at_home`.

    Args:
        home: a pytree of floating-point arrays `[L, ...]`, the kinds of weights of this rank's home experts; all travel
            together.
        wanted: `[R, P]` int32, the same on all ranks: the expert of each slot of each rank, -1 for an empty one. For
            gradients a rank must want an expert once at most, and none of its own, as in a legal plan; on GPUs those of
            others may be NaN.
        relay: `[R, P]` int32, the rank that each slot copies from, in chunks: a rank forwards a chunk as soon as it has
            it. -1, or the expert's home, means from home, and `None` means so for all. It changes no value, only the
            paths.
        route: between whom weights are copied, and how.

    Returns:
        The same tree of arrays `[P, ...]`; an empty slot is 0.

    Raises:
        ValueError: shapes that do not fit. Where the custom calls run, an entry of `wanted` or `relay` that is out of
            range, a relay that does not hold the expert or goes round in circles stops the program on all ranks, and so
            does a rank that does not come in time.
    """
    leaves, tree = jax.tree.flatten(home)
    if not leaves:
        return home
    operands = _operands(leaves, wanted, relay, route)
    return jax.tree.unflatten(tree, _copy(*operands, experts_per_rank(leaves, wanted, route, "home"), route))


def start(home: Any, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Pending:
    """Begins what `copy_expert_weights` does, and takes the same arguments.

    Use it with `join` where something can be computed meanwhile. Neither is differentiable: write one rule for the pair
    and what is between, with `add_at_home`.
    """
    leaves, tree = jax.tree.flatten(home)
    operands = _operands(leaves, wanted, relay, route)
    ticket, incoming, kept = _start(*operands, experts_per_rank(leaves, wanted, route, "home"), route)
    return Pending(jax.tree.unflatten(tree, incoming), ticket, kept, route)


def join(pending: Pending, after: Any = ()) -> Any:
    """Waits for the copies that `start` began, and returns them.

    Args:
        pending: what `start` returned.
        after: a pytree of arrays that are computed before: on a GPU, what is to run beside the copies.

    Returns:
        The tree of slots, `[P, ...]`, as `copy_expert_weights` returns it.
    """
    incoming, tree = jax.tree.flatten(pending.incoming)
    # As operands: XLA drops what an optimization barrier returns and nobody uses, and then calls this first.
    kept = (*pending.kept, *jax.tree.leaves(after))
    return jax.tree.unflatten(tree, _join(pending.ticket, tuple(incoming), kept, pending.route))


def add_at_home(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Adds what the slots that hold an expert have to what its home has: the transpose of `copy_expert_weights`.

    Use it in a backward pass of your own, for the gradients of replicas. It adds by rank, then by slot, in float32 at
    least, so that equal inputs give equal bits. On a CPU the thread of each home device reads the slots where they lie,
    and rounds their sum once more before it is added; on a GPU see `add_pulled`. Without custom calls the order is that
    of `ops/fetch.py`.

    Args:
        sums: arrays `[G, ...]` of this rank, one per kind of weights, whose first `L` rows are the home experts'. They
            are changed in place where nobody else needs them.
        slots: arrays `[P, ...]` of this rank, likewise.
        wanted: `[R, P]` int32, the expert of each slot of each rank, -1 for an empty one.
        num_home: `L`, the home experts of a rank.
        route: between whom weights were copied.
    """
    if wanted.shape[1] == 0:
        # A call with no slots has nothing to copy from; every rank sees that alike, so none of them waits.
        return sums
    sums = vary_alike(sums, wanted, *slots)
    slots = vary_alike(slots, wanted, *sums)
    experts = num_home * ranks_here(wanted, route)

    def on_cpu(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        out = tuple(like(slot, (experts, *slot.shape[1:])) for slot in slots)
        mine = in_domain(wanted, num_home, route)
        parts = call("copy_sum", out, place(route), mine, *slots, **attributes(num_home, route))
        return tuple(total.at[:experts].add(part.astype(total.dtype)) for total, part in zip(sums, parts, strict=True))

    def on_cuda(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_pulled(sums, slots, wanted, num_home, route)

    def reference(wanted: Wanted, sums: Arrays, slots: Arrays) -> Arrays:
        return add_reference(sums, slots, wanted, num_home, route)

    platforms = native_platforms(route)
    cpu, cuda = (tuple(name for name in platforms if name == platform) for platform in ("cpu", "cuda"))
    elsewhere = partial(by_platform, native=on_cuda, reference=reference, platforms=cuda)
    return by_platform(wanted, sums, slots, native=on_cpu, reference=elsewhere, platforms=cpu)


def add_pulled(sums: Arrays, slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """Computes `add_at_home` out of copies, which every rank makes of the replicas of its home experts.

    It is the form for GPUs, whose copy engines move bytes and do not add. All ranks know from `wanted` who needs what,
    so all make the same copies, usually at once: see `add_in_turns`.
    """
    if wanted.size == 0:
        return sums
    if not route.axis_name:
        return add_reference(sums, slots, wanted, num_home, route)
    num_ranks, num_replicas = wanted.shape
    domain = num_participants(route)
    room = room_at_home(num_replicas, num_home, domain)
    no_relay = jnp.full((num_ranks, room), -1, jnp.int32)
    # The slots are what is copied now: expert `rank * P + slot`.
    source = iota(wanted.size).reshape(wanted.shape)
    # Slots of other turns, and empty ones, go to a rank beyond the last and are dropped.
    owner = owner_of(wanted, num_home)

    def pull(at: Wanted) -> Callable[[Int[Array, ""]], Arrays]:
        nobody = jnp.full((num_ranks, room), -1, jnp.int32)
        pulled = nobody.at[jnp.where(at >= 0, owner, num_ranks), at].set(source, mode="drop")
        landed = _both(slots, pulled, no_relay, num_replicas, route)
        return lambda i: tuple(kind[i] for kind in landed)

    return add_in_turns(sums, wanted, num_home, domain, jax.lax.axis_index(route.axis_name), pull, slots)


# ---- the pair and its gradient --------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _copy(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    return _both(home, wanted, relay, num_home, route)


def _save(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Arrays, Wanted]:
    return _copy(home, wanted, relay, num_home, route), wanted


def _backward(num_home: int, route: Route, wanted: Wanted, upstream: Arrays) -> tuple[Arrays, None, None]:
    zeros = zero_sums(upstream, num_home * ranks_here(wanted, route))
    return rounded(add_at_home(zeros, upstream, wanted, num_home, route), upstream), None, None


_copy.defvjp(_save, _backward)


def _both(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    # One loop around both calls where they are mapped over: `join` wants the buffers of its `start`.
    @jax.custom_batching.sequential_vmap
    def both(home: Arrays, wanted: Wanted, relay: Wanted) -> Arrays:
        return _join(*_start(home, wanted, relay, num_home, route), route)

    return both(home, wanted, relay)


def _operands(home: list[Array], wanted: Wanted, relay: Wanted | None, route: Route) -> tuple[Arrays, Wanted, Wanted]:
    experts_per_rank(home, wanted, route, "home")
    if relay is None:
        # The custom call has one signature, with relays.
        relay = jnp.full(wanted.shape, -1, jnp.int32)
    if relay.shape != wanted.shape:
        raise ValueError(f"relay has shape {relay.shape}; expected that of wanted, {wanted.shape}")
    # A custom call takes no other integers.
    return vary_alike(home, wanted, relay), wanted.astype(jnp.int32), relay.astype(jnp.int32)


def _start(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Array, Arrays, Arrays]:
    """The ticket, the incoming buffers and all operands."""
    num_slots = wanted.shape[1] * ranks_here(wanted, route)

    def native(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        out = like(where), *(like(array, (num_slots, *array.shape[1:])) for array in home)
        tables = in_domain(wanted, num_home, route), in_domain(relay, 1, route)
        return tuple(call("copy_start", out, where, *tables, *home, **attributes(num_home, route)))

    def reference(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        return where, *(fetch_reference(array, wanted, num_home, route) for array in home)

    # They are returned, so that `join` can take them too: as long as a later operation reads them, XLA frees none of
    # the memory that is being copied from.
    operands = (place(route), wanted, relay, *home)
    ticket, *incoming = by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
    return ticket, tuple(incoming), operands


def _join(ticket: Array, incoming: Arrays, kept: Arrays, route: Route) -> Arrays:
    def native(ticket: Array, *arrays: Array) -> Arrays:
        out = tuple(like(array) for array in arrays[: len(incoming)])
        # The copies are written by others into the buffers of `start`, so `join` must return those very buffers.
        aliases = {1 + i: i for i in range(len(incoming))}
        return tuple(call("copy_join", out, ticket, *arrays, aliases=aliases))

    def reference(ticket: Array, *arrays: Array) -> Arrays:
        return arrays[: len(incoming)]

    operands = (ticket, *incoming, *kept)
    return by_platform(*operands, native=native, reference=reference, platforms=native_platforms(route))
