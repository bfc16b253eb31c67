"""One pass of `exact` in jnp: replicas of a domain under a given limit.

`fill` places the replicas of one domain under a limit on the load of a rank. It is short, so that the search
(`exact_search.py`) can run many of them side by side, with different limits and search orders. `localize` then swaps
replicas so that more tokens stay on their rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.types import host_iota, iota, pytree


@pytree
class SearchOrder:
    """Says which rank gives what to whom in `fill`, for a domain of `M` ranks with `P = M L` experts at home.

    Args:
        liking: `[P]` float32, above 0, what an expert's tokens are multiplied by where the hottest expert is chosen.
        welcome: `[M]` float32, above 0, the same for a rank's room where the one with most room is chosen.
        pressing: float32, at least 0, how much a rank's load above the limit counts beside the tokens of its experts.
        start: `[M]` int32, at least 0, how far below the limit a rank first comes before it receives anything.
        urgent: float32, at least 0, how much a rank's load above the limit counts, divided by the replicas that may
            still be made of its experts. It is read where that number is bounded.
        cleared: int32, at least 0, how many ranks, those of least load, give their experts away before any other gives.
            It is read where `urgent` is.
    """

    liking: Float[Array, "P"]
    welcome: Float[Array, "M"]
    pressing: Float[Array, ""]
    start: Int[Array, "M"]
    urgent: Float[Array, ""]
    cleared: Int[Array, ""]


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
class OffloadChain:
    """Carries the loop of `fill`.

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

    def give(
        self, expert: Int[Array, ""], to: Bool[Array, "M"], tokens: Int[Array, ""], limit: Array
    ) -> "OffloadChain":
        """Makes one replica, of so many token copies, or none of 0.

        It writes with masks and not with indices: a TPU is slow at those, and takes a whole line at once anyway.

        Args:
            expert: the expert.
            to: which rank gets the replica; it has a free slot.
            tokens: how many of the token copies that its home serves go there.
            limit: the goal of a rank that has reached its own.
        """
        now, made = self.now, tokens > 0
        of, giver = iota(now.left.size) == expert, iota(to.size) == expert // (now.left.size // to.size)
        here = made & to[:, None] & (iota(now.expert.shape[1])[None] == self.used[:, None])
        load = now.load + jnp.where(to, tokens, 0) - jnp.where(giver, tokens, 0)
        return OffloadChain(
            now=Filled(
                expert=jnp.where(here, expert, now.expert),
                tokens=jnp.where(here, tokens, now.tokens),
                left=now.left - jnp.where(of, tokens, 0),
                load=load,
            ),
            goal=jnp.where(load <= self.goal, limit, self.goal),
            used=self.used + (to & made).astype(jnp.int32),
            sent=self.sent + (giver & made).astype(jnp.int32),
            more=made,
        )


NO_ROOM = np.int32(np.iinfo(np.int32).max)
"""Stands for the room of a rank that an expert does not fit into, where the least room is chosen."""


def fill(tokens: Int[Array, "M L"], limit: Int[Array, ""], way: SearchOrder, slots: int, max_fan_out: int) -> Filled:
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
    start = OffloadChain(now, goal, none, none, now.load[0] >= 0)
    if max_fan_out < now.expert.size:
        start = _clear(start, limit, way.cleared, max_fan_out)
    return jax.lax.while_loop(lambda c: c.more, lambda c: _give(c, limit, way, max_fan_out), start).now


def _clear(c: OffloadChain, limit: Array, number: Array, max_fan_out: int) -> OffloadChain:
    """Makes room on so many ranks of least load."""
    load = c.now.load
    pending = (jnp.argsort(jnp.argsort(load)) < number) & (load <= limit)
    c = OffloadChain(c.now, jnp.where(pending, limit, c.goal), c.used, c.sent, c.more)
    c, _ = jax.lax.while_loop(lambda s: s[1].any(), lambda s: _clear_one(*s, limit, max_fan_out), (c, pending))
    return OffloadChain(c.now, c.goal, c.used, c.sent, load[0] >= 0)


def _clear_one(
    c: OffloadChain, pending: Array, limit: Array, max_fan_out: int
) -> tuple[OffloadChain, Bool[Array, "M"]]:
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


def _give(c: OffloadChain, limit: Array, way: SearchOrder, max_fan_out: int) -> OffloadChain:
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


def _hottest(now: Filled, surplus: Array, way: SearchOrder) -> Int[Array, ""]:
    surplus = jnp.repeat(surplus, now.left.size // surplus.size, total_repeat_length=now.left.size)
    return _argmax(now.left.astype(jnp.float32) * way.liking + surplus)


def _argmax(values: Array) -> Int[Array, ""]:
    """Returns the lowest index of the maximum."""
    return jax.lax.argmax(values, 0, jnp.int32)


MOST_SLOTS = 1024
"""The slots for replicas in a domain up to which pairs of them are looked at, all at once."""


@pytree
class _Places:
    """Carries the loop over exchanges, with the domain's `n = M Z` slots in one line.

    Args:
        expert: the expert of each slot, -1 for an empty one.
        tokens: the token copies that it serves.
        load: the token copies that each rank serves.
        turn: the number of the exchange.
        more: whether the last step exchanged two slots.
    """

    expert: Int[Array, "n"]
    tokens: Int[Array, "n"]
    load: Int[Array, "M"]
    turn: Int[Array, ""]
    more: Bool[Array, ""]


def localize(plan: Filled, counts: Int[Array, "M P"], limit: Int[Array, ""]) -> Filled:
    """Exchanges the contents of two slots, of which one may be empty, as long as more tokens then stay on their rank.

    Each step makes the exchange that gains most, as many as there are slots at most; `ffi/planning/localize.h` goes
    over all pairs once instead. Above `MOST_SLOTS` slots it changes nothing, as pairs would need much memory.

    Args:
        plan: the plan of one domain.
        counts: `[M, P]` int32, the token copies of each expert that start on each rank.
        limit: the token copies that a rank may serve; no rank of the plan has more.
    """
    if plan.expert.size > MOST_SLOTS:
        return plan
    num_home = plan.left.size // plan.load.size
    start = _Places(plan.expert.reshape(-1), plan.tokens.reshape(-1), plan.load, 0 * limit, limit >= 0)
    end = jax.lax.while_loop(
        lambda p: p.more & (p.turn < plan.expert.size), lambda p: _exchange(p, counts, limit, num_home), start
    )
    shape = plan.expert.shape
    return Filled(end.expert.reshape(shape), end.tokens.reshape(shape), plan.left, end.load)


def _exchange(p: _Places, counts: Array, limit: Array, num_home: int) -> _Places:
    """Makes the exchange of the largest gain, if any gains."""
    gain = jnp.where(_may(p, limit, num_home), _gain(p, counts), 0)
    pair = jax.lax.argmax(gain.reshape(-1), 0, jnp.int32)
    a, b = pair // p.expert.size, pair % p.expert.size
    more, slots = gain[a, b] > 0, p.expert.size // p.load.size
    slot, rank = iota(p.expert.size), iota(p.load.size)
    gets = jnp.where(more & (slot == a), b, jnp.where(more & (slot == b), a, slot))
    change = jnp.where(more, p.tokens[b] - p.tokens[a], 0)
    load = p.load + jnp.where(rank == a // slots, change, 0) - jnp.where(rank == b // slots, change, 0)
    return _Places(p.expert[gets], p.tokens[gets], load, p.turn + 1, more)


def _gain(p: _Places, counts: Array) -> Int[Array, "n n"]:
    """Computes how many more tokens stay on their rank if two slots exchange what they hold."""
    rank = host_iota(p.expert.size) // (p.expert.size // p.load.size)
    # What each slot's replica would serve of tokens that start on a rank, for every rank; 0 for an empty slot.
    stays = jnp.minimum(counts.T[jnp.maximum(p.expert, 0)], p.tokens[:, None])
    moved = stays[:, rank] - jnp.take_along_axis(stays, jnp.asarray(rank)[:, None], 1)
    return moved + moved.T


def _may(p: _Places, limit: Array, num_home: int) -> Bool[Array, "n n"]:
    """Says which pairs of slots may exchange: no rank holds an expert twice, or comes above the limit."""
    size, ranks = p.expert.size, p.load.size
    rank = host_iota(size) // (size // ranks)
    same = (p.expert[:, None] == p.expert[None]) & (p.expert >= 0)[:, None]
    # Whether the rank of a slot holds the expert of another, as a replica or because it is at home there.
    holds = same.reshape(size, ranks, -1).any(2)[:, rank] | ((p.expert // num_home)[:, None] == rank[None])
    fits = p.tokens[:, None] - p.tokens[None] <= (limit - p.load)[rank][None]
    return ~holds & ~holds.T & fits & fits.T
