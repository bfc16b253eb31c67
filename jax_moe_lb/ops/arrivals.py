"""Gradients of replicas that come home are added to those of the home experts, one after the other and in place.

So the sums take no memory but their own, and no pass over experts without replicas.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb._varying import vary_alike, vary_like
from jax_moe_lb.ops.grouped_kernels import usual_layout
from jax_moe_lb.ops.ragged_all_to_all import unwritten_later
from jax_moe_lb.types import iota, wide_dtype

Weights = Float[Array, "..."]
"""One kind of weights of `G` experts, `[G, ...]`."""

Kinds = tuple[Weights, ...]
"""All kinds of weights of the same experts."""

Wanted = Int[Array, "R P"]
"""The expert of each of the `P = S - L` replica slots of each rank, -1 for an empty one."""

Pull = Callable[[Wanted], Callable[[Int[Array, ""]], Kinds]]
"""Brings replicas home: given the place at home of each slot's replica, -1 for none, it returns a function that gives
all kinds of the replica at a place. It is asked for no place that nothing comes to."""


def add_in_turns(
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
        pull: how replicas travel; `room_at_home` says how many it has to have room for.
        like: `[P, ...]` for each kind, what travels.

    Returns:
        `sums`, whose first `L` experts have got what their replicas had.
    """
    room = room_at_home(wanted.shape[1], num_home, domain)
    owner, number = owner_of(wanted, num_home), _number_at_home(wanted, num_home)
    # The sum of an expert of several replicas is kept wide from one to the next: rounded each time, small gradients of
    # many replicas would be lost. It belongs to the expert `last`.
    wide = tuple(
        unwritten_later(jnp.zeros_like(kind, dtype=wide_dtype(kind), shape=(0, *kind.shape[1:])), 1)[0] for kind in like
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
        # `compiled/executed.py` knows by this name that a balanced step runs none of them.
        with jax.named_scope("further_rounds"):
            carry = jax.lax.fori_loop(1, turns, one_turn, carry)
    return carry[0]


def room_at_home(replica_slots: int, num_home: int, domain: int) -> int:
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
