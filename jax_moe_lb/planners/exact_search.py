"""Search of `exact` in jnp, for programs without the custom call, such as those for TPU.

`exact_in_jax` makes many plans side by side, each in one short pass (`exact_packing.py`), and selects the best. It
omits max-flow and the evaluation of single swaps, which are long sequences of small steps. `lowest` searches for the
lowest limit on the load of a rank, and `fewest` for the fewest replicas.

The search tries `WIDTH` candidates at a time, so it has few steps. It starts with a grid of limits and narrows it. Then
it perturbs the best candidate under lower limits. The noise is a hash of fixed numbers, so equal tokens give equal
plans.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.types import Counts, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import ceil_divide, quotient
from jax_moe_lb.planners.exact_on_tpu import fill_in_kernel, why_no_kernel
from jax_moe_lb.planners.exact_packing import Candidates, Filled, SearchOrder, fill, plain
from jax_moe_lb.planners.exact_packing import localize as localized
from jax_moe_lb.planners.exact_starts import fan_out, starts

BITS = 7
WIDTH = 1 << BITS
"""Number of candidates evaluated side by side: the lanes of a vector of a TPU."""

LIKING, WELCOME, START = np.float32(0.15), np.float32(0.5), np.float32(0.1)
"""Noise amplitudes of `SearchOrder.liking`, `welcome` and `start`; of `start` as a fraction of the limit."""

URGENT, CLEARED = np.float32(4), np.float32(0.25)
"""`SearchOrder.urgent` without noise, and noise amplitude of `cleared` as a fraction of the ranks."""


def usual_order(tokens: Int[Array, "L M"], is_limited: bool) -> SearchOrder:
    """Return the search order without noise: the hottest expert to the rank with most room."""
    none = vary_like(jnp.zeros(tokens.shape[1], jnp.int32), tokens)
    ones = 1 + none.astype(jnp.float32)
    limited = (URGENT * ones[:1], none[:1]) if is_limited else (None, None)
    return SearchOrder(1 + 0 * tokens.astype(jnp.float32), ones, ones[:1] - 1, none, *limited)


def order_near(order: SearchOrder, limit: Int[Array, ""], seed: Int[Array, ""], number: Int[Array, ""]) -> SearchOrder:
    """Return one of `WIDTH` perturbed search orders; number 0 changes `pressing` only."""
    # Use amplitudes from 1/8 to 1, because the best one depends on the load.
    reach = jnp.where(number == 0, 0, 1 / (1 << (number // 16 % 4)).astype(jnp.float32))
    # Giving early rarely helps, so half of the search orders keep `start` unchanged.
    ahead = limit.astype(jnp.float32) * START * (number % 2).astype(jnp.float32)
    later = ahead * _noise(order.start.size, 4 * seed, number)
    noise = _noise(order.liking.size, 4 * seed + 1, number).reshape(order.liking.shape[::-1]).T
    near = SearchOrder(
        liking=order.liking * (1 + LIKING * reach * noise),
        welcome=order.welcome * (1 + WELCOME * reach * _noise(order.welcome.size, 4 * seed + 2, number)),
        pressing=jnp.maximum(_noise(1, 4 * seed + 3, number), 0),
        start=jnp.maximum(order.start + later.astype(jnp.int32), 0),
        urgent=order.urgent,
        cleared=order.cleared,
    )
    if order.urgent is None or order.cleared is None:
        return near
    urgent, cleared = reach * _noise(2, 4 * seed + 3, WIDTH + number)
    ahead = (CLEARED * order.start.size * cleared).astype(jnp.int32)
    return replace(near, urgent=order.urgent * jnp.exp2(2 * urgent), cleared=jnp.maximum(order.cleared + ahead, 0))


def _noise(size: int, seed: Int[Array, ""], number: Int[Array, ""]) -> Float[Array, "..."]:
    """Return `size` pseudorandom numbers in [-1, 1): a hash of the indices, the seed and the number."""
    # It does not use `jax.random`, whose values depend on JAX's configuration.
    bits = (number * size + iota(size)).astype(jnp.uint32) * np.uint32(0x9E3779B9)
    bits = bits + seed.astype(jnp.uint32) * np.uint32(0x85EBCA6B)
    for factor in (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(16))) * factor
    # Use 24 bits, exact in float32.
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1


STEPS = 256
"""Approximate number of sequential replicas of the search for a lower maximum, over all generations.

The value was tuned on recorded loads.
"""

BRIEFLY = 4
"""Number of these generations in a brief search."""

FEWER = 2
"""Number of generations of the search for fewer replicas."""

CLOSE_ENOUGH = 4096
"""Inverse relative tolerance: a maximum within `mean / CLOSE_ENOUGH` of the mean ends the search, as in C++."""

NO_PLAN = np.int32(np.iinfo(np.int32).max)
"""Maximum load assigned to rejected plans."""

Attempt = Callable[[Array, SearchOrder, Array | int], Filled]
"""Function making plans side by side, one per limit and search order, with at most some replicas.

Candidates are the last dimension of search orders and plans.
"""


@pytree
class Search:
    """Carry of the search in one domain."""

    low: Int[Array, ""]  # lowest limit worth trying
    plan: Filled  # plan of the lowest maximum so far
    order: SearchOrder  # search order of this plan
    turn: Int[Array, ""]  # index of the generation

    @property
    def high(self) -> Int[Array, ""]:
        """Lowest maximum load so far."""
        return self.plan.load.max()


def lowest(tokens: Int[Array, "L M"], slots: int, max_fan_out: int, margin: float | None = None) -> Search:
    """Search for the lowest maximum load of a domain; briefly if a relative margin above the mean is enough."""
    num_ranks, total = tokens.shape[1], tokens.sum(dtype=jnp.int32)
    mean = ceil_divide(total, num_ranks)
    enough = quotient(mean, CLOSE_ENOUGH)
    if margin is not None:
        enough = jnp.maximum(enough, _within(mean, total, margin) - mean)
    attempt = partial(_attempt, tokens, slots, max_fan_out)
    order = usual_order(tokens, max_fan_out < slots * num_ranks)
    start = Search(mean, plain(tokens, slots), order, 0 * mean)
    # Each round reduces the int32 range to one of `WIDTH` parts.
    rounds = -(-31 // BITS)
    s = jax.lax.while_loop(
        lambda s: (s.high - s.low > enough) & (s.turn < rounds), lambda s: _narrow(s, attempt), start
    )
    generations = max(4, STEPS // (num_ranks * slots)) if margin is None else BRIEFLY
    # The timeline of a compiled program finds these loops by their scope.
    with jax.named_scope("missed_mean"):
        if margin is None:
            # A loop of one step at most: under `vmap`, a condition would run both branches for all domains.
            s = replace(s, low=mean, turn=0 * mean)
            s = jax.lax.while_loop(
                lambda s: (s.high > mean) & (s.turn < 1), lambda s: _start_from_others(s, tokens, slots, max_fan_out), s
            )
        s = replace(s, low=mean, turn=0 * mean)
        return jax.lax.while_loop(
            lambda s: (s.high - mean > enough) & (s.turn < generations), lambda s: _lower(s, attempt), s
        )


def fewest(
    tokens: Int[Array, "L M"],
    found: Search,
    limit: Int[Array, ""],
    max_fan_out: int,
    counts: Int[Array, "M P"] | None = None,
) -> Filled:
    """Search for a plan with fewer replicas within a limit."""
    attempt = partial(_attempt, tokens, len(found.plan.expert), max_fan_out)
    start = Search(limit, found.plan, found.order, 0 * limit)
    s = jax.lax.while_loop(
        lambda s: (s.turn < FEWER) & (_number(s.plan) > 0), lambda s: _fewer(s, attempt, counts), start
    )
    # The same number of replicas may suffice under a lower limit: try limits upward from the lowest known maximum.
    limits = _grid(found.high, limit)
    plans = attempt(limits, _same(s.order), _number(s.plan))
    # With a binding fan-out, `fill` clears ranks first, without the bound on replicas.
    costs = jnp.where(_keeps(plans, limits) & (_number(plans) <= _number(s.plan)), plans.load.max(0), NO_PLAN)
    # Of equal maxima, the plan whose busiest rank sends the fewest replicas.
    least = jnp.minimum(costs.min(), s.high)
    sent = jnp.where(costs == least, jax.vmap(fan_out, -1)(plans), NO_PLAN)
    return _best(s.plan, plans, sent, jnp.where(s.high == least, fan_out(s.plan), NO_PLAN))[1]


def _attempt(
    tokens: Array, slots: int, max_fan_out: int, limits: Array, orders: SearchOrder, most: Array | int
) -> Filled:
    load = tokens.sum(0, dtype=jnp.int32)
    place = None if orders.cleared is None else jnp.argsort(jnp.argsort(load)).astype(jnp.int32)[:, None]
    most = jnp.broadcast_to(jnp.asarray(most, jnp.int32), (1, WIDTH))
    given = Candidates(tokens[..., None], place, limits[None], orders, most)
    forms = {"default": partial(fill, slots=slots, max_fan_out=max_fan_out)}
    if why_no_kernel(len(tokens), load.size, slots, WIDTH) is None:
        forms["tpu"] = partial(fill_in_kernel, slots=slots, max_fan_out=max_fan_out)
    return jax.lax.platform_dependent(given, **forms)


def _grid(low: Array, high: Array) -> Int[Array, "..."]:
    """Return `WIDTH` limits from `low` (inclusive) to `high` (exclusive)."""
    width, k = high - low, iota(WIDTH)
    # Multiply quotient and remainder separately: the product with the whole width could overflow.
    return low + (width >> BITS) * k + ((width & (WIDTH - 1)) * k >> BITS)


def _same(order: SearchOrder) -> SearchOrder:
    return jax.tree.map(lambda leaf: leaf[..., None], order)


def _keeps(plans: Filled, limits: Array) -> Array:
    return plans.load.max(0) <= limits


def _number(plans: Filled) -> Array:
    return (plans.expert >= 0).sum((0, 1), dtype=jnp.int32)


def _narrow(s: Search, attempt: Attempt) -> Search:
    """Try a grid of limits between `low` and the best maximum, in the usual search order."""
    limits = _grid(s.low, s.high)
    plans = attempt(limits, _same(s.order), s.plan.expert.size)
    _, plan = _best(s.plan, plans, plans.load.max(0), s.high)
    high = plan.load.max()
    # Treat limits below the lowest success as infeasible, although success is not monotonic in the limit.
    low = jnp.where(limits < high, limits + 1, s.low).max()
    # A maximum at the lowest limit ends the search.
    return Search(jnp.where(high <= s.low, high, low), plan, s.order, s.turn + 1)


def _start_from_others(s: Search, tokens: Array, slots: int, max_fan_out: int) -> Search:
    """Take the plan of another rule if its maximum is lower."""
    # Otherwise XLA would move operations on the tokens before the loop, where they always run.
    tokens, _ = jax.lax.optimization_barrier((tokens, s.turn))
    plan = s.plan
    for start in starts(tokens, slots):
        is_better = (fan_out(start) <= max_fan_out) & (start.load.max() < plan.load.max())
        plan = jax.tree.map(lambda new, old, is_better=is_better: jnp.where(is_better, new, old), start, plan)
    return replace(s, plan=plan, turn=s.turn + 1)


def _lower(s: Search, attempt: Attempt) -> Search:
    """Try perturbed search orders, each under a lower limit than the best maximum."""
    # Lower the limit by one token copy up to half of the excess over the mean: plans rarely end below their limit.
    drop = jnp.maximum((s.high - s.low) >> (1 + iota(WIDTH) // 2 % 8), 1)
    orders = jax.vmap(partial(order_near, s.order, s.high, s.turn), out_axes=-1)(iota(WIDTH))
    plans = attempt(s.high - drop, orders, s.plan.expert.size)
    return _next(s, orders, plans, plans.load.max(0), s.high)


def _fewer(s: Search, attempt: Attempt, counts: Array | None) -> Search:
    """Try perturbed search orders under the limit `low`."""
    orders = jax.vmap(partial(order_near, s.order, s.low, s.turn), out_axes=-1)(iota(WIDTH))
    # Further replicas than those of the best plan are in vain.
    plans = attempt(jnp.broadcast_to(s.low, (WIDTH,)), orders, _number(s.plan))
    costs = jax.vmap(partial(_replicas, counts=counts), -1)(plans)
    costs = jnp.where(_keeps(plans, s.low), costs, jnp.inf)
    return _next(s, orders, plans, costs, _replicas(s.plan, counts))


def _replicas(plan: Filled, counts: Array | None) -> Float[Array, ""]:
    """Return the number of replicas, plus the fraction of tokens not served by a local replica as a tie-breaker."""
    number = _number(plan).astype(jnp.float32)
    if counts is None:
        return number
    # By comparison, as a gather is several operations on TPU.
    is_of = plan.expert[None] == iota(counts.shape[1])[:, None, None]
    starts = jnp.where(is_of, counts.T[:, None], 0).sum(0, dtype=jnp.int32)
    stays = jnp.minimum(starts, plan.tokens).sum(dtype=jnp.int32)
    return number + 1 - stays.astype(jnp.float32) / (plan.load.sum(dtype=jnp.int32) + 1).astype(jnp.float32)


def _next(s: Search, orders: SearchOrder, plans: Filled, costs: Array, cost: Array) -> Search:
    best, plan = _best(s.plan, plans, costs, cost)
    order = jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[..., best], old), orders, s.order)
    return Search(s.low, plan, order, s.turn + 1)


def _best(plan: Filled, plans: Filled, costs: Array, cost: Array) -> tuple[Array, Filled]:
    """Return the index of the cheapest plan, and this plan or the previous one if that costs no more."""
    best = jax.lax.argmin(costs, 0, jnp.int32)
    return best, jax.tree.map(lambda new, old: jnp.where(costs[best] < cost, new[..., best], old), plans, plan)


def exact_in_jax(
    counts: Counts, num_slots: int, domain: int, eps: float, max_fan_out: int, localize: bool, brief: bool = False
) -> tuple[Placement, Quota]:
    """Plan placement and quota from the counts alone, all domains side by side."""
    # It follows the rules of `exact`, but its plans differ from those in C++. On recorded loads, the mean maximum load
    # is equal or lower. With many ranks, it needs more replicas within `eps` of the maximum. Single unnecessary
    # replicas may remain, because no replica is removed from a plan. Domains with more than 1024 replica slots are not
    # localized.
    (counts,) = alike(counts)
    num_ranks, num_experts = counts.shape
    num_domains, num_home, num_local = num_ranks // domain, num_experts // num_ranks, num_experts // num_ranks * domain
    tokens = counts.sum(0, dtype=jnp.int32).reshape(num_domains, domain, num_home).swapaxes(1, 2)
    # Tokens from other domains are served here, too, but never on their source rank.
    inside = counts.reshape(num_domains, domain, num_domains, num_local)
    inside = inside[iota(num_domains), :, iota(num_domains)]
    # More slots than experts in the domain are useless.
    slots = min(num_slots, num_local) - num_home
    fan_out = min(max_fan_out, domain * slots)

    def plan(tokens: Int[Array, "L M"], inside: Int[Array, "M P"]) -> Filled:
        # Without replicas, homes serve all tokens.
        if fan_out == 0:
            return plain(tokens, slots)
        found = lowest(tokens, slots, fan_out, eps if brief else None)
        limit = _within(found.high, tokens.sum(dtype=jnp.int32), eps)
        fewer = fewest(tokens, found, limit, fan_out, inside if localize else None)
        # Within the lowest maximum of these replicas: `eps` is spent on fewer replicas alone.
        return localized(fewer, inside, fewer.load.max()) if localize else fewer

    if num_domains == 1:
        # Without `vmap`, conditions of loops are scalars, which take no vector operations.
        plans = jax.tree.map(lambda leaf: leaf[None], plan(tokens[0], inside[0]))
    else:
        plans = jax.vmap(plan)(tokens, inside)
    return _placement(plans, num_slots), _quota(plans)


def _within(high: Array, total: Array, eps: float) -> Int[Array, ""]:
    """Return the limit allowed by `eps`, at most the total number of tokens, which fits int32."""
    extra = jnp.floor(high.astype(jnp.float32) * np.float32(min(eps, 2.0**31)))
    # Compare before the conversion, because `extra` may exceed int32.
    beyond = extra >= (total - high).astype(jnp.float32)
    return high + jnp.where(beyond, total - high, jnp.where(beyond, 0, extra).astype(jnp.int32))


def _placement(plans: Filled, num_slots: int) -> Int[Array, "R S"]:
    """Return each rank's home experts, then its replicas, then -1."""
    num_domains, slots, domain = plans.expert.shape
    num_experts = plans.left.size
    num_home = num_experts // num_domains // domain
    first = (iota(num_domains) * (domain * num_home))[:, None, None]
    replicas = jnp.where(plans.expert >= 0, plans.expert + first, -1).swapaxes(1, 2)
    replicas = replicas.reshape(num_domains * domain, slots)
    # The stable sort keeps the order of replicas and moves empty slots behind them.
    order = jnp.argsort(replicas < 0, axis=1, stable=True)
    replicas = jnp.take_along_axis(replicas, order, axis=1)
    homes = iota(num_experts).reshape(num_domains * domain, num_home)
    return jnp.pad(
        jnp.concatenate([homes, replicas], 1), ((0, 0), (0, num_slots - num_home - slots)), constant_values=-1
    )


def _quota(plans: Filled) -> Int[Array, "E R"]:
    num_domains, slots, domain = plans.expert.shape
    num_local = plans.left[0].size
    b, home = iota(num_domains)[:, None], iota(num_local) // (num_local // domain)
    rank = jnp.broadcast_to(jnp.tile(iota(domain), slots)[None], (num_domains, slots * domain))
    left = plans.left.swapaxes(1, 2).reshape(num_domains, num_local)
    # An empty slot (-1) gets an index past the end, dropped by the scatter.
    expert = jnp.where(plans.expert < 0, num_local, plans.expert).reshape(num_domains, -1)
    served = jnp.where(home[:, None] == iota(domain)[None], left[:, :, None], 0)
    served = served.at[b, expert, rank].add(plans.tokens.reshape(num_domains, -1), mode="drop")
    # Only ranks of its domain serve an expert.
    blocks = (iota(num_domains)[:, None] == iota(num_domains)[None])[:, None, :, None]
    return jnp.where(blocks, served[:, :, None], 0).reshape(num_domains * num_local, num_domains * domain)
