"""One attempt of UltraEP's planner in jnp: the replicas under a given limit, all domains side by side."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import Placement, Quota, iota


@pytree
class Queues:
    """All domains, `B = R / M` of them, with `P = M L` experts each. Ranks and experts are numbered inside a domain.

    Args:
        load: tokens of each rank.
        served: what the home of each expert serves.
        holds: whether a rank has a slot for an expert.
        empty: empty slots of each rank.
        givers: ranks, highest load first.
        queue: experts, those of each giver in turn, most served first.
    """

    load: Int[Array, "B M"]
    served: Int[Array, "B P"]
    holds: Bool[Array, "B P M"]
    empty: Int[Array, "B M"]
    givers: Int[Array, "B M"]
    queue: Int[Array, "B P"]


def queues_of(placement: Placement, quota: Quota, members: int) -> Queues:
    """What every attempt on this plan starts from."""
    num_experts, num_ranks = quota.shape
    home, num_domains = num_experts // num_ranks, num_ranks // members
    load = quota.sum(0, dtype=jnp.int32).reshape(num_domains, members)
    served = quota[iota(num_experts), iota(num_experts) // home].reshape(num_domains, members, home)
    first = (iota(num_ranks) // members * members * home)[:, None]
    # Experts of other domains, and the -1 of an empty slot, fall off the end.
    inside = (placement >= first) & (placement < first + members * home)
    expert = jnp.where(inside, placement - first, members * home)
    holds = jnp.zeros((num_ranks, members * home), bool)
    holds = holds.at[iota(num_ranks)[:, None], expert].set(True, mode="drop")
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
    """One line per domain.

    Args:
        place: in the queue; beyond its end when the surplus does not fit.
        need: what the giver at this place has above the limit; 0 when nobody has any more.
        left: what the expert at this place can still give.
        room: what each rank has below the limit.
        open: empty slots of each rank.
        given: tokens by expert and rank.
    """

    place: Int[Array, "B"]
    need: Int[Array, "B"]
    left: Int[Array, "B"]
    room: Int[Array, "B M"]
    open: Int[Array, "B M"]
    given: Int[Array, "B P M"]


def attempt(d: Queues, limit: Array, floor: Array) -> tuple[Int[Array, "B P M"], Bool[Array, "B"]]:
    """The replicas under a limit, and whether the surplus fits into them; `floor` 0 is the dynamic one."""
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
    end = jax.lax.while_loop(
        lambda a: ((a.need > 0) & (a.place < size)).any(), lambda a: _replicate(d, limit, floor, a), start
    )
    return end.given, end.need == 0


def _replicate(d: Queues, limit: Array, floor: Array, a: _Attempt) -> _Attempt:
    """One replica, or on to the next expert."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    place = jnp.minimum(a.place, d.queue.shape[1] - 1)
    expert = d.queue[b, place]
    able = (a.room > 0) & (a.open > 0) & ~d.holds[b, expert] & (a.given[b, expert] == 0)
    rank = jax.lax.argmax(jnp.where(able, a.room, 0), 1, jnp.int32)
    tokens = jnp.minimum(jnp.minimum(a.need, a.left), jnp.where(able[b, rank], a.room[b, rank], 0))
    dynamic = ceil_divide(a.need, jnp.maximum(able.sum(1, dtype=jnp.int32), 1))
    tokens = jnp.where((a.place == place) & (tokens >= jnp.where(floor > 0, floor, dynamic)), tokens, 0)
    need, left = a.need - tokens, a.left - tokens
    stay = (tokens > 0) & (need > 0) & (left > 0)
    following = (place // home + 1) * home  # the first expert of the next giver
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
    """What the giver at this place has above the limit; 0 beyond the end."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    giver = d.givers[b, jnp.minimum(place // home, d.givers.shape[1] - 1)]
    return jnp.where(place < d.queue.shape[1], jnp.maximum(d.load[b, giver] - limit, 0), 0)


def _left(d: Queues, place: Array) -> Array:
    """What the home of the expert at this place can give: all but one token."""
    b = iota(place.shape[0])
    return jnp.maximum(d.served[b, d.queue[b, jnp.minimum(place, d.queue.shape[1] - 1)]] - 1, 0)


def ceil_divide(value: Array, by: Array | int) -> Array:
    """For `value >= 0` and `by >= 1`, without the sum that could overflow."""
    return value // by + (value % by > 0).astype(jnp.int32)
