"""The search of `exact` in jnp, for programs without the custom call, such as those for TPUs.

`exact_in_jax` makes many plans side by side, each in one short pass (`exact_packing.py`), and takes the best. It has no
max-flow and no evaluation of single swaps, which are long chains of small steps. `lowest` searches for the lowest limit
on the load of a rank, and `fewest` for the fewest replicas.

The search tries `WIDTH` candidates at a time, so it has few steps. It starts with a grid of limits, which narrows. Then
it perturbs the best candidate under lower limits. The noise is a hash of fixed numbers, so equal tokens give equal
plans.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import Counts, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import alike
from jax_moe_lb.planners.exact_packing import Filled, SearchOrder, fill, plain
from jax_moe_lb.planners.exact_packing import localize as localized

WIDTH = 64
"""The chains that are made side by side."""

LIKING, WELCOME, START = np.float32(0.15), np.float32(0.5), np.float32(0.1)
"""How far the noise goes: in `Way.liking`, in `Way.welcome`, and in `Way.start` as a fraction of the limit."""

URGENT, CLEARED = np.float32(4), np.float32(0.25)
"""`Way.urgent` without noise, and how far the noise goes in `Way.cleared` as a fraction of the ranks."""


def usual_way(tokens: Int[Array, "M L"]) -> SearchOrder:
    """Returns the way without noise: the hottest expert to the rank with most room.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank.
    """
    none = vary_like(jnp.zeros(tokens.shape[0], jnp.int32), tokens)
    ones = 1 + none.astype(jnp.float32)
    return SearchOrder(
        1 + 0 * tokens.reshape(-1).astype(jnp.float32), ones, ones[0] - 1, none, URGENT * ones[0], none[0]
    )


def way_near(way: SearchOrder, limit: Int[Array, ""], seed: Int[Array, ""], number: Int[Array, ""]) -> SearchOrder:
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
    urgent, cleared = reach * _noise(2, 4 * seed + 3, WIDTH + number)
    return SearchOrder(
        liking=way.liking * (1 + LIKING * reach * _noise(way.liking.size, 4 * seed + 1, number)),
        welcome=way.welcome * (1 + WELCOME * reach * _noise(way.welcome.size, 4 * seed + 2, number)),
        pressing=jnp.maximum(_noise(1, 4 * seed + 3, number)[0], 0),
        start=jnp.maximum(way.start + later.astype(jnp.int32), 0),
        urgent=way.urgent * jnp.exp2(2 * urgent),
        cleared=jnp.maximum(way.cleared + (CLEARED * way.start.size * cleared).astype(jnp.int32), 0),
    )


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

Attempt = Callable[[Array, SearchOrder], Filled]
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
    way: SearchOrder
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


def _attempt(tokens: Array, slots: int, max_fan_out: int, limits: Array, ways: SearchOrder) -> Filled:
    return jax.vmap(lambda limit, way: fill(tokens, limit, way, slots, max_fan_out))(limits, ways)


def _grid(low: Array, high: Array) -> Int[Array, "..."]:
    """Returns `WIDTH` limits, from `low` to below `high`."""
    width, k = high - low, iota(WIDTH)
    # Quotient and rest apart: the product with the whole width could overflow.
    return low + width // WIDTH * k + width % WIDTH * k // WIDTH


def _same(way: SearchOrder) -> SearchOrder:
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


def _next(s: Search, ways: SearchOrder, plans: Filled, costs: Array, cost: Array) -> Search:
    best, plan = _best(s.plan, plans, costs, cost)
    way = jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[best], old), ways, s.way)
    return Search(s.low, plan, way, s.turn + 1)


def _best(plan: Filled, plans: Filled, costs: Array, cost: Array) -> tuple[Array, Filled]:
    """Returns which of the plans costs least, and its plan, or the one before if that costs no more."""
    best = jax.lax.argmin(costs, 0, jnp.int32)
    return best, jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[best], old), plans, plan)


def exact_in_jax(
    counts: Counts, num_slots: int, domain: int, eps: float, max_fan_out: int, localize: bool
) -> tuple[Placement, Quota]:
    """Makes a plan for these counts from nothing, all domains side by side.

    It keeps the rules of `exact`, but its plans are others than those of the C++: on recorded loads with a maximum that
    is as low or lower on average, and with more replicas within `eps` of it where ranks are many. Single replicas that
    are not needed may be left, as none is removed from a plan. In a domain of more than 1024 slots for replicas they do
    not change places.

    Args:
        counts: `[R, E]` integers, the token copies that each rank routes to each expert, at least 0; their sum must
            stay below `2**31`. What breaks that gives a plan that breaks rules too.
        num_slots: `S`, the slots of a rank, home experts included.
        domain: how many ranks a domain has.
        eps: the fraction by which the maximum load may exceed the lowest one found where that saves replicas.
        max_fan_out: how many replicas may be made of the experts of one home rank.
        localize: whether replicas change places so that more tokens are served on the rank where they start.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32.

    Examples:
        >>> import numpy as np
        >>> placement, quota = exact_in_jax(np.diag([12, 15, 7, 6]), 2, 4, eps=0.0, max_fan_out=4, localize=False)
        >>> print(quota.sum(0))
        [10 10 10 10]
    """
    (counts,) = alike(counts)
    num_ranks, num_experts = counts.shape
    num_domains, num_home, num_local = num_ranks // domain, num_experts // num_ranks, num_experts // num_ranks * domain
    tokens = counts.sum(0, dtype=jnp.int32).reshape(num_domains, domain, num_home)
    # Tokens that start in other domains are served here too, but on no rank where they start.
    inside = counts.reshape(num_domains, domain, num_domains, num_local)
    inside = inside[iota(num_domains), :, iota(num_domains)]
    # A rank has no use for more slots than the domain has experts.
    slots = min(num_slots, num_local) - num_home
    fan_out = min(max_fan_out, domain * slots)

    def plan(tokens: Int[Array, "M L"], inside: Int[Array, "M P"]) -> Filled:
        # Where no replica may be made homes serve everything.
        if fan_out == 0:
            return plain(tokens, slots)
        found = lowest(tokens, slots, fan_out)
        limit = _within(found.high, tokens.sum(dtype=jnp.int32), eps)
        fewer = fewest(tokens, found, limit, fan_out, inside if localize else None)
        return localized(fewer, inside, limit) if localize else fewer

    plans = jax.vmap(plan)(tokens, inside)
    return _placement(plans, num_slots), _quota(plans)


def _within(high: Array, total: Array, eps: float) -> Int[Array, ""]:
    """Returns the limit that `eps` allows; no more can be useful than all tokens on one rank, which fits int32."""
    extra = jnp.floor(high.astype(jnp.float32) * np.float32(min(eps, 2.0**31)))
    # It is compared before it is converted, since it may exceed int32.
    beyond = extra >= (total - high).astype(jnp.float32)
    return high + jnp.where(beyond, total - high, jnp.where(beyond, 0, extra).astype(jnp.int32))


def _placement(plans: Filled, num_slots: int) -> Int[Array, "R S"]:
    """Returns each rank's home experts, then its replicas, then -1."""
    num_domains, domain, slots = plans.expert.shape
    num_experts = plans.left.size
    num_home = num_experts // num_domains // domain
    first = (iota(num_domains) * (domain * num_home))[:, None, None]
    replicas = jnp.where(plans.expert >= 0, plans.expert + first, -1).reshape(num_domains * domain, slots)
    # Stable, and so replicas keep their order while empty slots go behind them.
    order = jnp.argsort(replicas < 0, axis=1, stable=True)
    replicas = jnp.take_along_axis(replicas, order, axis=1)
    homes = iota(num_experts).reshape(num_domains * domain, num_home)
    return jnp.pad(
        jnp.concatenate([homes, replicas], 1), ((0, 0), (0, num_slots - num_home - slots)), constant_values=-1
    )


def _quota(plans: Filled) -> Int[Array, "E R"]:
    num_domains, domain, slots = plans.expert.shape
    num_local = plans.left.shape[1]
    b, home = iota(num_domains)[:, None], iota(num_local) // (num_local // domain)
    rank = jnp.broadcast_to(jnp.repeat(iota(domain), slots)[None], (num_domains, domain * slots))
    # An empty slot's -1 becomes an expert past the end, which the scatter drops.
    expert = jnp.where(plans.expert < 0, num_local, plans.expert).reshape(num_domains, -1)
    served = jnp.where(home[:, None] == iota(domain)[None], plans.left[:, :, None], 0)
    served = served.at[b, expert, rank].add(plans.tokens.reshape(num_domains, -1), mode="drop")
    # Only ranks of its domain serve an expert.
    blocks = (iota(num_domains)[:, None] == iota(num_domains)[None])[:, None, :, None]
    return jnp.where(blocks, served[:, :, None], 0).reshape(num_domains * num_local, num_domains * domain)
