"""`fill` places the replicas of one domain under a limit on the load of a rank, in jnp: the chain of `exact`.

It is short, so that many are made side by side: under many limits, and in many ways. `planners/exact_search.py` picks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import iota


@pytree
class Way:
    """Says which rank gives what to whom in `fill`, for a domain of `M` ranks with `P = M L` experts at home.

    Args:
        liking: `[P]` float32, above 0, what an expert's tokens are multiplied by where the hottest expert is chosen.
        welcome: `[M]` float32, above 0, the same for a rank's room where the one with most room is chosen.
        pressing: float32, at least 0, how much a rank's load above the limit counts beside the tokens of its experts.
        start: `[M]` int32, at least 0, how far below the limit a rank first comes before it receives anything.
    """

    liking: Float[Array, "P"]
    welcome: Float[Array, "M"]
    pressing: Float[Array, ""]
    start: Int[Array, "M"]


@pytree
class Filled:
    """Holds the replicas of one domain, with `Z` slots for them on each rank.

    Args:
        expert: `[M, Z]` int32, the expert of each replica, numbered inside the domain; -1 for none.
        tokens: `[M, Z]` int32, the token copies that each replica serves; 0 for none.
        left: `[P]` int32, the token copies that the home of each expert serves.
        load: `[M]` int32, the token copies that each rank serves.
    """

    expert: Int[Array, "M Z"]
    tokens: Int[Array, "M Z"]
    left: Int[Array, "P"]
    load: Int[Array, "M"]


def plain(tokens: Int[Array, "M L"], slots: int) -> Filled:
    """Returns the plan without replicas.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank.
        slots: `Z`, the slots for replicas on each rank.
    """
    load = tokens.sum(1, dtype=jnp.int32)
    # Zeros that vary over the mesh axes of the tokens.
    none = jnp.broadcast_to(0 * load[:, None], (load.size, slots))
    return Filled(none - 1, none, tokens.reshape(-1), load)


@pytree
class _Chain:
    """Carries the loop.

    Args:
        now: the plan so far.
        goal: the load that a rank must come down to before it may receive, and down to which it gives.
        used: the slots of each rank that hold replicas.
        sent: the replicas that were made of the experts of each rank.
        more: whether the last step made a replica.
    """

    now: Filled
    goal: Int[Array, "M"]
    used: Int[Array, "M"]
    sent: Int[Array, "M"]
    more: Bool[Array, ""]


def fill(tokens: Int[Array, "M L"], limit: Int[Array, ""], way: Way, slots: int, max_fan_out: int) -> Filled:
    """Makes replicas until no rank is above the limit or no slot can help; `ffi/planning/chain.h` has the idea.

    The rank with most room and a free slot receives, from the ranks above the limit, as much as it can of their hottest
    expert: even beyond what its home has above the limit, which then has room itself and receives. So each replica
    closes its receiver for good or takes an expert whole, and there are as many steps as slots at most.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank.
        limit: the token copies that a rank may serve, at least the mean, rounded up.
        way: how to choose.
        slots: the slots for replicas on each rank.
        max_fan_out: how many replicas may be made of the experts of one rank, at least 1.

    Returns:
        The plan. Where a rank is still above the limit, this way does not keep it.
    """
    now = plain(tokens, slots)
    below = jnp.maximum(limit - way.start, 0)
    goal, none = jnp.where(now.load > below, below, limit), 0 * now.load
    start = _Chain(now, goal, none, none, now.load[0] >= 0)
    return jax.lax.while_loop(lambda c: c.more, lambda c: _give(c, limit, way, max_fan_out), start).now


def _give(c: _Chain, limit: Array, way: Way, max_fan_out: int) -> _Chain:
    """Makes one replica, or changes nothing where none can be made.

    It reads and writes with masks and not with indices: a TPU is slow at those, and takes a whole line at once anyway.
    """
    now, ranks, num_home = c.now, iota(c.goal.size), c.now.left.size // c.goal.size
    high = now.load > c.goal
    gives = high & (c.sent < max_fan_out)
    room = jnp.where(high | (c.used == now.expert.shape[1]), 0, limit - now.load)
    to = ranks == _argmax(room.astype(jnp.float32) * way.welcome)
    # One choice for giver and expert: the hottest of all experts at home on ranks that give.
    expert = _hottest(now, limit, gives, way)
    of, giver = iota(now.left.size) == expert, ranks == expert // num_home
    tokens = jnp.minimum(jnp.where(of, now.left, 0).max(), jnp.where(to, room, 0).max())
    made = (tokens > 0) & (giver & gives).any()
    tokens = jnp.where(made, tokens, 0)
    here = made & to[:, None] & (iota(now.expert.shape[1])[None] == c.used[:, None])
    load = now.load + jnp.where(to, tokens, 0) - jnp.where(giver, tokens, 0)
    return _Chain(
        now=Filled(
            expert=jnp.where(here, expert, now.expert),
            tokens=jnp.where(here, tokens, now.tokens),
            left=now.left - jnp.where(of, tokens, 0),
            load=load,
        ),
        goal=jnp.where(load <= c.goal, limit, c.goal),
        used=c.used + (to & made).astype(jnp.int32),
        sent=c.sent + (giver & made).astype(jnp.int32),
        more=made,
    )


def _hottest(now: Filled, limit: Array, gives: Array, way: Way) -> Int[Array, ""]:
    surplus = jnp.where(gives, (now.load - limit).astype(jnp.float32) * way.pressing, -jnp.inf)
    surplus = jnp.repeat(surplus, now.left.size // gives.size, total_repeat_length=now.left.size)
    return _argmax(now.left.astype(jnp.float32) * way.liking + surplus)


def _argmax(values: Array) -> Int[Array, ""]:
    """Returns the lowest index of the maximum."""
    return jax.lax.argmax(values, 0, jnp.int32)
