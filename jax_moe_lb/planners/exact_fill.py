"""`fill` places the replicas of one domain under a limit on the load of a rank, in jnp: the chain of `exact`.

It is short, so that many are made side by side: under many limits, and in many ways. `planners/exact_search.py` picks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.planners.exact_chain import Chain, Filled, Way, plain
from jax_moe_lb.types import iota

NO_ROOM = np.int32(np.iinfo(np.int32).max)
"""Stands for the room of a rank that an expert does not fit into, where the least room is chosen."""


def fill(tokens: Int[Array, "M L"], limit: Int[Array, ""], way: Way, slots: int, max_fan_out: int) -> Filled:
    """Makes replicas until no rank is above the limit or no slot can help; `ffi/planning/chain.h` has the idea.

    The rank with most room and a free slot receives, from the ranks above the limit, as much as it can of their hottest
    expert: even beyond what its home has above the limit, which then has room itself and receives. So each replica
    closes its receiver for good or takes an expert whole, and there are as many steps as slots at most.

    A rank far above the limit whose experts may have few replicas needs receivers with much room, more than any rank
    may have. So where the fan-out is bounded, some ranks of little load are cleared before.

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
    start = Chain(now, goal, none, none, now.load[0] >= 0)
    if max_fan_out < now.expert.size:
        start = _clear(start, limit, way.cleared, max_fan_out)
    return jax.lax.while_loop(lambda c: c.more, lambda c: _give(c, limit, way, max_fan_out), start).now


def _clear(c: Chain, limit: Array, number: Array, max_fan_out: int) -> Chain:
    """Makes room on so many ranks of least load."""
    load = c.now.load
    pending = (jnp.argsort(jnp.argsort(load)) < number) & (load <= limit)
    c = Chain(c.now, jnp.where(pending, limit, c.goal), c.used, c.sent, c.more)
    c, _ = jax.lax.while_loop(lambda s: s[1].any(), lambda s: _clear_one(*s, limit, max_fan_out), (c, pending))
    return Chain(c.now, c.goal, c.used, c.sent, load[0] >= 0)


def _clear_one(c: Chain, pending: Array, limit: Array, max_fan_out: int) -> tuple[Chain, Bool[Array, "M"]]:
    """Moves one expert, whole, from a pending rank to where it leaves least room; or leaves its rank as it is."""
    now, num_home = c.now, c.now.left.size // pending.size
    expert = _argmax(jnp.where(jnp.repeat(pending, num_home, total_repeat_length=now.left.size), now.left, -1))
    tokens = jnp.where(iota(now.left.size) == expert, now.left, 0).max()
    room = jnp.where(pending | (now.load > c.goal) | (c.used == now.expert.shape[1]), 0, limit - now.load)
    fits = (room >= tokens) & (room > 0)
    to = iota(pending.size) == jax.lax.argmin(jnp.where(fits, room, NO_ROOM), 0, jnp.int32)
    c = c.give(expert, to, jnp.where(fits.any(), tokens, 0), limit)
    # Each step moves an expert or ends a rank, and so there are at most as many as experts and ranks.
    ended = (iota(pending.size) == expert // num_home) & ~c.more
    return c, pending & ~ended & (c.sent < max_fan_out)


def _give(c: Chain, limit: Array, way: Way, max_fan_out: int) -> Chain:
    """Makes one replica, or changes nothing where none can be made."""
    now, num_home = c.now, c.now.left.size // c.goal.size
    high = now.load > c.goal
    gives = high & (c.sent < max_fan_out)
    room = jnp.where(high | (c.used == now.expert.shape[1]), 0, limit - now.load)
    to = iota(c.goal.size) == _argmax(room.astype(jnp.float32) * way.welcome)
    # One choice for giver and expert: the hottest of all experts at home on ranks that give.
    pressing = way.pressing
    if max_fan_out < now.expert.size:
        pressing = pressing + way.urgent / jnp.maximum(max_fan_out - c.sent, 1).astype(jnp.float32)
    expert = _hottest(now, jnp.where(gives, (now.load - limit).astype(jnp.float32) * pressing, -jnp.inf), way)
    tokens = jnp.minimum(jnp.where(iota(now.left.size) == expert, now.left, 0).max(), jnp.where(to, room, 0).max())
    made = ((iota(c.goal.size) == expert // num_home) & gives).any()
    return c.give(expert, to, jnp.where(made, tokens, 0), limit)


def _hottest(now: Filled, surplus: Array, way: Way) -> Int[Array, ""]:
    surplus = jnp.repeat(surplus, now.left.size // surplus.size, total_repeat_length=now.left.size)
    return _argmax(now.left.astype(jnp.float32) * way.liking + surplus)


def _argmax(values: Array) -> Int[Array, ""]:
    """Returns the lowest index of the maximum."""
    return jax.lax.argmax(values, 0, jnp.int32)
