"""Replicas gathered from the home weights of all ranks, and their gradients summed at home.

With `ragged_all_to_all` each replica travels once. If the exchange would be padded steps (on CPUs without the custom
call, or between processes), blocks of `L` experts circulate on a ring of ranks. That copies more bytes and needs no
more memory: in both forms a rank holds `O(S)` experts at a time. Gradients are added to those of the home experts
sequentially and in place, so they need no other accumulator.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.collectives.ragged_all_to_all import as_words, empty_buffer_after, moves_in_process, ragged_all_to_all
from jax_moe_lb.core.manual_axes import vary_alike, vary_like
from jax_moe_lb.core.types import Axes, iota, wide_dtype
from jax_moe_lb.kernels.operands import usual_layout

WeightsOfKind = Float[Array, "..."]
"""One kind of weights of `G` experts, `[G, ...]`."""

Kinds = tuple[WeightsOfKind, ...]
"""All kinds of weights of the same experts."""

Wanted = Int[Array, "R P"]
"""The expert of each of the `P = S - L` replica slots of each rank, -1 for an empty one."""

Pull = Callable[[Wanted], Callable[[Int[Array, ""]], Kinds]]
"""Brings replicas home: given the place at home of each slot's replica, -1 for none, it returns a function that gives
all kinds of the replica at a place. It is asked for no place that nothing comes to."""


def accumulate_sequentially(
    sums: Kinds, wanted: Wanted, num_home: int, domain: int, me: Int[Array, ""], pull: Pull, like: Kinds
) -> Kinds:
    """Adds the gradients of all replicas to those of their home experts.

    As many come home at once as there is room for. That is all of them where ranks are few; a rank that more come home
    to takes turns. Those of an expert are added by rank, then by slot, in float32 at least, and rounded once.

    Args:
        sums: `[G, ...]` for each kind of weights: the gradients of the `L` home experts, and then anything.
        wanted: `[R, P]` int32, the expert of each slot, -1 for an empty one; `P` is at least 1. As in a legal plan, a
            rank holds an expert once at most, and its home experts not there. Sums of others may be NaN.
        num_home: `L`.
        domain: how many ranks have replicas of a home expert at most.
        me: this rank.
        pull: how replicas travel; `max_incoming_replicas` says how many it has to have room for.
        like: `[P, ...]` for each kind, what travels.

    Returns:
        `sums`, whose first `L` experts have got what their replicas had.
    """
    room = max_incoming_replicas(wanted.shape[1], num_home, domain)
    owner, number = owner_of(wanted, num_home), _number_at_home(wanted, num_home)
    # The sum of an expert of several replicas is kept wide from one to the next: rounded each time, small gradients of
    # many replicas would be lost. It belongs to the expert `last`.
    wide = tuple(
        empty_buffer_after(jnp.zeros_like(kind, dtype=wide_dtype(kind), shape=(0, *kind.shape[1:])), 1)[0]
        for kind in like
    )
    takes_turns = room < most_at_home(wanted.shape[1], num_home, domain)
    # More than a legal plan sends find no room: what a rank then gets must not look like a sum.
    is_whole = takes_turns or number.max() < room

    def one_turn(turn: Array, carry: Any) -> Any:
        place = jnp.where(number // room == turn, number % room, -1)
        landed = pull(place)
        mine = (owner == me) & (place >= 0)
        # Places that nobody comes to are beyond the last expert, and so are those of other ranks.
        to = jnp.where(mine, place, room).reshape(-1)
        expert = jnp.full(room, num_home, jnp.int32).at[to].set((wanted % num_home).reshape(-1), mode="drop")

        def add_one(i: Array, carry: Any) -> Any:
            sums, total, last = carry
            e = expert[i]
            total = tuple(
                jnp.where(e == last, so_far, kind[e].astype(so_far.dtype))
                + jnp.where(is_whole, came.astype(so_far.dtype), jnp.nan)
                for so_far, kind, came in zip(total, sums, landed(i), strict=True)
            )
            sums = tuple(
                usual_layout(kind.at[e].set(so_far.astype(kind.dtype)))
                for kind, so_far in zip(sums, total, strict=True)
            )
            return sums, total, vary_like(e, last)

        return jax.lax.fori_loop(0, mine.sum(dtype=jnp.int32), add_one, carry)

    sums, wide, none = _alike(sums, wide, jnp.int32(-1), wanted, *like)
    carry = one_turn(jnp.int32(0), (sums, wide, none))
    if takes_turns:
        # Of the rank that most come home to, so that all ranks take part in every exchange.
        turns = number.max() // room + 1
        # `aot/execution_counts.py` knows by this name that a balanced step runs none of them.
        with jax.named_scope("further_rounds"):
            carry = jax.lax.fori_loop(1, turns, one_turn, carry)
    return carry[0]


def max_incoming_replicas(replica_slots: int, num_home: int, domain: int) -> int:
    """Returns how many replicas come home to a rank at once: all that there may be in a domain of 8 ranks or less.

    Args:
        replica_slots: `P`, the slots of each rank beyond its home experts.
        num_home: `L`.
        domain: how many ranks have replicas of a home expert at most, its home among them.
    """
    # An array without entries is no operand of an exchange.
    return max(1, min(most_at_home(replica_slots, num_home, domain), max(2 * num_home, 8 * replica_slots)))


def most_at_home(replica_slots: int, num_home: int, domain: int) -> int:
    """Counts the replicas that may come home to a rank: each other rank of the domain holds an expert once at most.

    Args:
        replica_slots: `P`, the slots of each rank beyond its home experts.
        num_home: `L`.
        domain: how many ranks have replicas of a home expert at most, its home among them.
    """
    return (domain - 1) * min(replica_slots, num_home)


def owner_of(wanted: Wanted, num_home: int) -> Wanted:
    """Returns the home rank of each wanted expert; no rank for an empty slot."""
    return jnp.where(wanted >= 0, wanted // num_home, wanted.shape[0])


def zero_sums(like: Kinds, num_experts: int) -> Kinds:
    """Makes room for sums of `num_experts` experts, in float32 at least: in bfloat16 small addends would be lost."""
    return tuple(jnp.zeros_like(kind, dtype=wide_dtype(kind), shape=(num_experts, *kind.shape[1:])) for kind in like)


def rounded(sums: Kinds, like: Kinds) -> Kinds:
    """Returns sums in the dtypes of what was added."""
    return tuple(total.astype(kind.dtype) for total, kind in zip(sums, like, strict=True))


def _number_at_home(wanted: Wanted, num_home: int) -> Wanted:
    """The number of each replica among all of its home rank: by expert, then rank and slot; -1 for an empty slot."""
    flat, owner = wanted.reshape(-1), owner_of(wanted, num_home).reshape(-1)
    at = iota(flat.size)
    earlier = (flat[None] < flat[:, None]) | ((flat[None] == flat[:, None]) & (at[None] < at[:, None]))
    number = (earlier & (owner[None] == owner[:, None])).sum(1, dtype=jnp.int32)
    return jnp.where(flat >= 0, number, -1).reshape(wanted.shape)


def _alike(sums: Kinds, wide: Kinds, none: Array, *others: Array) -> tuple[Kinds, Kinds, Array]:
    """The carry of a loop varies over all mesh axes that what it meets there varies over."""
    every = vary_alike((*sums, *wide, none), *others)
    return every[: len(sums)], every[len(sums) : -1], every[-1]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fetch(
    home: WeightsOfKind, wanted: Wanted, num_home: int, axis_name: Axes, in_one_process: bool = False
) -> WeightsOfKind:
    """Returns the replicas that this rank wants, out of the home weights of all ranks.

    `Gather` calls it for each kind of weights: any home expert may be wanted, so that for one exchange of all kinds all
    of them would have to be copied side by side first. Gradients of replicas, which are few, come home in one. It is
    differentiable in `home`, by `add_at_home`.

    Args:
        home: `[L, ...]`, one kind of weights of this rank's home experts.
        wanted: `[R, P]` int32, the same on all ranks: the expert of each slot, -1 for an empty one.
        num_home: `L`.
        axis_name: the mesh axes of the ranks, outermost first.
        in_one_process: as of `ragged_all_to_all`.

    Returns:
        `[P, ...]`; an empty slot is 0, and on GPUs anything: no row is multiplied with it.
    """
    by_ring = partial(ring_fetch, axis_name=axis_name)
    by_ragged = partial(ragged_fetch, axis_name=axis_name, in_one_process=in_one_process)
    on_cpu = by_ragged if moves_in_process() else by_ring
    return jax.lax.platform_dependent(home, wanted, cpu=on_cpu, default=by_ragged)


def _save(
    home: WeightsOfKind, wanted: Wanted, num_home: int, axis_name: Axes, in_one_process: bool
) -> tuple[WeightsOfKind, Wanted]:
    return fetch(home, wanted, num_home, axis_name, in_one_process), wanted


def _backward(
    num_home: int, axis_name: Axes, in_one_process: bool, wanted: Wanted, upstream: WeightsOfKind
) -> tuple[WeightsOfKind, None]:
    zeros, domain = zero_sums((upstream,), num_home), wanted.shape[0]
    sums = add_at_home(zeros, (upstream,), wanted, num_home, domain, axis_name, in_one_process)
    return rounded(sums, (upstream,))[0], None


fetch.defvjp(_save, _backward)


def add_at_home(
    sums: Kinds,
    upstream: Kinds,
    wanted: Wanted,
    num_home: int,
    domain: int,
    axis_name: Axes,
    in_one_process: bool = False,
) -> Kinds:
    """Adds the gradients of all replicas to those of their home experts, in an order that depends on `wanted` alone.

    Args:
        sums: `[G, ...]` for each kind of weights: the gradients of the `L` home experts, and then anything. They are
            changed in place where nobody else needs them.
        upstream: `[P, ...]` for each kind, the gradients of this rank's replicas. All travel together, in one dtype.
        wanted: `[R, P]` int32, the expert of each slot, -1 for an empty one. As in a legal plan, a rank holds an expert
            once at most, and its home experts not there; sums of others may be NaN.
        num_home: `L`.
        domain: the number of ranks inside which replicas are; all of them where plans have no domains.
        axis_name: the mesh axes of the ranks, outermost first.
        in_one_process: as of `ragged_all_to_all`.

    Returns:
        `sums`, whose first `L` experts have got what their replicas had: in float32 at least and rounded once.
    """

    def by_ring(wanted: Wanted, sums: Kinds, upstream: Kinds) -> Kinds:
        def add(total: WeightsOfKind, kind: WeightsOfKind) -> WeightsOfKind:
            return total.at[:num_home].add(ring_sum(kind, wanted, num_home=num_home, axis_name=axis_name))

        return tuple(add(total, kind) for total, kind in zip(sums, upstream, strict=True))

    def by_ragged(wanted: Wanted, sums: Kinds, upstream: Kinds) -> Kinds:
        return ragged_add(
            sums,
            upstream,
            wanted,
            num_home=num_home,
            domain=domain,
            axis_name=axis_name,
            in_one_process=in_one_process,
        )

    on_cpu = by_ragged if moves_in_process() else by_ring
    return jax.lax.platform_dependent(wanted, sums, upstream, cpu=on_cpu, default=by_ragged)


# ---- a ring of ppermutes ------------------------------------------------------
def ring_fetch(home: WeightsOfKind, wanted: Wanted, *, axis_name: Axes) -> WeightsOfKind:
    """Computes `fetch` on a ring: the home blocks walk up, past every rank.

    They always go all the way: a permute is one operation of all devices of the mesh, and groups side by side, whose
    plans differ, must agree on how many there are.
    """
    num_ranks, num_home = wanted.shape[0], home.shape[0]
    distance, local = _ring_distance(wanted, num_home), wanted % num_home
    me = jax.lax.axis_index(axis_name)
    up = [(r, (r + 1) % num_ranks) for r in range(num_ranks)]

    def step(i: Array, carry: tuple[WeightsOfKind, WeightsOfKind]) -> tuple[WeightsOfKind, WeightsOfKind]:
        block, slots = carry
        block = jax.lax.ppermute(block, axis_name, up)
        # A slot takes what it wants when it comes by. Distance 0, which is that of an empty slot, never does: the own
        # block holds no replica.
        return block, jnp.where(_column(distance[me] == i, home), block[local[me]], slots)

    # Zeros that vary over the same mesh axes as the weights.
    slots = jnp.zeros_like(home, shape=(wanted.shape[1], *home.shape[1:]))
    return jax.lax.fori_loop(1, num_ranks, step, (home, slots))[1]


def ring_sum(upstream: WeightsOfKind, wanted: Wanted, *, num_home: int, axis_name: Axes) -> WeightsOfKind:
    """Returns what `add_at_home` adds, `[L, ...]`: sums walk down a ring, past all who have replicas, and come home."""
    num_ranks = wanted.shape[0]
    distance, local = _ring_distance(wanted, num_home), wanted % num_home
    me = jax.lax.axis_index(axis_name)
    down = [(r, (r - 1) % num_ranks) for r in range(num_ranks)]

    def step(i: Array, sums: WeightsOfKind) -> WeightsOfKind:
        # What goes furthest joins first: a sum has passed every rank between a replica and its home when it arrives.
        here = _column(distance[me] == num_ranks - 1 - i, upstream)
        # Several of a rank's slots may hold experts of one home block, and scattering adds all of them.
        sums = sums.at[local[me]].add(jnp.where(here, upstream, 0).astype(sums.dtype))
        return jax.lax.ppermute(sums, axis_name, down)

    return jax.lax.fori_loop(0, num_ranks - 1, step, zero_sums((upstream,), num_home)[0])


def _ring_distance(wanted: Wanted, num_home: int) -> Wanted:
    """Steps up the ring from an expert's home to the rank that wants it; 0 for an empty slot."""
    num_ranks = wanted.shape[0]
    ranks = iota(num_ranks)[:, None]
    return jnp.where(wanted >= 0, (ranks - wanted // num_home) % num_ranks, 0)


# ---- ragged_all_to_all ------------------------------------------------------
def ragged_fetch(
    home: WeightsOfKind, wanted: Wanted, *, axis_name: Axes, in_one_process: bool = False
) -> WeightsOfKind:
    """Computes `fetch` out of one exchange: each replica moves once, as one slice of one expert."""
    num_ranks, num_replicas = wanted.shape
    me, num_home = jax.lax.axis_index(axis_name), home.shape[0]
    owner = owner_of(wanted, num_home)
    slot = jnp.broadcast_to(iota(num_replicas), wanted.shape)
    arriving = owner[me][None] == iota(num_ranks)[:, None]
    return ragged_all_to_all(
        home,
        # Nobody reads an empty slot on a GPU, whose products skip groups without rows.
        empty_buffer_after(home, num_replicas),
        input_offsets=(wanted % num_home).reshape(-1),
        send_sizes=_ones(owner == me),
        output_offsets=slot.reshape(-1),
        recv_sizes=_ones(arriving),
        axis_name=axis_name,
        in_one_process=in_one_process,
        site="replicate",
    )


def ragged_add(
    sums: Kinds,
    upstream: Kinds,
    wanted: Wanted,
    *,
    num_home: int,
    domain: int,
    axis_name: Axes,
    in_one_process: bool = False,
) -> Kinds:
    """Computes `add_at_home` out of exchanges of exact sizes, usually one."""
    num_ranks, num_replicas = wanted.shape
    me, owner = jax.lax.axis_index(axis_name), owner_of(wanted, num_home)
    room = max_incoming_replicas(num_replicas, num_home, domain)
    to_owner = owner[me][None] == iota(num_ranks)[:, None]
    slot = jnp.broadcast_to(iota(num_replicas), wanted.shape)
    # Side by side, all kinds are one row per replica, and take one exchange.
    rows = jnp.concatenate([kind.reshape(num_replicas, -1) for kind in upstream], 1)

    def pull(place: Wanted) -> Callable[[Int[Array, ""]], Kinds]:
        comes = place >= 0
        landed = ragged_all_to_all(
            rows,
            empty_buffer_after(rows, room),
            input_offsets=slot.reshape(-1),
            send_sizes=_ones(to_owner & comes[me][None]),
            output_offsets=jnp.broadcast_to(jnp.maximum(place[me], 0), wanted.shape).reshape(-1),
            recv_sizes=_ones((owner == me) & comes),
            axis_name=axis_name,
            in_one_process=in_one_process,
            site="gradients of replicas",
        )
        words = as_words(landed)
        return lambda i: _split(words[i].reshape(-1), upstream)

    return accumulate_sequentially(sums, wanted, num_home, domain, me, pull, upstream)


def _split(row: Float[Array, "W"], like: Kinds) -> Kinds:
    """The kinds that stand side by side in a row, in their own shapes."""
    parts = jnp.split(row, np.cumsum([kind[0].size for kind in like])[:-1])
    return tuple(part.reshape(kind.shape[1:]) for part, kind in zip(parts, like, strict=True))


def _ones(where: Bool[Array, "R P"]) -> Int[Array, "U"]:
    return where.astype(jnp.int32).reshape(-1)


def _column(mask: Bool[Array, "P"], like: WeightsOfKind) -> Array:
    return mask.reshape(-1, *[1] * (like.ndim - 1))
