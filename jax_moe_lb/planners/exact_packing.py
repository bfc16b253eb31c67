"""One pass of `exact` in jnp: replicas of a domain under a given limit.

`fill` places the replicas of one domain under a limit on the load of a rank. One pass is short, so the search
(`exact_search.py`) runs many of them side by side, with different limits and search orders. `localize` then swaps
replicas to keep more tokens on the rank.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.types import host_iota, iota, pytree


@pytree
class SearchOrder:
    """Weights of the choices in `fill`, for a domain of `M` ranks with `P = M L` home experts."""

    liking: Float[Array, "P"]  # above 0, factor of an expert's tokens in the choice of the hottest expert
    welcome: Float[Array, "M"]  # above 0, factor of a rank's room in the choice of the rank with most room
    # At least 0, weight of a rank's load above the limit relative to the tokens of its experts
    pressing: Float[Array, ""]
    start: Int[Array, "M"]  # at least 0, distance below the limit that a rank must reach before receiving tokens
    # At least 0, further weight of a rank's load above the limit, divided by the replicas its experts may
    # still get. It is used only with a limited fan-out.
    urgent: Float[Array, ""]
    # At least 0, number of least loaded ranks giving their experts away before all others. It is used only with a
    # limited fan-out.
    cleared: Int[Array, ""]


@pytree
class Filled:
    """Replicas of one domain, with `Z` replica slots on each rank."""

    expert: Int[Array, "M Z"]  # expert of each replica, numbered inside the domain; -1 for an empty slot
    tokens: Int[Array, "M Z"]  # token copies served by each replica; 0 for an empty slot
    left: Int[Array, "P"]  # token copies of each expert served at home
    load: Int[Array, "M"]  # token copies served by each rank


def plain(tokens: Int[Array, "M L"], slots: int) -> Filled:
    """Return the plan without replicas."""
    load = tokens.sum(1, dtype=jnp.int32)
    # Derive the zeros from `load`, so they vary over its mesh axes.
    none = jnp.broadcast_to(0 * load[:, None], (load.size, slots))
    return Filled(none - 1, none, tokens.reshape(-1), load)


@pytree
class OffloadChain:
    """Carry of the loop of `fill`."""

    now: Filled  # plan so far
    goal: Int[Array, "M"]  # load at or below which a rank may receive, and down to which it gives
    used: Int[Array, "M"]  # occupied replica slots of each rank
    sent: Int[Array, "M"]  # replicas made of the experts of each rank
    number: Int[Array, ""]  # replicas made
    more: Bool[Array, ""]  # true if the last step made a replica

    def give(
        self, expert: Int[Array, "A"], to: Bool[Array, "A M"], tokens: Int[Array, "A"], limit: Array
    ) -> "OffloadChain":
        """Make replicas on different ranks, with `tokens` token copies; no replica if `tokens` is 0."""
        # It writes with masks instead of indices, because scatters are slow on TPU.
        now, num_ranks = self.now, self.goal.size
        to &= (tokens > 0)[:, None]
        of = (expert // (now.left.size // num_ranks))[:, None] == iota(num_ranks)[None]
        here = to.any(0)[:, None] & (iota(now.expert.shape[1])[None] == self.used[:, None])
        taken = _sums(to, tokens)
        load = now.load + taken - _sums(of, tokens)
        return OffloadChain(
            now=Filled(
                expert=jnp.where(here, _sums(to, expert)[:, None], now.expert),
                tokens=jnp.where(here, taken[:, None], now.tokens),
                left=now.left - _sums(expert[:, None] == iota(now.left.size)[None], tokens),
                load=load,
            ),
            goal=jnp.where(load <= self.goal, limit, self.goal),
            used=self.used + to.any(0).astype(jnp.int32),
            sent=self.sent + _sums(of, (tokens > 0).astype(jnp.int32)),
            number=self.number + (tokens > 0).sum(dtype=jnp.int32),
            more=(tokens > 0).any(),
        )


def _sums(chosen: Bool[Array, "A n"], values: Int[Array, "A"]) -> Int[Array, "n"]:
    return jnp.where(chosen, values[:, None], 0).sum(0, dtype=jnp.int32)


NO_ROOM = np.int32(np.iinfo(np.int32).max)
"""Room of ranks without space for an expert, in the choice of the least sufficient room."""


def fill(
    tokens: Int[Array, "M L"],
    limit: Int[Array, ""],
    order: SearchOrder,
    slots: int,
    max_fan_out: int,
    most: Int[Array, ""] | int,
) -> Filled:
    """Make replicas until no rank exceeds the limit, no slot helps or there are `most` replicas."""
    # `ffi/planning/chain.h` explains the idea.
    # The rank with the most room and a free slot receives tokens of the hottest expert of the ranks above the limit, as
    # many as it can serve. It may take more than the home's surplus; then the home itself has room and can receive.
    # Each replica thus fills its receiver or takes an expert whole, so the number of steps is at most the number of
    # slots. With 32 and more ranks a step makes several replicas, as steps are sequential.
    # With a limited fan-out, a rank far above the limit needs receivers with much room, possibly more than any rank
    # has. Some of the least loaded ranks are therefore cleared first.
    # Returns the plan. If a rank still exceeds the limit, this search order failed.
    now = plain(tokens, slots)
    below = jnp.maximum(limit - order.start, 0)
    goal, none = jnp.where(now.load > below, below, limit), 0 * now.load
    start = OffloadChain(now, goal, none, none, none[0], now.load[0] >= 0)
    if max_fan_out < now.expert.size:
        start = _clear(start, limit, order.cleared, max_fan_out)
    return jax.lax.while_loop(
        lambda c: c.more & (c.number < most), lambda c: _give(c, limit, order, max_fan_out, most), start
    ).now


def _clear(c: OffloadChain, limit: Array, number: Array, max_fan_out: int) -> OffloadChain:
    """Clear the `number` least loaded ranks."""
    load = c.now.load
    pending = (jnp.argsort(jnp.argsort(load)).astype(jnp.int32) < number) & (load <= limit)
    c = replace(c, goal=jnp.where(pending, limit, c.goal))
    c, _ = jax.lax.while_loop(lambda s: s[1].any(), lambda s: _clear_one(*s, limit, max_fan_out), (c, pending))
    return replace(c, more=load[0] >= 0)


def _clear_one(
    c: OffloadChain, pending: Array, limit: Array, max_fan_out: int
) -> tuple[OffloadChain, Bool[Array, "M"]]:
    """Move one whole expert from a pending rank to the rank with the least sufficient room, or end its rank."""
    now, num_home = c.now, c.now.left.size // pending.size
    expert = _argmax(jnp.where(jnp.repeat(pending, num_home, total_repeat_length=now.left.size), now.left, -1))
    tokens = jnp.where(iota(now.left.size) == expert, now.left, 0).max()
    room = jnp.where(pending | (now.load > c.goal) | (c.used == now.expert.shape[1]), 0, limit - now.load)
    fits = (room >= tokens) & (room > 0)
    to = iota(pending.size) == jax.lax.argmin(jnp.where(fits, room, NO_ROOM), 0, jnp.int32)
    c = c.give(expert[None], to[None], jnp.where(fits.any(), tokens, 0)[None], limit)
    # Each step moves an expert or ends a rank, so the steps are at most the experts plus the ranks.
    ended = (iota(pending.size) == expert // num_home) & ~c.more
    return c, pending & ~ended & (c.sent < max_fan_out)


RANKS_PER_REPLICA = 16
"""Ranks of a domain per replica that one step makes."""

PARTS = 4
"""Maximum number of replicas of one expert in a step that makes several."""


def _give(
    c: OffloadChain, limit: Array, order: SearchOrder, max_fan_out: int, most: Int[Array, ""] | int
) -> OffloadChain:
    """Make replicas of the hottest experts, the hottest on the rank with most room; none if none is possible."""
    now, num_ranks = c.now, c.goal.size
    limited = max_fan_out < now.expert.size
    # Under a limited fan-out, several replicas a step raise the maximum.
    width = 1 if limited else max(1, num_ranks // RANKS_PER_REPLICA)
    high = now.load > c.goal
    room = jnp.where(high | (c.used == now.expert.shape[1]), 0, limit - now.load)
    _, receiver = _largest(room.astype(jnp.float32) * order.welcome, width)
    to = receiver[:, None] == iota(num_ranks)[None]
    # Choose giver and expert together: the hottest home experts of all giving ranks.
    pressing = order.pressing
    if limited:
        pressing = pressing + order.urgent / jnp.maximum(max_fan_out - c.sent, 1).astype(jnp.float32)
    parts = 1 if width == 1 else PARTS
    experts, heat = _hottest(now, now.load - limit, room.max(), order.liking, pressing, parts)
    heat = jnp.where((high & (c.sent < max_fan_out))[:, None], heat, -jnp.inf)
    heat, chosen = _largest(heat.reshape(-1), width)
    expert = _at((chosen // parts)[:, None] == iota(num_ranks)[None], experts)
    size, number = _at(to, room), iota(width)
    # The parts of an expert before this one.
    before = _at((expert[:, None] == expert[None]) & (number[None] < number[:, None]), size)
    tokens = jnp.clip(_at(expert[:, None] == iota(now.left.size)[None], now.left) - before, 0, size)
    return c.give(expert, to, jnp.where((heat > -jnp.inf) & (number < most - c.number), tokens, 0), limit)


def _hottest(
    now: Filled, surplus: Int[Array, "M"], size: Int[Array, ""], liking: Float[Array, "P"], pressing: Array, parts: int
) -> tuple[Int[Array, "M"], Float[Array, "M parts"]]:
    """Return the hottest home expert of each rank, and its heat after 0, 1, ... replicas of `size` tokens."""
    num_home = now.left.size // surplus.size
    liked = (now.left.astype(jnp.float32) * liking).reshape(-1, num_home)
    hottest = jax.lax.argmax(liked, 1, jnp.int32)
    above, highest = surplus.astype(jnp.float32), liked.max(1)
    heat = (highest + above * pressing)[:, None]
    if parts > 1:
        # One step makes the replicas of single steps, if receivers have equal room: the rank gives this expert while it
        # is the hottest one, and the rank above the limit. The products do not fit int32.
        next_hottest = jnp.where(iota(num_home)[None] == hottest[:, None], 0, liked).max(1)
        gone = host_iota(parts).astype(np.float32)[None] * size.astype(jnp.float32)
        spare = jnp.minimum(highest - next_hottest, above)[:, None]
        heat = jnp.where((gone == 0) | (gone < spare), heat - gone * (1 + pressing), -jnp.inf)
    return iota(surplus.size) * num_home + hottest, heat


def _at(chosen: Bool[Array, "A n"], values: Int[Array, "n"]) -> Int[Array, "A"]:
    return jnp.where(chosen, values[None], 0).sum(1, dtype=jnp.int32)


def _largest(values: Float[Array, "n"], number: int) -> tuple[Float[Array, "A"], Int[Array, "A"]]:
    """Return the largest values and their indices; of equal values, the lowest indices."""
    if number == 1:
        return values.max()[None], _argmax(values)[None]
    largest, index = jax.lax.top_k(values, number)
    return largest, index


def _argmax(values: Array) -> Int[Array, ""]:
    """Return the lowest index of the maximum."""
    return jax.lax.argmax(values, 0, jnp.int32)


MOST_SLOTS = 1024
"""Maximum number of replica slots per domain for `localize`, which evaluates all pairs of slots at once."""


@pytree
class _Places:
    """Carry of the loop over exchanges, with the `n = M Z` slots of the domain in one row."""

    expert: Int[Array, "n"]  # expert of each slot; -1 for an empty slot
    tokens: Int[Array, "n"]  # token copies served by each slot
    load: Int[Array, "M"]  # token copies served by each rank
    turn: Int[Array, ""]  # index of the exchange
    more: Bool[Array, ""]  # true if the last step exchanged two slots


def localize(plan: Filled, counts: Int[Array, "M P"], limit: Int[Array, ""]) -> Filled:
    """Exchange the contents of pairs of slots while more tokens then stay on the rank."""
    # One slot of a pair may be empty. Each step makes the exchange of the largest gain, with at most as many steps as
    # slots; `ffi/planning/localize.h` instead visits all pairs once. With more than `MOST_SLOTS` slots the plan is
    # unchanged, because the pairs would need too much memory.
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
    """Make the exchange of the largest positive gain, if any."""
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
    """Return the further tokens staying on the rank if two slots exchange their contents, `[n, n]`."""
    rank = host_iota(p.expert.size) // (p.expert.size // p.load.size)
    # Tokens of each source rank that each slot's replica could serve locally; 0 for an empty slot.
    stays = jnp.minimum(counts.T[jnp.maximum(p.expert, 0)], p.tokens[:, None])
    moved = stays[:, rank] - jnp.take_along_axis(stays, jnp.asarray(rank)[:, None], 1)
    return moved + moved.T


def _may(p: _Places, limit: Array, num_home: int) -> Bool[Array, "n n"]:
    """Return the pairs of slots allowed to exchange: no rank gets an expert twice or exceeds the limit."""
    size, ranks = p.expert.size, p.load.size
    rank = host_iota(size) // (size // ranks)
    same = (p.expert[:, None] == p.expert[None]) & (p.expert >= 0)[:, None]
    # True if the rank of one slot holds the expert of the other, as a replica or a home expert.
    holds = same.reshape(size, ranks, -1).any(2)[:, rank] | ((p.expert // num_home)[:, None] == rank[None])
    fits = p.tokens[:, None] - p.tokens[None] <= (limit - p.load)[rank][None]
    return ~holds & ~holds.T & fits & fits.T
