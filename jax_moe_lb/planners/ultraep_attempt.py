"""`attempt` makes one attempt of UltraEP's planner in jnp: the replicas under a given limit, all domains side by side.

`planners/ultraep.py` searches for the limit; `ffi/planning/ultraep.h` has the rule.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import Placement, Quota, iota


@pytree
class Queues:
    """Says in which order ranks and experts give, for all `B = R / M` domains with `P = M L` experts each.

    Ranks and experts are numbered inside a domain.

    Args:
        load: `[B, M]` int32, the token copies that each rank serves.
        served: `[B, P]` int32, the token copies that the home of each expert serves of it.
        holds: `[B, P, M]`, whether a rank has a slot for an expert.
        empty: `[B, M]` int32, the number of empty slots of each rank.
        givers: `[B, M]` int32, the ranks, highest load first.
        queue: `[B, P]` int32, the experts, those of each giver in turn, most served first.
    """

    load: Int[Array, "B M"]
    served: Int[Array, "B P"]
    holds: Bool[Array, "B P M"]
    empty: Int[Array, "B M"]
    givers: Int[Array, "B M"]
    queue: Int[Array, "B P"]


def queues_of(placement: Placement, quota: Quota, members: int) -> Queues:
    """Computes what every attempt on this plan starts from.

    Args:
        placement: `[R, S]` int32, the expert in each slot, -1 for an empty one.
        quota: `[E, R]` int32, the token copies of each expert that each rank serves.
        members: how many ranks a domain has.
    """
    num_experts, num_ranks = quota.shape
    home, num_domains = num_experts // num_ranks, num_ranks // members
    load = quota.sum(0, dtype=jnp.int32).reshape(num_domains, members)
    served = quota[iota(num_experts), iota(num_experts) // home].reshape(num_domains, members, home)
    first = (iota(num_ranks) // members * members * home)[:, None]
    # Experts of other domains, and the -1 of an empty slot, get an index past the end, which the scatter below drops:
    # -1 itself would be the last expert of the domain.
    inside = (placement >= first) & (placement < first + members * home)
    expert = jnp.where(inside, placement - first, members * home)
    holds = jnp.zeros((num_ranks, members * home), bool)
    holds = holds.at[iota(num_ranks)[:, None], expert].set(True, mode="drop")
    # Stable, so that of equal loads the lower rank, and then the lower expert, goes first, as in the C++ planner.
    givers = jnp.argsort(load, axis=1, descending=True, stable=True).astype(jnp.int32)
    order = jnp.argsort(served, axis=2, descending=True, stable=True).astype(jnp.int32)
    order = order + (iota(members) * home)[None, :, None]
    return Queues(
        load=load,
        served=served.reshape(num_domains, -1),
        holds=holds.reshape(num_domains, members, -1).swapaxes(1, 2),
        empty=(placement < 0).sum(1, dtype=jnp.int32).reshape(num_domains, members),
        givers=givers,
        queue=jnp.take_along_axis(order, givers[:, :, None], axis=1).reshape(num_domains, -1),
    )


@pytree
class _Attempt:
    """Carries an attempt, one line per domain.

    Args:
        place: the place in the queue that is next; beyond its end when the surplus does not fit.
        need: the token copies that the giver at this place has above the limit; 0 when nobody has any more.
        left: the token copies that the expert at this place can still give.
        room: the token copies that each rank has below the limit.
        open: the number of empty slots of each rank.
        given: the token copies that were moved, by expert and rank.
    """

    place: Int[Array, "B"]
    need: Int[Array, "B"]
    left: Int[Array, "B"]
    room: Int[Array, "B M"]
    open: Int[Array, "B M"]
    given: Int[Array, "B P M"]


def attempt(d: Queues, limit: Array, floor: Array) -> tuple[Int[Array, "B P M"], Bool[Array, "B"]]:
    """Makes the replicas under a limit, and says whether the surplus fits into them.

    Args:
        d: what `queues_of` returned.
        limit: `[B]` int32, the token copies that a rank may serve.
        floor: `[B]` int32, the least token copies of a replica; 0 stands for the dynamic floor, what is still to be
            given shared by the ranks that could take some.

    Returns:
        The token copies that each rank takes of each expert, and whether no rank is above the limit any more.
    """
    place = jnp.zeros_like(limit)
    start = _Attempt(
        place=place,
        need=_need(d, limit, place),
        left=_left(d, place),
        room=jnp.maximum(limit[:, None] - d.load, 0),
        open=d.empty,
        given=jnp.zeros_like(d.holds, jnp.int32),
    )
    size = d.queue.shape[1]
    # Domains that are done, or have failed, wait for the others: their steps change nothing.
    end = jax.lax.while_loop(
        lambda a: ((a.need > 0) & (a.place < size)).any(), lambda a: _replicate(d, limit, floor, a), start
    )
    return end.given, end.need == 0


def _replicate(d: Queues, limit: Array, floor: Array, a: _Attempt) -> _Attempt:
    """Makes one replica, or goes on to the next expert."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    # A domain that is done stands beyond the end. It reads the last expert, and `tokens` is made 0 below.
    place = jnp.minimum(a.place, d.queue.shape[1] - 1)
    expert = d.queue[b, place]
    able = (a.room > 0) & (a.open > 0) & ~d.holds[b, expert] & (a.given[b, expert] == 0)
    # A tie goes to the lower rank. Where none is able, rank 0 is read and gets no tokens.
    rank = jax.lax.argmax(jnp.where(able, a.room, 0), 1, jnp.int32)
    tokens = jnp.minimum(jnp.minimum(a.need, a.left), jnp.where(able[b, rank], a.room[b, rank], 0))
    # The floor is what is still to be given, shared by all that could take some: a rank that takes less would leave
    # more to the others than their share.
    dynamic = ceil_divide(a.need, jnp.maximum(able.sum(1, dtype=jnp.int32), 1))
    tokens = jnp.where((a.place == place) & (tokens >= jnp.where(floor > 0, floor, dynamic)), tokens, 0)
    need, left = a.need - tokens, a.left - tokens
    stay = (tokens > 0) & (need > 0) & (left > 0)
    following = (place // home + 1) * home  # the first expert of the next giver
    # A giver that has a surplus left at its last expert cannot meet the limit. Beyond the end the loop stops, and a
    # need that is not 0 then says that the attempt failed.
    stuck = (need > 0) & ~stay & (place + 1 == following)
    moved_on = jnp.where(need > 0, jnp.where(stuck, d.queue.shape[1], place + 1), following)
    next_place = jnp.where(stay, place, moved_on)
    return _Attempt(
        place=jnp.where(a.need > 0, next_place, a.place),
        need=jnp.where(need > 0, need, _need(d, limit, jnp.where(a.need > 0, following, d.queue.shape[1]))),
        left=jnp.where(stay, left, _left(d, next_place)),
        room=a.room.at[b, rank].add(-tokens),
        open=a.open.at[b, rank].add(-(tokens > 0).astype(jnp.int32)),
        given=a.given.at[b, expert, rank].add(tokens),
    )


def _need(d: Queues, limit: Array, place: Array) -> Array:
    """Returns what the giver at this place has above the limit; 0 beyond the end."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    giver = d.givers[b, jnp.minimum(place // home, d.givers.shape[1] - 1)]
    return jnp.where(place < d.queue.shape[1], jnp.maximum(d.load[b, giver] - limit, 0), 0)


def _left(d: Queues, place: Array) -> Array:
    """Returns what the home of the expert at this place can give: all but one token, as in the released code."""
    b = iota(place.shape[0])
    return jnp.maximum(d.served[b, d.queue[b, jnp.minimum(place, d.queue.shape[1] - 1)]] - 1, 0)


def ceil_divide(value: Array, by: Array | int) -> Array:
    """Divides and rounds up, for `value >= 0` and `by >= 1`, without the sum that could overflow."""
    return value // by + (value % by > 0).astype(jnp.int32)
