"""One pass of `exact` in jnp: replicas of a domain under a given limit.

`fill` places the replicas of one domain under a limit on the load of a rank, for many limits and search orders side by
side. One pass is short, so the search (`exact_search.py`) runs many of them. `localize` then swaps replicas to keep
more tokens on the rank.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.types import host_iota, iota, pytree
from jax_moe_lb.planners.base import quotient

# Candidates are the last dimension, and ranks the one before. In a register of a TPU, candidates then fill the lanes,
# and a maximum over ranks takes few instructions.


@pytree
class SearchOrder:
    """Weights of the choices in `fill`, for `M` ranks with `L` home experts each; of one candidate, or of `C`."""

    liking: Float[Array, "L M *C"]  # above 0, factor of an expert's tokens in the choice of the hottest expert
    welcome: Float[Array, "M *C"]  # above 0, factor of a rank's room in the choice of the rank with most room
    # At least 0, weight of a rank's load above the limit relative to the tokens of its experts
    pressing: Float[Array, "1 *C"]
    start: Int[Array, "M *C"]  # at least 0, distance below the limit that a rank must reach before receiving tokens
    # At least 0, further weight of a rank's load above the limit, divided by the replicas its experts may
    # still get; `None` with any fan-out.
    urgent: Float[Array, "1 *C"] | None
    # At least 0, number of least loaded ranks giving their experts away before all others; `None` with any fan-out.
    cleared: Int[Array, "1 *C"] | None


@pytree
class Filled:
    """Replicas of one domain, with `Z` replica slots on each rank; of one candidate, or of `C`."""

    expert: Int[Array, "Z M *C"]  # expert of each replica, numbered inside the domain; -1 for an empty slot
    tokens: Int[Array, "Z M *C"]  # token copies served by each replica; 0 for an empty slot
    left: Int[Array, "L M *C"]  # token copies of each expert served at home
    load: Int[Array, "M *C"]  # token copies served by each rank


@pytree
class Candidates:
    """Limits and search orders of `C` candidates in one domain."""

    tokens: Int[Array, "L M 1"]  # token copies of each home expert
    place: Int[Array, "M 1"] | None  # place of each rank by its load; `None` with any fan-out
    limit: Int[Array, "1 C"]  # limits on the load of a rank
    order: SearchOrder  # search orders; a last dimension of 1 is that of all candidates
    most: Int[Array, "1 C"]  # maximum numbers of replicas


def plain(tokens: Int[Array, "L M *C"], slots: int) -> Filled:
    """Return the plan without replicas."""
    load = tokens.sum(0, dtype=jnp.int32)
    # Derive the zeros from `load`, so they vary over its mesh axes.
    none = jnp.broadcast_to(0 * load[None], (slots, *load.shape))
    return Filled(none - 1, none, tokens, load)


@pytree
class OffloadChain:
    """Carry of the loop of `fill`: chains of `C` candidates."""

    now: Filled  # plan so far
    goal: Int[Array, "M C"]  # load at or below which a rank may receive, and down to which it gives
    used: Int[Array, "M C"]  # occupied replica slots of each rank
    sent: Int[Array, "M C"]  # replicas made of the experts of each rank
    number: Int[Array, "1 C"]  # replicas made
    more: Int[Array, ""]  # above 0 if the last step made a replica in any chain

    def give(
        self,
        of: Bool[Array, "M C"],
        hottest: Int[Array, "1 M C"],
        to: Bool[Array, "M C"],
        tokens: Int[Array, "1 C"],
        limit: Array,
    ) -> "OffloadChain":
        """Make a replica of the expert `hottest` of rank `of` on rank `to`, with `tokens` token copies, if above 0."""
        # It writes with masks instead of indices, because scatters are slow on TPU.
        now, (num_home, _, _) = self.now, self.now.left.shape
        made = tokens > 0
        of, to = of & made, to & made
        expert = _at(of, _indices(of, 0) * num_home + hottest[0])
        load = now.load + jnp.where(to, tokens, 0) - jnp.where(of, tokens, 0)
        here = to[None] & (_indices(now.expert, 0) == self.used[None])
        return OffloadChain(
            now=Filled(
                expert=jnp.where(here, expert[None], now.expert),
                tokens=jnp.where(here, tokens[None], now.tokens),
                left=now.left - jnp.where(of[None] & (_indices(now.left, 0) == hottest), tokens[None], 0),
                load=load,
            ),
            goal=jnp.where(load <= self.goal, limit, self.goal),
            used=self.used + to.astype(jnp.int32),
            sent=self.sent + of.astype(jnp.int32),
            number=self.number + made.astype(jnp.int32),
            more=made.astype(jnp.int32).max(),
        )


def fill(given: Candidates, slots: int, max_fan_out: int) -> Filled:
    """Make replicas until no rank exceeds the limit, no slot helps or there are `most` replicas, of all candidates."""
    # `ffi/planning/chain.h` explains the idea.
    # The rank with the most room and a free slot receives tokens of the hottest expert of the ranks above the limit, as
    # many as it can serve. It may take more than the home's surplus; then the home itself has room and can receive.
    # Each replica thus fills its receiver or takes an expert whole, so the number of steps is at most the number of
    # slots.
    # With a limited fan-out, a rank far above the limit needs receivers with much room, possibly more than any rank
    # has. Some of the least loaded ranks are therefore cleared first.
    # Returns the plans. If a rank still exceeds its limit, this search order failed.
    start = start_of_chains(given, slots, max_fan_out)
    return jax.lax.while_loop(lambda c: c.more > 0, lambda c: _give(c, given, max_fan_out), start).now


def start_of_chains(given: Candidates, slots: int, max_fan_out: int) -> OffloadChain:
    """Return the chains without replicas; with a binding fan-out, with those that clear ranks."""
    limit, order = given.limit, given.order
    now = plain(jnp.broadcast_to(given.tokens, (*given.tokens.shape[:2], limit.shape[1])), slots)
    below = jnp.maximum(limit - order.start, 0)
    goal, none = jnp.where(now.load > below, below, limit), 0 * now.load
    start = OffloadChain(now, goal, none, none, none[:1], none.max() + 1)
    if given.place is not None and order.cleared is not None:
        start = _clear(start, limit, given.place < order.cleared, max_fan_out)
    return start


def _clear(c: OffloadChain, limit: Array, idlest: Bool[Array, "M C"], max_fan_out: int) -> OffloadChain:
    pending = (idlest & (c.now.load <= limit)).astype(jnp.int32)
    c = replace(c, goal=jnp.where(pending > 0, limit, c.goal))
    c, _ = jax.lax.while_loop(lambda s: s[1].max() > 0, lambda s: _clear_one(*s, limit, max_fan_out), (c, pending))
    return replace(c, more=0 * c.more + 1)


def _clear_one(
    c: OffloadChain, pending: Int[Array, "M C"], limit: Array, max_fan_out: int
) -> tuple[OffloadChain, Int[Array, "M C"]]:
    """Move one whole expert from a pending rank to the rank with the least sufficient room, or end its rank."""
    now, is_pending = c.now, pending > 0
    tokens = now.left.max(0)
    of = _is_first_highest(jnp.where(is_pending, tokens, -1)) & is_pending
    hottest, size = _first_highest(now.left), _at(of, tokens)
    room = jnp.where(is_pending | (now.load > c.goal) | (c.used == len(now.expert)), 0, limit - now.load)
    fits = (room >= size) & (room > 0)
    # The least room is the highest negative one; without any sufficient room, no rank.
    to = _is_first_highest(jnp.where(fits, -room, NO_ROOM)) & fits
    before = c.number
    c = c.give(of, hottest, to, jnp.where(fits.astype(jnp.int32).max(0, keepdims=True) > 0, size, 0), limit)
    # Each step moves an expert or ends a rank, so the steps are at most the experts plus the ranks.
    ended = of & (c.number == before)
    return c, jnp.where(is_pending & ~ended & (c.sent < max_fan_out), 1, 0)


NO_ROOM = -(2**31)
"""Negative room of ranks without space for an expert, in the choice of the least sufficient room."""


def _give(c: OffloadChain, given: Candidates, max_fan_out: int) -> OffloadChain:
    """Make a replica of the hottest expert on the rank with most room; none if none is possible."""
    now, limit, order = c.now, given.limit, given.order
    high = now.load > c.goal
    room = jnp.where(high | (c.used == len(now.expert)), 0, limit - now.load)
    to = _is_first_highest(room.astype(jnp.float32) * order.welcome)
    # Choose giver and expert together: the hottest home experts of all giving ranks.
    liked = now.left.astype(jnp.float32) * order.liking
    hottest = _first_highest(liked)
    pressing = order.pressing
    if order.urgent is not None:
        pressing = pressing + order.urgent / jnp.maximum(max_fan_out - c.sent, 1).astype(jnp.float32)
    heat = liked.max(0) + (now.load - limit).astype(jnp.float32) * pressing
    high &= c.sent < max_fan_out
    of = _is_first_highest(jnp.where(high, heat, -jnp.inf)) & high
    amount = jnp.where(_indices(now.left, 0) == hottest, now.left, 0).max(0)
    tokens = jnp.minimum(_at(of, amount), _at(to, room))
    return c.give(of, hottest, to, jnp.where(c.number < given.most, tokens, 0), limit)


def _indices(array: Array, axis: int) -> Int[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)


def _at(chosen: Bool[Array, "M C"], values: Int[Array, "M C"]) -> Int[Array, "1 C"]:
    return jnp.where(chosen, values, 0).max(0, keepdims=True)


def _first_highest(values: Array) -> Int[Array, "1 ..."]:
    # Mosaic has no argmax of several dimensions.
    index = _indices(values, 0)
    return jnp.where(values == values.max(0, keepdims=True), index, len(values)).min(0, keepdims=True)


def _is_first_highest(values: Array) -> Bool[Array, "..."]:
    return _indices(values, 0) == _first_highest(values)


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
    num_home, (slots, num_ranks) = len(plan.left), plan.expert.shape
    start = _Places(plan.expert.T.reshape(-1), plan.tokens.T.reshape(-1), plan.load, 0 * limit, limit >= 0)
    end = jax.lax.while_loop(
        lambda p: p.more & (p.turn < plan.expert.size), lambda p: _exchange(p, counts, limit, num_home), start
    )
    expert, tokens = (array.reshape(num_ranks, slots).T for array in (end.expert, end.tokens))
    return Filled(expert, tokens, plan.left, end.load)


def _exchange(p: _Places, counts: Array, limit: Array, num_home: int) -> _Places:
    """Make the exchange of the largest positive gain, if any."""
    gain = jnp.where(_may(p, limit, num_home), _gain(p, counts), 0)
    pair = jax.lax.argmax(gain.reshape(-1), 0, jnp.int32)
    a = quotient(pair, p.expert.size)
    b = pair - a * p.expert.size
    more, slots = gain[a, b] > 0, p.expert.size // p.load.size
    slot, rank = iota(p.expert.size), iota(p.load.size)
    gets = jnp.where(more & (slot == a), b, jnp.where(more & (slot == b), a, slot))
    change = jnp.where(more, p.tokens[b] - p.tokens[a], 0)
    load = p.load + jnp.where(rank == quotient(a, slots), change, 0)
    load -= jnp.where(rank == quotient(b, slots), change, 0)
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
    holds = same.reshape(size, ranks, -1).any(2)[:, rank] | (quotient(p.expert, num_home)[:, None] == rank[None])
    fits = p.tokens[:, None] - p.tokens[None] <= (limit - p.load)[rank][None]
    return ~holds & ~holds.T & fits & fits.T
