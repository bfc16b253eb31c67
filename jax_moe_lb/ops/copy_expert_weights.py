"""Copies of expert weights between ranks that run beside whatever a program computes meanwhile.

`start` begins the copies and `join` returns them; what a program computes in between, and
does not need them for, runs at the same time. `copy_expert_weights` is both at once, with a
gradient.

On a CPU the copies are made by a thread of each receiving device, on a GPU by its copy engines on
a stream of their own. Between processes, and where the custom calls were not built, `start`
is the exchange of `ops/fetch.py`, and nothing overlaps.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb._custom_calls import by_platform, call, like
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
    sum_reference,
    vary_alike,
)
from jax_moe_lb.ops.fetch import Wanted
from jax_moe_lb.types import iota, wide_dtype


def copy_expert_weights(home: Any, wanted: Wanted, relay: Wanted | None = None, *, route: Route) -> Any:
    """The experts that each slot wants, out of the home weights of all ranks.

    Differentiable in `home`: the transpose adds the gradients of all replicas at home, see
    `sum_at_home`.

    Args:
        home: a pytree of floating-point arrays `[L, ...]`, the kinds of weights of this rank's home experts; all
            travel together.
        wanted: int32, the same on all ranks: expert of each slot of each rank, -1 for an empty one.
        relay: int32, the rank that each slot copies from, in chunks: a rank forwards a chunk as soon as it has it.
            -1, or the expert's home: from home. `None`: all from home. Changes no value, only the paths.
        route: between whom.

    Returns:
        The same tree of `[P, ...]`; an empty slot is 0.

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
    """Begins what `copy_expert_weights` does; same arguments.

    Not differentiable, and neither is `join`: write one rule for the pair and what is
    between, with `sum_at_home`.
    """
    leaves, tree = jax.tree.flatten(home)
    operands = _operands(leaves, wanted, relay, route)
    ticket, incoming, kept = _start(*operands, experts_per_rank(leaves, wanted, route, "home"), route)
    return Pending(jax.tree.unflatten(tree, incoming), ticket, kept)


def join(pending: Pending, after: Any = ()) -> Any:
    """The copies, once they are there.

    Args:
        pending: what `start` returned.
        after: a pytree that is computed before: on a GPU, what is to run beside the copies.
    """
    incoming, tree = jax.tree.flatten(pending.incoming)
    # As operands: XLA drops what an optimization barrier returns and nobody uses, and then calls this first.
    kept = (*pending.kept, *jax.tree.leaves(after))
    return jax.tree.unflatten(tree, _join(pending.ticket, tuple(incoming), kept))


def sum_at_home(slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """The transpose of `copy_expert_weights`: sums `[L, ...]` of what the slots that hold an expert have.

    Added by rank, then by slot, in float32 at least, and rounded once, so that equal
    inputs give equal bits; 0 for an expert without replicas. On a CPU the thread of each home
    device reads the slots where they lie; on a GPU see `sum_by_turns`. Without custom calls
    the order is that of `ops/fetch.py`.

    Args:
        slots: arrays `[P, ...]`, one per kind of weights.
        wanted: expert of each slot of each rank.
        num_home: `L`.
        route: between whom.
    """
    slots = vary_alike(slots, wanted)
    experts = num_home * ranks_here(wanted, route)
    if wanted.shape[1] == 0:
        return tuple(jnp.zeros_like(slot, shape=(experts, *slot.shape[1:])) for slot in slots)

    def on_cpu(wanted: Wanted, *slots: Array) -> Arrays:
        out = tuple(like(slot, (experts, *slot.shape[1:])) for slot in slots)
        return tuple(call("copy_sum", out, place(route), wanted, *slots, **attributes(num_home, route)))

    def on_cuda(wanted: Wanted, *slots: Array) -> Arrays:
        return sum_by_turns(slots, wanted, num_home, route)

    def reference(wanted: Wanted, *slots: Array) -> Arrays:
        return tuple(sum_reference(slot, wanted, num_home, route) for slot in slots)

    platforms = native_platforms()
    elsewhere = partial(by_platform, native=on_cuda, reference=reference, platforms=platforms[1:])
    return by_platform(wanted, *slots, native=on_cpu, reference=elsewhere, platforms=platforms[:1])


def sum_by_turns(slots: Arrays, wanted: Wanted, num_home: int, route: Route) -> Arrays:
    """`sum_at_home` out of copies: first every expert's first replica is pulled home and added, then every second one.

    Every rank knows from `wanted` how many turns there are, so all make the same copies. Bits equal those of
    `sum_at_home` on a CPU.
    """
    if wanted.shape[1] == 0:
        return sum_at_home(slots, wanted, num_home, route)
    flat, num_experts = wanted.reshape(-1), wanted.shape[0] * num_home
    same = (flat[:, None] == flat[None]) & (iota(flat.size)[:, None] > iota(flat.size)[None])
    turn = jnp.where(flat >= 0, same.sum(1, dtype=jnp.int32), -1)
    out = [(num_home * ranks_here(wanted, route), *slot.shape[1:]) for slot in slots]
    no_relay = jnp.full((wanted.shape[0], num_home), -1, jnp.int32)

    def step(i: Array, sums: Arrays) -> Arrays:
        # The slots are what is copied now: expert `rank * P + slot`.
        target = jnp.where(turn == i, flat, num_experts)
        pulled = jnp.full(num_experts, -1, jnp.int32).at[target].set(iota(flat.size), mode="drop")
        arrived = _both(slots, pulled.reshape(-1, num_home), no_relay, wanted.shape[1], route)
        return tuple(total + part.astype(total.dtype) for total, part in zip(sums, arrived, strict=True))

    zeros = tuple(
        jnp.zeros_like(slot, dtype=wide_dtype(slot), shape=shape) for slot, shape in zip(slots, out, strict=True)
    )
    sums = jax.lax.fori_loop(0, turn.max(initial=-1) + 1, step, zeros)
    return tuple(total.astype(slot.dtype) for total, slot in zip(sums, slots, strict=True))


# ---- the pair and its gradient --------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _copy(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    return _both(home, wanted, relay, num_home, route)


def _save(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Arrays, Wanted]:
    return _copy(home, wanted, relay, num_home, route), wanted


def _backward(num_home: int, route: Route, wanted: Wanted, upstream: Arrays) -> tuple[Arrays, None, None]:
    return sum_at_home(upstream, wanted, num_home, route), None, None


_copy.defvjp(_save, _backward)


def _both(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> Arrays:
    # One loop around both calls where they are mapped over: `join` wants the buffers of its `start`.
    @jax.custom_batching.sequential_vmap
    def both(home: Arrays, wanted: Wanted, relay: Wanted) -> Arrays:
        return _join(*_start(home, wanted, relay, num_home, route))

    return both(home, wanted, relay)


def _operands(home: list[Array], wanted: Wanted, relay: Wanted | None, route: Route) -> tuple[Arrays, Wanted, Wanted]:
    experts_per_rank(home, wanted, route, "home")
    if relay is None:
        relay = jnp.full(wanted.shape, -1, jnp.int32)
    if relay.shape != wanted.shape:
        raise ValueError(f"relay has shape {relay.shape}; expected that of wanted, {wanted.shape}")
    return vary_alike(home, wanted, relay), wanted.astype(jnp.int32), relay.astype(jnp.int32)


def _start(home: Arrays, wanted: Wanted, relay: Wanted, num_home: int, route: Route) -> tuple[Array, Arrays, Arrays]:
    """The ticket, the incoming buffers and all operands."""
    num_slots = wanted.shape[1] * ranks_here(wanted, route)

    def native(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        out = like(where), *(like(array, (num_slots, *array.shape[1:])) for array in home)
        return tuple(call("copy_start", out, where, wanted, relay, *home, **attributes(num_home, route)))

    def reference(where: Array, wanted: Wanted, relay: Wanted, *home: Array) -> Arrays:
        return where, *(fetch_reference(array, wanted, num_home, route) for array in home)

    operands = (place(route), wanted, relay, *home)
    ticket, *incoming = by_platform(*operands, native=native, reference=reference, platforms=native_platforms())
    return ticket, tuple(incoming), operands


def _join(ticket: Array, incoming: Arrays, kept: Arrays) -> Arrays:
    def native(ticket: Array, *arrays: Array) -> Arrays:
        out = tuple(like(array) for array in arrays[: len(incoming)])
        aliases = {1 + i: i for i in range(len(incoming))}
        return tuple(call("copy_join", out, ticket, *arrays, aliases=aliases))

    def reference(ticket: Array, *arrays: Array) -> Arrays:
        return arrays[: len(incoming)]

    return by_platform(ticket, *incoming, *kept, native=native, reference=reference, platforms=native_platforms())
