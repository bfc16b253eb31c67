"""`localize` lets replicas change places so that more tokens stay on their rank, in jnp: the last part of `exact`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.planners.exact_chain import Filled
from jax_moe_lb.types import host_iota, iota

MOST_SLOTS = 1024
"""The slots for replicas in a domain up to which pairs of them are looked at, all at once."""


@pytree
class _Places:
    """Carries the loop over exchanges, with the domain's `n = M Z` slots in one line.

    Args:
        expert: the expert of each slot, -1 for an empty one.
        tokens: the token copies that it serves.
        load: the token copies that each rank serves.
        turn: the number of the exchange.
        more: whether the last step exchanged two slots.
    """

    expert: Int[Array, "n"]
    tokens: Int[Array, "n"]
    load: Int[Array, "M"]
    turn: Int[Array, ""]
    more: Bool[Array, ""]


def localize(plan: Filled, counts: Int[Array, "M P"], limit: Int[Array, ""]) -> Filled:
    """Exchanges the contents of two slots, of which one may be empty, as long as more tokens then stay on their rank.

    Each step makes the exchange that gains most, as many as there are slots at most; `ffi/planning/localize.h` goes
    over all pairs once instead. Above `MOST_SLOTS` slots it changes nothing, as pairs would need much memory.

    Args:
        plan: the plan of one domain.
        counts: `[M, P]` int32, the token copies of each expert that start on each rank.
        limit: the token copies that a rank may serve; no rank of the plan has more.
    """
    if plan.expert.size > MOST_SLOTS:
        return plan
    num_home = plan.left.size // plan.load.size
    start = _Places(plan.expert.reshape(-1), plan.tokens.reshape(-1), plan.load, 0 * limit, limit >= 0)
    end = jax.lax.while_loop(
        lambda p: p.more & (p.turn < plan.expert.size), lambda p: _exchange(p, counts, limit, num_home), start
    )
    shape = plan.expert.shape
    return Filled(end.expert.reshape(shape), end.tokens.reshape(shape), plan.left, end.load)


def _exchange(p: _Places, counts: Array, limit: Array, num_home: int) -> _Places:
    """Makes the exchange of the largest gain, if any gains."""
    gain = jnp.where(_may(p, limit, num_home), _gain(p, counts), 0)
    pair = jax.lax.argmax(gain.reshape(-1), 0, jnp.int32)
    a, b = pair // p.expert.size, pair % p.expert.size
    more, slots = gain[a, b] > 0, p.expert.size // p.load.size
    slot, rank = iota(p.expert.size), iota(p.load.size)
    gets = jnp.where(more & (slot == a), b, jnp.where(more & (slot == b), a, slot))
    change = jnp.where(more, p.tokens[b] - p.tokens[a], 0)
    load = p.load + jnp.where(rank == a // slots, change, 0) - jnp.where(rank == b // slots, change, 0)
    return _Places(p.expert[gets], p.tokens[gets], load, p.turn + 1, more)


def _gain(p: _Places, counts: Array) -> Int[Array, "n n"]:
    """Computes how many more tokens stay on their rank if two slots exchange what they hold."""
    rank = host_iota(p.expert.size) // (p.expert.size // p.load.size)
    # What each slot's replica would serve of tokens that start on a rank, for every rank; 0 for an empty slot.
    stays = jnp.minimum(counts.T[jnp.maximum(p.expert, 0)], p.tokens[:, None])
    moved = stays[:, rank] - jnp.take_along_axis(stays, jnp.asarray(rank)[:, None], 1)
    return moved + moved.T


def _may(p: _Places, limit: Array, num_home: int) -> Bool[Array, "n n"]:
    """Says which pairs of slots may exchange: no rank holds an expert twice, or comes above the limit."""
    size, ranks = p.expert.size, p.load.size
    rank = host_iota(size) // (size // ranks)
    same = (p.expert[:, None] == p.expert[None]) & (p.expert >= 0)[:, None]
    # Whether the rank of a slot holds the expert of another, as a replica or because it is at home there.
    holds = same.reshape(size, ranks, -1).any(2)[:, rank] | ((p.expert // num_home)[:, None] == rank[None])
    fits = p.tokens[:, None] - p.tokens[None] <= (limit - p.load)[rank][None]
    return ~holds & ~holds.T & fits & fits.T
