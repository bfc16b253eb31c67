"""`exact_in_jax` plans like `exact` in jnp, by another search; it runs where no custom call does, as on a TPU.

It has no max-flow and no judge of single swaps, which are long chains of small steps. It makes many plans side by side
instead, each in one short pass, and takes the best: `planners/exact_chain.py`, `planners/exact_search.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.planners.exact_chain import Filled, plain
from jax_moe_lb.planners.exact_localize import localize as localized
from jax_moe_lb.planners.exact_search import fewest, lowest
from jax_moe_lb.planners.native import alike
from jax_moe_lb.types import Counts, Placement, Quota, iota


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
