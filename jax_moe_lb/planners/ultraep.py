"""UltraEP's planner (arXiv 2606.04101) makes replicas and quotas under a limit on the load of a rank."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.planners.native import alike, check_plan_shapes, run_planner
from jax_moe_lb.planners.ultraep_attempt import Queues, attempt, ceil_divide, queues_of
from jax_moe_lb.types import Placement, Quota, iota

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
