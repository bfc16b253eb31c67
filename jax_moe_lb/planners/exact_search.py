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
from jax_moe_lb._varying import vary_like
from jax_moe_lb.planners.exact_chain import Filled, Way, fill, plain
from jax_moe_lb.types import host_iota, iota

WIDTH = 64
"""The chains that are made side by side."""

STEPS = 512
"""About how many replicas the chains that look for a lower maximum make one after the other, all generations together;
chosen on recorded loads.
"""

FEWER = 4
"""The generations of chains that look for fewer replicas."""

CLOSE_ENOUGH = 4096
"""A maximum this close to the mean needs no search: `mean / CLOSE_ENOUGH` above it, as in C++."""

LIKING, WELCOME, START = np.float32(0.15), np.float32(0.5), np.float32(0.1)
"""How far the noise goes: in `Way.liking`, in `Way.welcome`, and in `Way.start` as a fraction of the limit."""

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
    start = Search(mean, plain(tokens, slots), _usual_way(tokens), 0 * mean)
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
    return jax.lax.while_loop(lambda s: s.turn < FEWER, lambda s: _fewer(s, attempt, counts), start).plan


def _near(way: Way, limit: Int[Array, ""], seed: Int[Array, ""], number: Int[Array, ""]) -> Way:
    """Returns one of `WIDTH` ways that choose a little otherwise; number 0 is the way itself, but for `pressing`.

    Args:
        way: the way that they are near to.
        limit: about the limit of the chains; `Way.start` is counted in token copies.
        seed: a number; each gives other ways.
        number: which of them, from 0 to `WIDTH - 1`.
    """
    # Most are near and some are far: which helps differs between loads.
    reach = jnp.where(number == 0, 0, 1 / (1 << (number // 16 % 4)).astype(jnp.float32))
    # A rank that gives before it must is seldom of use, so that half of the ways leave `start` as it is.
    ahead = limit.astype(jnp.float32) * START * (number % 2).astype(jnp.float32)
    later = ahead * _noise(way.start.size, 4 * seed, number)
    return Way(
        liking=way.liking * (1 + LIKING * reach * _noise(way.liking.size, 4 * seed + 1, number)),
        welcome=way.welcome * (1 + WELCOME * reach * _noise(way.welcome.size, 4 * seed + 2, number)),
        pressing=jnp.maximum(_noise(1, 4 * seed + 3, number)[0], 0),
        start=jnp.maximum(way.start + later.astype(jnp.int32), 0),
    )


def _usual_way(tokens: Int[Array, "M L"]) -> Way:
    """Returns the way without noise: the hottest expert to the rank with most room."""
    none = vary_like(jnp.zeros(tokens.shape[0], jnp.int32), tokens)
    ones = 1 + none.astype(jnp.float32)
    return Way(1 + 0 * tokens.reshape(-1).astype(jnp.float32), ones, ones[0] - 1, none)


def _noise(size: int, seed: Int[Array, ""], number: Int[Array, ""]) -> Float[Array, "..."]:
    """Computes so many numbers from -1 to 1 that look random: a hash of their indices, the seed and the number.

    It is written out here because what `jax.random` draws depends on JAX's options.
    """
    bits = (number * size + iota(size)).astype(jnp.uint32) * np.uint32(0x9E3779B9)
    bits = bits + seed.astype(jnp.uint32) * np.uint32(0x85EBCA6B)
    for factor in (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(16))) * factor
    # 24 bits, which float32 holds exactly.
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


def _attempt(tokens: Array, slots: int, max_fan_out: int, limits: Array, ways: Way) -> Filled:
    return jax.vmap(lambda limit, way: fill(tokens, limit, way, slots, max_fan_out))(limits, ways)


def _narrow(s: Search, attempt: Attempt) -> Search:
    """Tries a grid of limits, from `low` to below the best maximum, in the usual way."""
    width, k = s.high - s.low, iota(WIDTH)
    # Quotient and rest apart: the product with the whole width could overflow.
    limits = s.low + width // WIDTH * k + width % WIDTH * k // WIDTH
    plans = attempt(limits, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (WIDTH, *leaf.shape)), s.way))
    _, plan = _best(s.plan, plans, plans.load.max(1), s.high)
    high = plan.load.max()
    # Limits below the lowest that was kept count as out of reach, though chains are not that regular.
    low = jnp.where(limits < high, limits + 1, s.low).max()
    # A maximum at the lowest limit of all ends the search.
    return Search(jnp.where(high <= s.low, high, low), plan, s.way, s.turn + 1)


def _lower(s: Search, attempt: Attempt) -> Search:
    """Tries ways near the best one so far, each under a lower limit than its maximum."""
    # From a token copy to half of what is above the mean: chains seldom end below the limit that they are given.
    drop = jnp.maximum((s.high - s.low) >> (1 + host_iota(WIDTH) // 2 % 8), 1)
    ways = jax.vmap(partial(_near, s.way, s.high, s.turn))(iota(WIDTH))
    plans = attempt(s.high - drop, ways)
    return _next(s, ways, plans, plans.load.max(1), s.high)


def _fewer(s: Search, attempt: Attempt, counts: Array | None) -> Search:
    """Tries ways near the best one so far, all under the limit `low`."""
    ways = jax.vmap(partial(_near, s.way, s.low, s.turn))(iota(WIDTH))
    plans = attempt(jnp.broadcast_to(s.low, (WIDTH,)), ways)
    costs = jax.vmap(partial(_replicas, counts=counts))(plans)
    costs = jnp.where(plans.load.max(1) <= s.low, costs, jnp.inf)
    return _next(s, ways, plans, costs, _replicas(s.plan, counts))


def _replicas(plan: Filled, counts: Array | None) -> Float[Array, ""]:
    """Counts replicas; as a fraction comes what they serve of tokens that start elsewhere."""
    number = (plan.expert >= 0).sum(dtype=jnp.int32).astype(jnp.float32)
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
