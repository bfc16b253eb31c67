"""`lowest` finds the lowest limit on the load of a rank that some chain keeps, in jnp, and `fewest` the least replicas.

Chains are made side by side, `WIDTH` at a time, and so a search has few steps. First comes a grid of limits, which
narrows; then chains that choose a little otherwise than the best one so far, each under a lower limit. All of it is
fixed: the noise is a hash of fixed numbers, and the same tokens give the same plan.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.planners.exact_chain import Filled, Way, plain
from jax_moe_lb.planners.exact_fill import fill
from jax_moe_lb.planners.exact_ways import WIDTH, usual_way, way_near
from jax_moe_lb.types import iota

STEPS = 512
"""About how many replicas the chains that look for a lower maximum make one after the other, all generations together;
chosen on recorded loads.
"""

FEWER = 4
"""The generations of chains that look for fewer replicas."""

CLOSE_ENOUGH = 4096
"""A maximum this close to the mean needs no search: `mean / CLOSE_ENOUGH` above it, as in C++."""

NO_PLAN = np.int32(np.iinfo(np.int32).max)
"""The maximum that stands for a plan that does not count."""

Attempt = Callable[[Array, Way], Filled]
"""Makes chains side by side, each under its limit and in its way; limits, ways and plans have a leading dimension."""


@pytree
class Search:
    """Carries the search of one domain.

    Args:
        low: no limit below this one is worth a try.
        plan: the plan of the lowest maximum so far.
        way: how its chain chose.
        turn: the number of the generation.
    """

    low: Int[Array, ""]
    plan: Filled
    way: Way
    turn: Int[Array, ""]

    @property
    def high(self) -> Int[Array, ""]:
        """Returns the lowest maximum so far."""
        return self.plan.load.max()


def lowest(tokens: Int[Array, "M L"], slots: int, max_fan_out: int) -> Search:
    """Searches for the lowest maximum load of a domain.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank; their sum must stay below `2**31`.
        slots: the slots for replicas on each rank, at least 1.
        max_fan_out: how many replicas may be made of the experts of one rank, at least 1.

    Returns:
        The best plan found, and how its chain chose.
    """
    num_ranks, total = tokens.shape[0], tokens.sum(dtype=jnp.int32)
    mean = total // num_ranks + (total % num_ranks > 0).astype(jnp.int32)
    enough = mean // CLOSE_ENOUGH
    attempt = partial(_attempt, tokens, slots, max_fan_out)
    start = Search(mean, plain(tokens, slots), usual_way(tokens), 0 * mean)
    # A round leaves one of `WIDTH` parts of a range that int32 holds.
    rounds = int(np.ceil(31 / np.log2(WIDTH)))
    s = jax.lax.while_loop(
        lambda s: (s.high - s.low > enough) & (s.turn < rounds), lambda s: _narrow(s, attempt), start
    )
    s = Search(mean, s.plan, s.way, 0 * mean)
    generations = max(4, STEPS // (num_ranks * slots))
    return jax.lax.while_loop(
        lambda s: (s.high - mean > enough) & (s.turn < generations), lambda s: _lower(s, attempt), s
    )


def fewest(
    tokens: Int[Array, "M L"],
    found: Search,
    limit: Int[Array, ""],
    max_fan_out: int,
    counts: Int[Array, "M P"] | None = None,
) -> Filled:
    """Searches for a plan of fewer replicas within a limit.

    Args:
        tokens: as for `lowest`.
        found: what `lowest` returned for them.
        limit: the token copies that a rank may serve, at least the maximum of that plan.
        max_fan_out: as for `lowest`.
        counts: `[M, P]` int32, the token copies of each expert that start on each rank: of as many replicas, those are
            better that serve more tokens where they start. With `None` all are alike.

    Returns:
        The plan of fewest replicas found, or the same plan.
    """
    attempt = partial(_attempt, tokens, found.plan.expert.shape[1], max_fan_out)
    start = Search(limit, found.plan, found.way, 0 * limit)
    s = jax.lax.while_loop(lambda s: s.turn < FEWER, lambda s: _fewer(s, attempt, counts), start)
    # As many replicas may do under a lower limit: from the lowest that is known up, in the way that needed so few.
    limits = _grid(found.high, limit)
    plans = attempt(limits, _same(s.way))
    costs = jnp.where(_keeps(plans, limits) & (_number(plans) <= _number(s.plan)), plans.load.max(1), NO_PLAN)
    return _best(s.plan, plans, costs, s.high)[1]


def _attempt(tokens: Array, slots: int, max_fan_out: int, limits: Array, ways: Way) -> Filled:
    return jax.vmap(lambda limit, way: fill(tokens, limit, way, slots, max_fan_out))(limits, ways)


def _grid(low: Array, high: Array) -> Int[Array, "..."]:
    """Returns `WIDTH` limits, from `low` to below `high`."""
    width, k = high - low, iota(WIDTH)
    # Quotient and rest apart: the product with the whole width could overflow.
    return low + width // WIDTH * k + width % WIDTH * k // WIDTH


def _same(way: Way) -> Way:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (WIDTH, *leaf.shape)), way)


def _keeps(plans: Filled, limits: Array) -> Array:
    return plans.load.max(1) <= limits


def _number(plans: Filled) -> Array:
    """Counts the replicas of each plan."""
    return (plans.expert >= 0).sum((-1, -2), dtype=jnp.int32)


def _narrow(s: Search, attempt: Attempt) -> Search:
    """Tries a grid of limits, from `low` to below the best maximum, in the usual way."""
    limits = _grid(s.low, s.high)
    plans = attempt(limits, _same(s.way))
    _, plan = _best(s.plan, plans, plans.load.max(1), s.high)
    high = plan.load.max()
    # Limits below the lowest that was kept count as out of reach, though chains are not that regular.
    low = jnp.where(limits < high, limits + 1, s.low).max()
    # A maximum at the lowest limit of all ends the search.
    return Search(jnp.where(high <= s.low, high, low), plan, s.way, s.turn + 1)


def _lower(s: Search, attempt: Attempt) -> Search:
    """Tries ways near the best one so far, each under a lower limit than its maximum."""
    # From a token copy to half of what is above the mean: chains seldom end below the limit that they are given.
    drop = jnp.maximum((s.high - s.low) >> (1 + iota(WIDTH) // 2 % 8), 1)
    ways = jax.vmap(partial(way_near, s.way, s.high, s.turn))(iota(WIDTH))
    plans = attempt(s.high - drop, ways)
    return _next(s, ways, plans, plans.load.max(1), s.high)


def _fewer(s: Search, attempt: Attempt, counts: Array | None) -> Search:
    """Tries ways near the best one so far, all under the limit `low`."""
    ways = jax.vmap(partial(way_near, s.way, s.low, s.turn))(iota(WIDTH))
    plans = attempt(jnp.broadcast_to(s.low, (WIDTH,)), ways)
    costs = jax.vmap(partial(_replicas, counts=counts))(plans)
    costs = jnp.where(_keeps(plans, s.low), costs, jnp.inf)
    return _next(s, ways, plans, costs, _replicas(s.plan, counts))


def _replicas(plan: Filled, counts: Array | None) -> Float[Array, ""]:
    """Counts replicas; as a fraction comes what they serve of tokens that start elsewhere."""
    number = _number(plan).astype(jnp.float32)
    if counts is None:
        return number
    starts = counts[iota(plan.load.size)[:, None], jnp.maximum(plan.expert, 0)]
    stays = jnp.minimum(starts, plan.tokens).sum(dtype=jnp.int32)
    return number + 1 - stays.astype(jnp.float32) / (plan.load.sum(dtype=jnp.int32) + 1).astype(jnp.float32)


def _next(s: Search, ways: Way, plans: Filled, costs: Array, cost: Array) -> Search:
    best, plan = _best(s.plan, plans, costs, cost)
    way = jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[best], old), ways, s.way)
    return Search(s.low, plan, way, s.turn + 1)


def _best(plan: Filled, plans: Filled, costs: Array, cost: Array) -> tuple[Array, Filled]:
    """Returns which of the plans costs least, and its plan, or the one before if that costs no more."""
    best = jax.lax.argmin(costs, 0, jnp.int32)
    return best, jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[best], old), plans, plan)
