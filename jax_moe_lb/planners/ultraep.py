"""UltraEP's planner (arXiv 2606.04101): replicas and quotas under a limit on the load of a rank.

`attempt` places the replicas under one limit in jnp, for all domains side by side; `ultraep` searches for the limit.
`ffi/planning/ultraep.h` states the rule.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.types import Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import alike, check_plan_shapes, run_planner


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


LADDER = 3
"""The number of attempts with the dynamic floor, as in the released code, before the search with the fixed one."""

START = -1
"""The `way` of a search that has not attempted its first limit yet."""


def ultraep(placement: Placement, quota: Quota, domain: int, eps: float, min_tokens: int) -> tuple[Placement, Quota]:
    """Makes new replicas under a limit on the load of a rank, and gives them quota of their homes.

    `UltraEP` calls it. It is the planner of UltraEP's released code; its rule stands in `ffi/planning/ultraep.h`.
    Replicas that the plan holds already keep their slots and their quota.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; the first `E / R` columns are the
            home experts.
        quota: `[E, R]` integers, the token copies of each expert that each rank serves, at least 0; their sum must stay
            below `2**31`.
        domain: how many ranks a domain has; it divides `R`.
        eps: the fraction by which the first limit exceeds the domain's mean load, 0 to 1; 0.01 is usual.
        min_tokens: the least token copies that a replica takes where the attempts with a floor that adapts have failed,
            at least 1; 1024 is usual for 8192 tokens on a rank.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. A plan that breaks the
        rules above stops the program on a CPU with the custom call; on a GPU with it all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    _check(placement.shape, quota.shape, domain, min_tokens)
    check_eps(eps)
    shapes = placement.shape, quota.shape
    # The C++ takes a 32-bit eps, so that it rounds like the reference.
    placement, quota = run_planner(
        "ultraep",
        shapes,
        placement,
        quota,
        reference=ultraep_reference,
        domain=domain,
        eps=np.float32(eps),
        min_tokens=min_tokens,
    )
    return placement, quota


def _check(placement: tuple[int, ...], quota: tuple[int, ...], domain: int, min_tokens: int) -> None:
    check_plan_shapes(placement, quota, domain)
    if min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens}; expected at least 1")


def check_eps(eps: float) -> None:
    """Refuses an `eps` that is no fraction of the mean load.

    Args:
        eps: the fraction by which the first limit exceeds the mean load; 0 to 1.

    Raises:
        ValueError: it is out of range.
    """
    if not 0 <= eps <= 1:
        raise ValueError(f"eps is {eps}; expected 0 to 1")


def ultraep_reference(
    placement: Placement, quota: Quota, domain: int, eps: float, min_tokens: int
) -> tuple[Placement, Quota]:
    """Computes `ultraep` as loops over attempts and replicas, all domains side by side; it runs where no custom call
    does.
    """
    placement, quota = alike(placement, quota)
    domains = queues_of(placement, quota, domain)
    high = domains.load.max(1)
    low = ceil_divide(domains.load.sum(1, dtype=jnp.int32), domain)
    # Zeros that vary over the mesh axes of the plan.
    none, nothing = jnp.zeros_like(low), jnp.zeros_like(domains.holds, jnp.int32)
    start = _Search(none, _first_limit(low, high, eps), low, high, none + START, nothing, low < 0)
    rise = jnp.maximum(1, ceil_divide(high, 100))

    def step(s: _Search) -> _Search:
        given, fits = attempt(domains, s.limit, jnp.where(s.tries < LADDER, 0, min_tokens))
        return _advance(s, given, fits, rise)

    given = jax.lax.while_loop(lambda s: ~s.done.all(), step, start).given
    return _place(placement, given, domains), _share(quota, given)


# ---- the search for a limit ------------------------------------------------------
@pytree
class _Search:
    """Carries the search, one line per domain.

    Args:
        tries: how many attempts with the dynamic floor, the rungs of the ladder, were made so far.
        limit: the limit of the next attempt, in token copies.
        low: the limit at or above which the search goes on.
        high: a limit that is known to succeed; at first the largest load, under which nothing moves.
        way: which of the four limits inside the range is next.
        given: the token copies that the last attempt moved, by expert and rank.
        done: whether the last attempt is the plan.
    """

    tries: Int[Array, "B"]
    limit: Int[Array, "B"]
    low: Int[Array, "B"]
    high: Int[Array, "B"]
    way: Int[Array, "B"]
    given: Int[Array, "B P M"]
    done: Bool[Array, "B"]


def _first_limit(low: Array, high: Array, eps: float) -> Array:
    limit = jnp.ceil(low.astype(jnp.float32) * (np.float32(1) + np.float32(eps)))
    # Float32, which the C++ planner takes too, so that both try the same limits. It is compared before it is converted,
    # since it may exceed int32.
    beyond = limit >= high.astype(jnp.float32)
    return jnp.where(beyond, high, jnp.maximum(low, jnp.where(beyond, 0, limit).astype(jnp.int32)))


def _advance(s: _Search, given: Array, fits: Array, rise: Array) -> _Search:
    """Says what an attempt at `s.limit` leads to."""
    ladder = s.tries < LADDER
    last = ~ladder & (s.low >= s.high)
    tries = s.tries + ladder.astype(jnp.int32)
    low, high, way = _narrow(s, fits)
    low, high, way = (jnp.where(ladder, old, new) for old, new in ((s.low, low), (s.high, high), (s.way, way)))
    limit = jnp.where(low < high, _limit(low, high, way), high)
    limit = jnp.where(tries < LADDER, jnp.minimum(high, s.limit + rise), limit)
    # A domain that is done keeps its plan while others still search.
    given = jnp.where(s.done[:, None, None], s.given, given)
    return _Search(tries, limit, low, high, way, given, s.done | last | (ladder & fits))


def _narrow(s: _Search, fits: Array) -> tuple[Array, Array, Array]:
    """Returns the range after an attempt of the search, and the next way through it."""
    ends = (s.way == 3) | (s.high - s.low <= 4)
    above = jnp.where(s.way <= 0, s.low, _limit(s.low, s.high, s.way - 1) + 1)
    # The first attempt, at `low`, tells nothing about the range if it fails.
    missed_low = jnp.where((s.way != START) & ends, s.limit + 1, s.low)
    missed_way = jnp.where((s.way != START) & ends, 0, s.way + 1)
    low = jnp.where(fits, jnp.where(s.high - s.low <= 4, s.low, above), missed_low)
    return low, jnp.where(fits, s.limit, s.high), jnp.where(fits, 0, missed_way)


def _limit(low: Array, high: Array, way: Array) -> Array:
    """Computes `low + (high - low) * (way + 1) / 5` in int32; `low` where the range is narrow."""
    # Quotient and rest apart: the product with the whole width could overflow.
    fifth, rest = (high - low) // 5, (high - low) % 5
    return jnp.where(high - low > 4, low + fifth * (way + 1) + rest * (way + 1) // 5, low)


# ---- the plan -------------------------------------------------------------------------
def _place(placement: Placement, given: Int[Array, "B P M"], d: Queues) -> Placement:
    """Puts each rank's new replicas into its empty slots, in the order in which they were made: that of the queue."""
    num_domains, num_local, members = given.shape
    b = iota(num_domains)[:, None]
    made = (given[b, d.queue] > 0).swapaxes(1, 2).reshape(-1, num_local)
    number = jnp.where(made, made.cumsum(1, dtype=jnp.int32), 0)
    experts = jnp.repeat(d.queue + b * num_local, members, axis=0)
    empty = placement < 0
    # The n-th replica of a rank goes to its n-th empty slot. -1 matches no number, and 0, which stands for what was not
    # made, matches no slot.
    wanted = jnp.where(empty, empty.cumsum(1, dtype=jnp.int32), -1)
    match = wanted[:, :, None] == number[:, None]
    return jnp.where(match.any(2), jnp.where(match, experts[:, None], 0).sum(2, dtype=jnp.int32), placement)


def _share(quota: Quota, given: Int[Array, "B P M"]) -> Quota:
    """Moves quota from homes to replicas: what all replicas of an expert take, its home gives."""
    num_domains, num_local, members = given.shape
    home = (iota(num_local) // (num_local // members))[:, None] == iota(members)[None]
    change = given - jnp.where(home[None], given.sum(2, dtype=jnp.int32, keepdims=True), 0)
    b = iota(num_domains)
    blocks = quota.reshape(num_domains, num_local, num_domains, members)
    return blocks.at[b, :, b].add(change).reshape(quota.shape)
