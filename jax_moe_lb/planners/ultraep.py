"""UltraEP's planner (arXiv 2606.04101): replicas and quotas under a limit on the load of a rank.

`attempt` places the replicas under one limit in jnp, for all domains side by side; `ultraep` searches for the limit.
`ffi/planning/ultraep.h` specifies the rule.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.types import Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import (
    ceil_divide,
    check_plan_shapes,
    first_argmax,
    fits_kernel,
    of_domains,
    run_planner,
    within_int32,
)


@pytree
class Queues:
    """Order of giving ranks and experts, for all `B = R / M` domains with `P = M L` experts each."""

    # Ranks and experts are numbered inside a domain.

    load: Int[Array, "B M"]  # token copies served by each rank
    served: Int[Array, "B P"]  # token copies of each expert served at home
    holds: Bool[Array, "B P M"]  # true if the rank has a slot for the expert
    empty: Int[Array, "B M"]  # number of empty slots of each rank
    givers: Int[Array, "B M"]  # ranks by descending load
    queue: Int[Array, "B P"]  # experts by giver, then by descending tokens served


def queues_of(placement: Placement, quota: Quota, members: int) -> Queues:
    """Return the state shared by all attempts on a plan."""
    plan = of_domains(placement, quota, members)
    num_domains, num_local = plan.served.shape
    load, served = plan.quota.sum(1, dtype=jnp.int32), plan.served.reshape(num_domains, members, -1)
    # The stable sort puts the lower of equal ranks and experts first, as in C++.
    givers = jnp.argsort(load, axis=1, descending=True, stable=True).astype(jnp.int32)
    order = jnp.argsort(served, axis=2, descending=True, stable=True).astype(jnp.int32)
    order = order + (iota(members) * (num_local // members))[None, :, None]
    return Queues(
        load=load,
        served=plan.served,
        holds=plan.holds,
        empty=(plan.placement < 0).sum(2, dtype=jnp.int32),
        givers=givers,
        queue=jnp.take_along_axis(order, givers[:, :, None], axis=1).reshape(num_domains, -1),
    )


@pytree
class _Attempt:
    place: Int[Array, "B"]  # next position in the queue; past its end if the surplus does not fit
    need: Int[Array, "B"]  # token copies of the current giver above the limit; 0 if no giver has a surplus left
    left: Int[Array, "B"]  # token copies the current expert can still give
    room: Int[Array, "B M"]  # token copies of each rank below the limit
    open: Int[Array, "B M"]  # number of empty slots of each rank
    given: Int[Array, "B P M"]  # token copies moved, by expert and rank


def attempt(d: Queues, limit: Array, floor: Array) -> tuple[Int[Array, "B P M"], Bool[Array, "B"]]:
    """Make the replicas under a limit, and return whether the surplus fits into them."""
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
    # Finished and failed domains wait for the others: their steps change no entry.
    end = jax.lax.while_loop(
        lambda a: ((a.need > 0) & (a.place < size)).any(), lambda a: _replicate(d, limit, floor, a), start
    )
    return end.given, end.need == 0


def _replicate(d: Queues, limit: Array, floor: Array, a: _Attempt) -> _Attempt:
    """Make one replica, or continue with the next expert."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    # Finished domains are past the end. They read the last expert, and `tokens` is set to 0 below.
    place = jnp.minimum(a.place, d.queue.shape[1] - 1)
    expert = d.queue[b, place]
    able = (a.room > 0) & (a.open > 0) & ~d.holds[b, expert] & (a.given[b, expert] == 0)
    # A tie goes to the lower rank. If none is able, rank 0 is read and gets no tokens.
    rank = first_argmax(jnp.where(able, a.room, 0))
    tokens = jnp.minimum(jnp.minimum(a.need, a.left), jnp.where(able[b, rank], a.room[b, rank], 0))
    # The floor is an equal share of the remaining surplus: a rank taking less would leave more than their share to the
    # others.
    dynamic = ceil_divide(a.need, jnp.maximum(able.sum(1, dtype=jnp.int32), 1))
    tokens = jnp.where((a.place == place) & (tokens >= jnp.where(floor > 0, floor, dynamic)), tokens, 0)
    need, left = a.need - tokens, a.left - tokens
    stay = (tokens > 0) & (need > 0) & (left > 0)
    following = (place // home + 1) * home  # first expert of the next giver
    # A giver with a surplus left after its last expert cannot meet the limit. The loop stops past the end, and a
    # nonzero `need` then marks the attempt as failed.
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
    """Return the load of the current giver above the limit; 0 past the end."""
    b, home = iota(limit.shape[0]), d.queue.shape[1] // d.givers.shape[1]
    giver = d.givers[b, jnp.minimum(place // home, d.givers.shape[1] - 1)]
    return jnp.where(place < d.queue.shape[1], jnp.maximum(d.load[b, giver] - limit, 0), 0)


def _left(d: Queues, place: Array) -> Array:
    """Return the token copies the current expert can give: all but one, as in the released code."""
    b = iota(place.shape[0])
    return jnp.maximum(d.served[b, d.queue[b, jnp.minimum(place, d.queue.shape[1] - 1)]] - 1, 0)


LADDER = 3
"""Number of attempts with the dynamic floor before the search with the fixed one, as in the released code."""

START = -1
"""Value of `_Search.part` before the first attempt of the search."""


def ultraep(placement: Placement, quota: Quota, domain: int, eps: float, min_tokens: int) -> tuple[Placement, Quota]:
    """Make new replicas under a limit on the load of a rank, and move quota from homes to them."""
    # `UltraEP` calls it. It is the planner of UltraEP's released code; `ffi/planning/ultraep.h` specifies its rule.
    # Existing replicas keep their slots and quota.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For an illegal plan,
    # the custom call stops the program on a CPU, and returns -1 in all entries on a GPU.
    check_plan_shapes(placement.shape, quota.shape, domain)
    if min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens}; expected at least 1")
    check_eps(eps)
    shapes = placement.shape, quota.shape
    # C++ takes a 32-bit eps, so it rounds like the reference.
    placement, quota = run_planner(
        "ultraep",
        shapes,
        placement,
        quota,
        reference=ultraep_reference,
        in_kernel=lambda: fits_kernel("ultraep", placement.shape, len(quota), domain),
        domain=domain,
        eps=np.float32(eps),
        min_tokens=min_tokens,
    )
    return placement, quota


def check_eps(eps: float) -> None:
    """Check the option `eps`."""
    if not 0 <= eps <= 1:
        raise ValueError(f"eps is {eps}; expected 0 to 1")


def ultraep_reference(
    placement: Placement, quota: Quota, domain: int, eps: float, min_tokens: int
) -> tuple[Placement, Quota]:
    """Compute `ultraep` in jnp as loops over attempts and replicas, all domains side by side."""
    placement, quota = alike(placement, quota)
    min_tokens = within_int32(min_tokens)
    domains = queues_of(placement, quota, domain)
    high = domains.load.max(1)
    low = ceil_divide(domains.load.sum(1, dtype=jnp.int32), domain)
    # Zeros varying over the mesh axes of the plan.
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
    """Carry of the search, one entry per domain."""

    tries: Int[Array, "B"]  # number of attempts with the dynamic floor so far
    limit: Int[Array, "B"]  # limit of the next attempt, in token copies
    low: Int[Array, "B"]  # lower end of the range of limits
    high: Int[Array, "B"]  # limit known to succeed; initially the largest load, for which no token moves
    part: Int[Array, "B"]  # index of the next of the four limits inside the range
    given: Int[Array, "B P M"]  # token copies moved by the last attempt, by expert and rank
    done: Bool[Array, "B"]  # true if the last attempt is the plan


def _first_limit(low: Array, high: Array, eps: float) -> Array:
    limit = jnp.ceil(low.astype(jnp.float32) * (np.float32(1) + np.float32(eps)))
    # Use float32 like the C++ planner, so that both try equal limits. Compare before the conversion, because `limit`
    # may exceed int32.
    beyond = limit >= high.astype(jnp.float32)
    return jnp.where(beyond, high, jnp.maximum(low, jnp.where(beyond, 0, limit).astype(jnp.int32)))


def _advance(s: _Search, given: Array, fits: Array, rise: Array) -> _Search:
    """Return the state of the search after an attempt at `s.limit`."""
    ladder = s.tries < LADDER
    last = ~ladder & (s.low >= s.high)
    tries = s.tries + ladder.astype(jnp.int32)
    low, high, part = _narrow(s, fits)
    low, high, part = (jnp.where(ladder, old, new) for old, new in ((s.low, low), (s.high, high), (s.part, part)))
    limit = jnp.where(low < high, _limit(low, high, part), high)
    limit = jnp.where(tries < LADDER, jnp.minimum(high, s.limit + rise), limit)
    # Finished domains keep their plan while others search.
    given = jnp.where(s.done[:, None, None], s.given, given)
    return _Search(tries, limit, low, high, part, given, s.done | last | (ladder & fits))


def _narrow(s: _Search, fits: Array) -> tuple[Array, Array, Array]:
    """Return the range after an attempt, and the index of the next limit inside it."""
    ends = (s.part == 3) | (s.high - s.low <= 4)
    above = jnp.where(s.part <= 0, s.low, _limit(s.low, s.high, s.part - 1) + 1)
    # If the first attempt, at `low`, fails, the range is unchanged.
    missed_low = jnp.where((s.part != START) & ends, s.limit + 1, s.low)
    missed_part = jnp.where((s.part != START) & ends, 0, s.part + 1)
    low = jnp.where(fits, jnp.where(s.high - s.low <= 4, s.low, above), missed_low)
    return low, jnp.where(fits, s.limit, s.high), jnp.where(fits, 0, missed_part)


def _limit(low: Array, high: Array, part: Array) -> Array:
    """Return `low + (high - low) * (part + 1) / 5` in int32; `low` if the range is at most 4 wide."""
    # Multiply quotient and remainder separately: the product with the whole width could overflow.
    fifth, rest = (high - low) // 5, (high - low) % 5
    return jnp.where(high - low > 4, low + fifth * (part + 1) + rest * (part + 1) // 5, low)


# ---- the plan -------------------------------------------------------------------------
def _place(placement: Placement, given: Int[Array, "B P M"], d: Queues) -> Placement:
    """Put each rank's new replicas into its empty slots, in the order of the queue."""
    num_domains, num_local, members = given.shape
    b = iota(num_domains)[:, None]
    made = (given[b, d.queue] > 0).swapaxes(1, 2).reshape(-1, num_local)
    number = jnp.where(made, made.cumsum(1, dtype=jnp.int32), 0)
    experts = jnp.repeat(d.queue + b * num_local, members, axis=0)
    empty = placement < 0
    # The n-th replica of a rank goes to its n-th empty slot. Occupied slots have -1 and absent replicas have 0, so
    # these match none.
    wanted = jnp.where(empty, empty.cumsum(1, dtype=jnp.int32), -1)
    match = wanted[:, :, None] == number[:, None]
    return jnp.where(match.any(2), jnp.where(match, experts[:, None], 0).sum(2, dtype=jnp.int32), placement)


def _share(quota: Quota, given: Int[Array, "B P M"]) -> Quota:
    """Move quota from homes to replicas; each home gives the sum of the replicas' tokens."""
    num_domains, num_local, members = given.shape
    home = (iota(num_local) // (num_local // members))[:, None] == iota(members)[None]
    change = given - jnp.where(home[None], given.sum(2, dtype=jnp.int32, keepdims=True), 0)
    b = iota(num_domains)
    blocks = quota.reshape(num_domains, num_local, num_domains, members)
    return blocks.at[b, :, b].add(change).reshape(quota.shape)
