"""Split of a plan: source and serving rank per token copy.

The tokens of an expert on a group of ranks form a queue, ordered by source. For every position in the queue, a rule
gives the number of earlier tokens served by a rank. The difference between two positions is the rank's share of the
tokens between them. A rank therefore evaluates the rule only at the two ends of its own tokens, or of one column. No
array of shape `[E, R, R]` exists.

`floor_share` computes shares of integers with equal results in NumPy and in JAX, which has no 64-bit integers by
default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.topology import check_domain
from jax_moe_lb.core.types import AnyArray, Counts, Quota, host_iota, namespace

SMALL = 2**21
"""Bound on `whole` below which a quotient in float32 is off by less than 1."""


def floor_share(part: AnyArray, share: AnyArray, whole: AnyArray) -> AnyArray:
    """Return `floor(part * share / whole)` for int32 with `0 <= part, share <= whole`; 0 if `whole` is 0."""
    # Planners use it for every proportional division, so host and jitted programs produce equal plans.
    if namespace(part) is np:
        wide = part.astype(np.int64) * share // np.maximum(whole, 1)
        return wide.astype(np.int32)
    part, share, whole = jnp.broadcast_arrays(part, share, jnp.maximum(whole, 1))
    # Floating point gives a first estimate and integers correct it, so the result is equal on all machines.
    return jax.lax.cond(whole.max() < SMALL, _small_share, _large_share, part, share, whole)


def _small_share(part: Array, share: Array, whole: Array) -> Array:
    # The estimate is off by at most 1, so the remainder fits 32 bits although the products do not.
    guess = (part.astype(jnp.float32) * share.astype(jnp.float32) / whole.astype(jnp.float32)).astype(jnp.int32)
    rest = part * share - guess * whole
    return guess + (rest >= whole).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


def _large_share(part: Array, share: Array, whole: Array) -> Array:
    # Estimate the quotient, then the rest of it from the remainder, which is exact in 64 bits. The bound is the largest
    # float32 representable in int32; casts beyond it are undefined.
    size = whole.astype(jnp.float32)
    guess = jnp.minimum(part.astype(jnp.float32) * share.astype(jnp.float32) / size, np.float32(2**31 - 128))
    guess = guess.astype(jnp.int32)
    high, low = _product(part, share)
    guess_high, guess_low = _product(guess, whole)
    high = (high - guess_high).astype(jnp.int32) - (low < guess_low).astype(jnp.int32)
    low = low - guess_low
    missed = jnp.round((high.astype(jnp.float32) * np.float32(2**32) + low.astype(jnp.float32)) / size)
    missed = missed.astype(jnp.int32)
    rest = (low - missed.astype(jnp.uint32) * whole.astype(jnp.uint32)).astype(jnp.int32)
    return guess + missed - (rest < 0).astype(jnp.int32)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the upper and lower 32 bits of `a * b`."""
    # Multiply 16-bit halves, whose products fit 32 bits. Unsigned sums wrap around instead of overflowing.
    a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    cross = (a & mask) * (b & mask)
    upper = (a >> half) * (b & mask) + (cross >> half)
    lower = (a & mask) * (b >> half) + (upper & mask)
    return (a >> half) * (b >> half) + (upper >> half) + (lower >> half), a * b


Tier = Literal["nearest", "proportional"]
"""Matching rule between tokens and serving ranks inside a group; see `Split`."""

Line = Int[AnyArray, "E N"]
"""Supply or demand of the `N` ranks of one group."""

Grid = Int[AnyArray, "E G N"]
"""Supply or demand of all groups of a tier."""

Position = Int[AnyArray, "E #N"]
"""Number of tokens before a queue position: one position for all ranks, or one per rank."""

Rank = Int[AnyArray, ""] | int

MOST_AT_ONCE = 2**20
"""Maximum number of queue entries processed at once on a host; larger batches are no faster."""


@dataclass(frozen=True)
@checked_fields
class Split:
    """Rule assigning the tokens of each source to the ranks serving their expert.

    Tokens go to their own rank first, then to their own domain, then to ranks of equal offset in other domains, then to
    any rank. Each tier takes as many tokens as the quota allows. Balancers set the rule in their plans. The default
    keeps as many copies on their own rank as the quota allows.

    Args:
        tier: matching inside a tier. `"nearest"` (default) serves ranks in order, so most sources send to one rank.
            `"proportional"` splits every source over all ranks in proportion to their quota, as UltraEP does, which
            spreads the traffic.
        locality: if True (default), tokens go to their own rank first. Otherwise their own rank is an ordinary rank of
            the domain.

    Raises:
        ValueError: `tier` is neither `"nearest"` nor `"proportional"`.

    Examples:
        Two ranks with six tokens each for an expert served by ranks 2 and 3:

        >>> import numpy as np
        >>> from jax_moe_lb.core import Split, nearest_first
        >>> counts = np.array([[6], [6], [0], [0]], np.int32)
        >>> quota = np.array([[0, 0, 6, 6]], np.int32)
        >>> [nearest_first(counts, quota, rank, 4)[0].tolist() for rank in (0, 1)]
        [[0, 0, 6, 0], [0, 0, 0, 6]]
        >>> [nearest_first(counts, quota, rank, 4, Split("proportional"))[0].tolist() for rank in (0, 1)]
        [[0, 0, 3, 3], [0, 0, 3, 3]]
    """

    tier: Tier = "nearest"
    locality: bool = True


def nearest_first(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """Return the token copies of each expert sent by one rank to each rank.

    Use it to inspect the destinations of a rank's tokens under a plan; `rows_between` sums it over experts for all
    ranks. Each tier (see `Split`) matches supply (counts) with demand (quota); all tiers together match both exactly.

    With `"nearest"` this is the northwest-corner rule: the first tokens in the queue go to the lowest rank. With
    `"proportional"`, if a tier cannot match all tokens or all demand, every rank takes part in proportion to its supply
    or demand. A binary tree over the ranks then splits the queue. Of the first `a` tokens of a node, `floor(a * left /
    total)` go to the left half, with `left` of the node's demand `total`. A source is split in proportion to the
    tokens, with an error below one token per level of the tree.

    Args:
        counts: `[R, E]` int32, token copies by source.
        quota: `[E, R]` int32, token copies by serving rank, with `quota.sum(1) == counts.sum(0)`.
        rank: the source rank; an integer, or an int32 scalar of a jitted program.
        domain: `M`, ranks per domain; usually `plan.domain`.
        split: the split rule, `Split()` by default; usually `plan.split`.

    Returns:
        `[E, R]` int32; its sum over ranks is `counts[rank]`.

    Raises:
        ValueError: `rank` is no rank, or `domain` does not divide `R`.

    Examples:
        Of rank 0's six copies one stays, two go to rank 1 of the domain, two to rank 2 of equal offset, one to rank 3:

        >>> import numpy as np
        >>> from jax_moe_lb.core import nearest_first
        >>> counts = np.zeros((4, 4), np.int32)
        >>> counts[0, 0] = 6
        >>> quota = np.zeros((4, 4), np.int32)
        >>> quota[0] = [1, 2, 2, 1]
        >>> nearest_first(counts, quota, rank=0, domain=2)[0]
        array([1, 2, 2, 1], dtype=int32)
    """
    num_ranks = quota.shape[1]
    check_domain(domain, num_ranks)
    if not isinstance(rank, int | np.integer):
        # The counts and the plan may be constants of a program.
        counts, quota = jnp.asarray(counts), jnp.asarray(quota)
    elif not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}; expected 0 to {num_ranks - 1}")

    def row(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        end = _take(supply.cumsum(1, dtype=np.int32), member)
        return rule.served(end, demand, None) - rule.served(end - _take(supply, member), demand, None)

    return _of_one_rank(counts, quota, rank, domain, split, row)


def rows_of_all(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Int[np.ndarray, "R R"]:
    """Return the sum of `nearest_first` over experts for all ranks, in NumPy."""
    # The arguments are those of `nearest_first`, as NumPy arrays. Only queues with tokens are evaluated.
    num_ranks = quota.shape[1]
    rows = np.zeros((num_ranks, num_ranks), np.int32)

    def add(sources: _Entries, experts: _Entries, ranks: _Sent, sent: _Sent) -> None:
        del experts
        first = np.flatnonzero(np.diff(sources, prepend=-1))
        rows[sources[first, None], ranks[first]] += np.add.reduceat(sent, first, axis=0, dtype=np.int32)

    stay = _by_source(counts, quota, domain, split, add)
    rows[np.arange(num_ranks), np.arange(num_ranks)] += stay.sum(0, dtype=np.int32)
    return rows


def copies_of_all(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Int[np.ndarray, "R E R"]:
    """Return `nearest_first` of all ranks, in NumPy."""
    # The arguments are those of `nearest_first`, as NumPy arrays. Only queues with tokens are evaluated.
    num_experts, num_ranks = quota.shape
    copies = np.zeros((num_ranks, num_experts, num_ranks), np.int32)
    # Most experts are served by one rank, which gets all their tokens.
    copies[:, np.arange(num_experts), quota.argmax(1)] = counts
    shared = np.flatnonzero((quota > 0).sum(1) > 1)
    if not len(shared):
        return copies
    copies[:, shared] = 0

    def add(sources: _Entries, experts: _Entries, ranks: _Sent, sent: _Sent) -> None:
        copies[sources[:, None], shared[experts][:, None], ranks] += sent

    stay = _by_source(counts[:, shared], quota[shared], domain, split, add)
    every = np.arange(num_ranks)
    copies[every[:, None], shared, every[:, None]] += stay.T
    return copies


_Entries = Int[np.ndarray, "N"]
_Sent = Int[np.ndarray, "N M"]


def _by_source(
    counts: Counts, quota: Quota, domain: int, split: Split, add: Callable[[_Entries, _Entries, _Sent, _Sent], None]
) -> Quota:
    """Call `add(sources, experts, ranks, sent)` with all entries, ascending by source; return kept copies."""
    # Entry `i` sends `sent[i, j]` copies for `experts[i]` from `sources[i]` to `ranks[i, j]`.
    num_ranks = quota.shape[1]

    def entries(supply: Grid, demand: Grid, shape: tuple[int, int], axis: int, rule: _Rule) -> Grid:
        # Sort by rank, then expert, so that the entries of one source are contiguous.
        group, member, expert = np.nonzero(np.moveaxis(supply, 0, 2))
        ends = supply.cumsum(2, dtype=np.int32)
        ranks = np.moveaxis(np.arange(num_ranks).reshape(shape), axis - 1, 1)
        most = max(1, MOST_AT_ONCE // supply.shape[2])
        for start in range(0, len(group), most):
            g, m, e = (index[start : start + most] for index in (group, member, expert))
            end, served = ends[e, g, m][:, None], demand[e, g]
            sent = rule.served(end, served, None) - rule.served(end - supply[e, g, m][:, None], served, None)
            add(ranks[g, m], e, ranks[g], sent)
        return np.zeros_like(supply)

    return _over_tiers(counts, quota, domain, split, np.ones((1, num_ranks), bool), entries)


def arrivals(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """Return the token copies of each expert received by `rank` from each rank, `[E, R]`."""
    # It is the receiving side of `nearest_first`: a receiver computes its arrivals without a message. The arguments are
    # those of `nearest_first`, with `rank` as the serving rank.

    def column(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        return _steps(rule.served(supply.cumsum(1, dtype=np.int32), demand, member))

    return _of_one_rank(counts, quota, rank, domain, split, column)


def kept(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Quota:
    """Return the token copies per expert served by the source, `[E, R]`: the diagonal of the split."""
    if split.locality:
        # Later tiers add none: after this one, a rank has either no tokens or no demand left for an expert.
        return namespace(quota).minimum(counts.T, quota)

    def own(supply: Grid, demand: Grid, shape: tuple[int, int], axis: int, rule: _Rule) -> Grid:
        del shape, axis
        size, served = supply.reshape(-1, supply.shape[2]), demand.reshape(-1, supply.shape[2])
        end = size.cumsum(1, dtype=np.int32)
        return (rule.served(end, served, None) - rule.served(end - size, served, None)).reshape(supply.shape)

    return _over_tiers(counts, quota, domain, split, np.ones((1, quota.shape[1]), bool), own)


# ---- tiers ---------------------------------------------------------------------------
def _of_one_rank(
    counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split, line: Callable[..., Line]
) -> Quota:
    """Compute the entries of one rank: `line(supply, demand, member, rule)` of the group in every tier."""
    xp = namespace(quota)

    def grid(supply: Grid, demand: Grid, shape: tuple[int, int], axis: int, rule: _Rule) -> Grid:
        row, column = rank // shape[1], rank % shape[1]
        group, member = (row, column) if axis == 2 else (column, row)
        part = line(_take(supply, group)[:, 0], _take(demand, group)[:, 0], member, rule)
        return xp.where(host_iota(supply.shape[1])[None, :, None] == group, part[:, None], 0)

    return _over_tiers(counts, quota, domain, split, host_iota(quota.shape[1])[None] == rank, grid)


def _over_tiers(
    counts: Counts, quota: Quota, domain: int, split: Split, own: AnyArray, entries: Callable[..., Grid]
) -> Quota:
    """Sum `entries(supply, demand, shape, axis, rule)` over the tiers; `own` marks the ranks with kept tokens."""
    xp = namespace(quota)
    rule = _NEAREST if split.tier == "nearest" else _PROPORTIONAL
    num_experts, num_ranks = quota.shape
    supply, demand, total = counts.T, quota, xp.zeros_like(quota)
    if split.locality:
        stay = xp.minimum(supply, demand)
        supply, demand, total = supply - stay, demand - stay, xp.where(own, stay, 0)
    for shape, axis in _tiers(num_ranks, domain):
        # Move groups in front of their members, so that one code path matches every tier.
        supplied, demanded = (xp.moveaxis(side.reshape(num_experts, *shape), axis, 2) for side in (supply, demand))
        if shape[0] > 1:  # in the last tier, with one group, all remaining tokens match
            supplied, demanded = _matched(supplied, demanded, rule)
        grids = entries(supplied, demanded, shape, axis, rule), supplied, demanded
        part, supplied, demanded = (xp.moveaxis(grid, 2, axis).reshape(num_experts, num_ranks) for grid in grids)
        total, supply, demand = total + part, supply - supplied, demand - demanded
    return total


def _tiers(num_ranks: int, domain: int) -> list[tuple[tuple[int, int], int]]:
    """Return the rank grid and member axis per non-trivial tier."""
    grid = (num_ranks // domain, domain)
    # The last tier takes the remainder. With one domain, or with domains of one rank, it is the only tier.
    own_domain, own_offset, anywhere = (grid, 2), (grid, 1), ((1, num_ranks), 2)
    if 1 in grid:
        return [anywhere]
    return [own_domain, own_offset, anywhere]


def _matched(supply: Grid, demand: Grid, rule: "_Rule") -> tuple[Grid, Grid]:
    """Return the part of supply and demand matched in this tier."""
    # The smaller side is matched completely; the rule selects the part of the larger side.
    xp = namespace(supply)
    ends = [side.cumsum(2, dtype=np.int32) for side in (supply, demand)]
    matched = xp.minimum(ends[0][:, :, -1:], ends[1][:, :, -1:])
    supplied, demanded = (_steps(rule.taken(end, matched)) for end in ends)
    return supplied, demanded


# ---- rules ---------------------------------------------------------------------------
def _first(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Return how many of the first tokens in a queue are matched, if the first `matched` are."""
    return namespace(end).minimum(end, matched)


def _share(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Return how many of the first tokens in a queue are matched, if all are in proportion."""
    return floor_share(end, matched, namespace(end).maximum(end[:, :, -1:], matched))


def _served_in_order(position: Position, demand: Line, member: Rank | None) -> Line:
    """Return how many tokens before a queue position go to `member`, or to each rank if it is `None`."""
    start = demand.cumsum(1, dtype=np.int32) - demand
    if member is not None:
        start, demand = _take(start, member), _take(demand, member)
    return namespace(demand).clip(position - start, 0, demand)


def _served_by_tree(position: Position, demand: Line, member: Rank | None) -> Line:
    """Return the same counts as `_served_in_order`, by a binary tree whose nodes are blocks of ranks."""
    levels = _levels(demand)
    if member is None:
        return _down_to_all(position, levels)[:, : demand.shape[1]]
    xp = namespace(demand)
    for level, (total, left) in enumerate(levels):
        # The bits of a rank's index are its path from the root: its node on this level, then left or right half.
        height = len(levels) - level
        to_left = floor_share(position, _take(left, member >> height), _take(total, member >> height))
        position = xp.where((member >> (height - 1)) & 1, position - to_left, to_left)
    return position


def _down_to_all(position: Position, levels: list[tuple[AnyArray, AnyArray]]) -> AnyArray:
    """Return the number of tokens reaching each leaf of the tree."""
    xp = namespace(position)
    num_experts, width = position.shape
    if width > 1:
        position = xp.pad(position, ((0, 0), (0, 2 ** len(levels) - width)))
    position = position[:, None]  # [E, nodes, ranks per node, or 1]
    for total, left in levels:
        half = position.shape[2] // 2
        to_left = floor_share(position, left[:, :, None], total[:, :, None])
        to_right = position - to_left
        if half:
            to_left, to_right = to_left[:, :, :half], to_right[:, :, half:]
        position = xp.stack([to_left, to_right], axis=2).reshape(num_experts, -1, max(half, 1))
    return position[:, :, 0]


def _levels(demand: Line) -> list[tuple[AnyArray, AnyArray]]:
    """Return, for each level from the root, the demand of each node and of the left half."""
    # Padding ranks have no demand: padding to a power of two makes the tree equal for every number of ranks.
    depth = (demand.shape[1] - 1).bit_length()
    nodes = namespace(demand).pad(demand, ((0, 0), (0, 2**depth - demand.shape[1])))
    levels = []
    for _ in range(depth):
        left, nodes = nodes[:, ::2], nodes[:, ::2] + nodes[:, 1::2]
        levels.append((nodes, left))
    return levels[::-1]


@dataclass(frozen=True)
class _Rule:
    """Rule matching the tokens of a tier with the serving ranks."""

    # Function counting the matched tokens before each queue position, if a side is matched in part
    taken: Callable[[Grid, AnyArray], Grid]
    # Function counting the tokens before a position by serving rank
    served: Callable[[Position, Line, Rank | None], Line]


_NEAREST = _Rule(_first, _served_in_order)
_PROPORTIONAL = _Rule(_share, _served_by_tree)


def _take(array: AnyArray, index: Rank) -> AnyArray:
    """Return one entry along axis 1, keeping the axis."""
    xp = namespace(array)
    # Clipping is free here. Other modes make XLA fill out-of-range entries with the minimum integer.
    return xp.take(array, xp.asarray(index, np.int32).reshape(1), axis=1, mode="clip")


def _steps(ends: AnyArray) -> AnyArray:
    """Return the differences along the last axis, the inverse of `cumsum`."""
    xp = namespace(ends)
    return xp.diff(ends, axis=-1, prepend=xp.zeros_like(ends[..., :1]))
