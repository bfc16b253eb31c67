"""Copies of experts out of the home weights of all ranks, in plain JAX, and the sums of their gradients back home.

Over `ragged_all_to_all` each replica moves once. Where that would be padded steps (on CPUs without the custom call, or
between processes) blocks of `L` experts walk round a ring of ranks instead, which copies more but holds no more: either
way a rank never sees more than `O(S)` experts.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.ops.ragged_all_to_all import moves_in_process, ragged_all_to_all
from jax_moe_lb.types import iota, wide_dtype

Axes = tuple[str, ...]
Weights = Float[Array, "..."]
"""One kind of weights of `G` experts, `[G, ...]`."""

Kinds = tuple[Weights, ...]
"""All kinds of weights of the same experts."""

Wanted = Int[Array, "R P"]
"""The expert of each of the `P = S - L` replica slots of each rank, -1 for an empty one."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fetch(home: Weights, wanted: Wanted, num_home: int, axis_name: Axes) -> Weights:
    """Returns the replicas that this rank wants, out of the home weights of all ranks.

    `Gather` calls it for each kind of weights. It is differentiable in `home`, by `fetch_transpose`.

    Args:
        home: `[L, ...]`, one kind of weights of this rank's home experts.
        wanted: `[R, P]` int32, the same on all ranks: the expert of each slot, -1 for an empty one.
        num_home: `L`.
        axis_name: the mesh axes of the ranks, outermost first.

    Returns:
        `[P, ...]`; an empty slot is 0.
    """
    by_ring = partial(ring_fetch, axis_name=axis_name)
    by_ragged = partial(ragged_fetch, axis_name=axis_name)
    on_cpu = by_ragged if moves_in_process() else by_ring
    return jax.lax.platform_dependent(home, wanted, cpu=on_cpu, default=by_ragged)


def _save(home: Weights, wanted: Wanted, num_home: int, axis_name: Axes) -> tuple[Weights, Wanted]:
    return fetch(home, wanted, num_home, axis_name), wanted


def _backward(num_home: int, axis_name: Axes, wanted: Wanted, upstream: Weights) -> tuple[Weights, None]:
    return fetch_transpose((upstream,), wanted, num_home, axis_name)[0], None


fetch.defvjp(_save, _backward)


def fetch_transpose(upstream: Kinds, wanted: Wanted, num_home: int, axis_name: Axes) -> Kinds:
    """Sums the gradients of all replicas at home, in an order that depends on `wanted` alone.

    Args:
        upstream: `[P, ...]` for each kind of weights, the gradients of this rank's replicas. All travel together.
        wanted: `[R, P]` int32, the expert of each slot, -1 for an empty one.
        num_home: `L`.
        axis_name: the mesh axes of the ranks, outermost first.

    Returns:
        `[L, ...]` for each kind, added in float32 at least and rounded once; 0 for an expert without replicas.
    """

    def by_ring(wanted: Wanted, *upstream: Weights) -> Kinds:
        return tuple(ring_sum(kind, wanted, num_home=num_home, axis_name=axis_name) for kind in upstream)

    def by_ragged(wanted: Wanted, *upstream: Weights) -> Kinds:
        return ragged_sum(upstream, wanted, num_home=num_home, axis_name=axis_name)

    on_cpu = by_ragged if moves_in_process() else by_ring
    return jax.lax.platform_dependent(wanted, *upstream, cpu=on_cpu, default=by_ragged)


# ---- a ring of ppermutes ------------------------------------------------------


def ring_fetch(home: Weights, wanted: Wanted, *, axis_name: Axes) -> Weights:
    """Computes `fetch` on a ring: the home blocks walk up, past every rank.

    They always go all the way: a permute is one operation of all devices of the mesh, and groups side by side, whose
    plans differ, must agree on how many there are.
    """
    num_ranks, num_home = wanted.shape[0], home.shape[0]
    distance, local = _ring_distance(wanted, num_home), wanted % num_home
    me = jax.lax.axis_index(axis_name)
    up = [(r, (r + 1) % num_ranks) for r in range(num_ranks)]

    def step(i: Array, carry: tuple[Weights, Weights]) -> tuple[Weights, Weights]:
        block, slots = carry
        block = jax.lax.ppermute(block, axis_name, up)
        # A slot takes what it wants when it comes by. Distance 0, which is that of an empty slot, never does: the own
        # block holds no replica.
        return block, jnp.where(_column(distance[me] == i, home), block[local[me]], slots)

    # Zeros that vary over the same mesh axes as the weights.
    slots = jnp.zeros_like(home, shape=(wanted.shape[1], *home.shape[1:]))
    return jax.lax.fori_loop(1, num_ranks, step, (home, slots))[1]


def ring_sum(upstream: Weights, wanted: Wanted, *, num_home: int, axis_name: Axes) -> Weights:
    """Computes `fetch_transpose` on a ring: sums walk down and arrive at home after every rank that holds a replica."""
    num_ranks = wanted.shape[0]
    distance, local = _ring_distance(wanted, num_home), wanted % num_home
    me = jax.lax.axis_index(axis_name)
    down = [(r, (r - 1) % num_ranks) for r in range(num_ranks)]

    def step(i: Array, sums: Weights) -> Weights:
        # What goes furthest joins first: a sum has passed every rank between a replica and its home when it arrives.
        here = _column(distance[me] == num_ranks - 1 - i, upstream)
        # Several of a rank's slots may hold experts of one home block, and scattering adds all of them.
        sums = sums.at[local[me]].add(jnp.where(here, upstream, 0).astype(sums.dtype))
        return jax.lax.ppermute(sums, axis_name, down)

    return jax.lax.fori_loop(0, num_ranks - 1, step, _zero_sums(upstream, num_home)).astype(upstream.dtype)


def _ring_distance(wanted: Wanted, num_home: int) -> Wanted:
    """Steps up the ring from an expert's home to the rank that wants it; 0 for an empty slot."""
    num_ranks = wanted.shape[0]
    ranks = iota(num_ranks)[:, None]
    return jnp.where(wanted >= 0, (ranks - wanted // num_home) % num_ranks, 0)


# ---- ragged_all_to_all ------------------------------------------------------


def ragged_fetch(home: Weights, wanted: Wanted, *, axis_name: Axes) -> Weights:
    """Computes `fetch` out of one exchange: each replica moves once, as one slice of one expert."""
    num_ranks, num_replicas = wanted.shape
    me, num_home = jax.lax.axis_index(axis_name), home.shape[0]
    owner = _owner(wanted, num_home)
    slot = jnp.broadcast_to(iota(num_replicas), wanted.shape)
    arriving = owner[me][None] == iota(num_ranks)[:, None]
    # Empty slots stay 0.
    slots = jnp.zeros_like(home, shape=(num_replicas, *home.shape[1:]))
    return ragged_all_to_all(
        home,
        slots,
        input_offsets=(wanted % num_home).reshape(-1),
        send_sizes=_ones(owner == me),
        output_offsets=slot.reshape(-1),
        recv_sizes=_ones(arriving),
        axis_name=axis_name,
        site="replicate",
    )


def ragged_sum(upstream: Kinds, wanted: Wanted, *, num_home: int, axis_name: Axes) -> Kinds:
    """Computes `fetch_transpose` out of exchanges: replicas of all ranks come home in the order of their ranks and
    slots, as many at once as there is room for, and a product with a matrix of zeros and ones adds them.

    There is room for all where ranks are few; a rank that more come home to takes turns.
    """
    num_ranks, num_replicas = wanted.shape
    me, owner = jax.lax.axis_index(axis_name), _owner(wanted, num_home)
    room = min(num_ranks * num_replicas, max(2 * num_home, 4 * num_replicas))
    number = _number_at_home(owner)
    here, local = owner == me, wanted % num_home
    to_owner = owner[me][None] == iota(num_ranks)[:, None]
    slot = jnp.broadcast_to(iota(num_replicas), wanted.shape)
    # Side by side, all kinds are one row per replica, and take one exchange.
    rows = jnp.concatenate([kind.reshape(num_replicas, -1) for kind in upstream], 1)

    def arrived(turn: Array) -> Weights:
        now = number // room == turn
        landed = ragged_all_to_all(
            rows,
            # Zeros, as places that nobody writes are multiplied with 0 too.
            jnp.zeros_like(rows, shape=(room, rows.shape[1])),
            input_offsets=slot.reshape(-1),
            send_sizes=_ones(to_owner & now[me][None]),
            output_offsets=jnp.broadcast_to(number[me] % room, wanted.shape).reshape(-1),
            recv_sizes=_ones(here & now),
            axis_name=axis_name,
            site="gradients of replicas",
        )
        # Places that are not of this rank and turn are beyond the last, and dropped.
        place = jnp.where(here & now, number % room, room)
        expert = jnp.full(room, num_home, jnp.int32).at[place.reshape(-1)].set(local.reshape(-1), mode="drop")
        chosen = (expert[None] == iota(num_home)[:, None]).astype(rows.dtype)
        # At full precision, as a product of float32 rounds its factors on accelerators otherwise.
        highest = jax.lax.Precision.HIGHEST
        return jnp.matmul(chosen, landed, precision=highest, preferred_element_type=wide_dtype(rows))

    sums = arrived(jnp.int32(0))
    if room < num_ranks * num_replicas:
        # Of the rank that most come home to, so that all ranks take part in every exchange.
        turns = number.max() // room + 1
        # `compiled/executed.py` knows by this name that a balanced step runs none of them.
        with jax.named_scope("further_rounds"):
            sums = jax.lax.fori_loop(1, turns, lambda turn, sums: sums + arrived(turn), sums)
    return _split(sums, upstream, num_home)


def _split(sums: Float[Array, "L W"], like: Kinds, num_home: int) -> Kinds:
    """The kinds that stand side by side in each row, in their own shapes and dtypes."""
    widths = [kind[0].size for kind in like]
    parts = jnp.split(sums, np.cumsum(widths)[:-1], 1)
    return tuple(
        part.astype(kind.dtype).reshape(num_home, *kind.shape[1:]) for part, kind in zip(parts, like, strict=True)
    )


def _owner(wanted: Wanted, num_home: int) -> Wanted:
    """Home rank of each wanted expert; no rank for an empty slot."""
    return jnp.where(wanted >= 0, wanted // num_home, wanted.shape[0])


def _number_at_home(owner: Wanted) -> Wanted:
    """The number of each replica among all of its home rank, in the order of ranks and slots; -1 for an empty slot."""
    num_ranks, flat = owner.shape[0], owner.reshape(-1)
    of_home = (flat[:, None] == iota(num_ranks)[None]).astype(jnp.int32)
    before = of_home.cumsum(0, dtype=jnp.int32) - of_home
    number = jnp.where(flat < num_ranks, (before * of_home).sum(1, dtype=jnp.int32), -1)
    return number.reshape(owner.shape)


def _ones(where: Bool[Array, "R P"]) -> Int[Array, "U"]:
    return where.astype(jnp.int32).reshape(-1)


def _column(mask: Bool[Array, "P"], like: Weights) -> Array:
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def _zero_sums(upstream: Weights, num_home: int) -> Weights:
    # In float32 at least: sums of many bfloat16 gradients would lose their small addends.
    return jnp.zeros_like(upstream, dtype=wide_dtype(upstream), shape=(num_home, *upstream.shape[1:]))
