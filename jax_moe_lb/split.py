"""How a plan splits the tokens of every source over the ranks that serve their expert.

The tokens of an expert on a group of ranks stand in a queue, by source. A rule says for every
place in the queue how many of the tokens before it a rank serves; the difference of two places is
what the rank serves of the tokens between them. So a rank needs no more than the two ends of its
own tokens, or those of one column, and nothing of shape `[E, R, R]` exists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int

from jax_moe_lb._floor_share import floor_share
from jax_moe_lb.types import AnyArray, Counts, Quota, host_iota, namespace

Tier = Literal["nearest", "proportional"]
"""How a group of ranks matches its tokens with what its ranks serve; see `Split`."""

Line = Int[AnyArray, "E N"]
"""What the `N` ranks of one group supply or serve."""

Grid = Int[AnyArray, "E G N"]
"""The same of all groups of a tier."""

Place = Int[AnyArray, "E #N"]
"""Tokens in front of a place in the queue: one place for all ranks, or one for each."""

Rank = Int[AnyArray, ""] | int


@dataclass(frozen=True)
class Split:
    """Which source sends which of its tokens to which rank, of those that serve their expert.

    Tokens go to their own rank first, then to their own domain, then to ranks of equal offset in other domains,
    then anywhere, always as far as the quota reaches.

    Args:
        tier: who of a tier sends to whom. `nearest`: in the order of ranks, so that most sources send to
            one rank. `proportional`: every source to all ranks, in proportion to what they serve, as UltraEP does.
        locality: whether tokens go to their own rank first. Without it, their own rank is one of their domain.
    """

    tier: Tier = "nearest"
    locality: bool = True

    def __post_init__(self) -> None:
        if self.tier not in get_args(Tier):
            raise ValueError(f"tier is {self.tier!r}; expected {' or '.join(map(repr, get_args(Tier)))}")


def nearest_first(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """Which rank serves how many of one rank's token copies.

    Tier by tier (see `Split`), supply (counts) is matched with demand (quota), and both come out exactly.

    In the order of ranks that is the northwest-corner rule: the first in the queue go to the lowest rank. In
    proportion, where a tier cannot serve or does not have all, every rank takes part by what it has or serves. A
    binary tree over the ranks then splits the queue: of the first `a` tokens of a node, `floor(a * left / total)` go
    to the left half, whose ranks serve `left` of the node's `total`. A source is split as its tokens are, up to less
    than a token per level of the tree.

    Args:
        counts: `[R, E]`, token copies by source.
        quota: `[E, R]`, token copies by serving rank, with `quota.sum(1) == counts.sum(0)`.
        rank: the source whose row is wanted.
        domain: `M`.
        split: of the plan.

    Returns:
        `[E, R]`: copies of each expert that `rank` sends to each rank; sums to `counts[rank]`.
    """

    def row(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        end = _take(supply.cumsum(1, dtype=np.int32), member)
        return rule.served(end, demand, None) - rule.served(end - _take(supply, member), demand, None)

    return _of_one_rank(counts, quota, rank, domain, split, row)


def arrivals(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """The other side of `nearest_first`: copies of each expert that `rank` gets from each rank, `[E, R]`."""

    def column(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        return _steps(rule.served(supply.cumsum(1, dtype=np.int32), demand, member))

    return _of_one_rank(counts, quota, rank, domain, split, column)


def kept(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Quota:
    """Copies of each expert that every rank serves of its own, `[E, R]`: the diagonal of the split."""
    if split.locality:
        # Of what is left after this a rank has no tokens, or serves none.
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
    """The entries of one rank, `line(supply, demand, member, rule)` of its group in every tier."""
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
    """The sum over the tiers of `entries(supply, demand, shape, axis, rule)`; `own` marks ranks that keep tokens."""
    xp = namespace(quota)
    rule = _NEAREST if split.tier == "nearest" else _PROPORTIONAL
    num_experts, num_ranks = quota.shape
    supply, demand, total = counts.T, quota, xp.zeros_like(quota)
    if split.locality:
        stay = xp.minimum(supply, demand)
        supply, demand, total = supply - stay, demand - stay, xp.where(own, stay, 0)
    for shape, axis in _tiers(num_ranks, domain):
        # Groups in front of their members.
        supplied, demanded = (xp.moveaxis(side.reshape(num_experts, *shape), axis, 2) for side in (supply, demand))
        if shape[0] > 1:  # otherwise this is the last tier, and all that is left meets
            supplied, demanded = _matched(supplied, demanded, rule)
        grids = entries(supplied, demanded, shape, axis, rule), supplied, demanded
        part, supplied, demanded = (xp.moveaxis(grid, 2, axis).reshape(num_experts, num_ranks) for grid in grids)
        total, supply, demand = total + part, supply - supplied, demand - demanded
    return total


def _tiers(num_ranks: int, domain: int) -> list[tuple[tuple[int, int], int]]:
    """Rank grids whose lines are the groups to match within; trivial tiers are left out."""
    grid = (num_ranks // domain, domain)
    own_domain, own_offset, anywhere = (grid, 2), (grid, 1), ((1, num_ranks), 2)
    if 1 in grid:
        return [anywhere]
    return [own_domain, own_offset, anywhere]


def _matched(supply: Grid, demand: Grid, rule: "_Rule") -> tuple[Grid, Grid]:
    """What of both sides meets in this tier: all of the smaller side, and of the larger one what the rule takes."""
    xp = namespace(supply)
    ends = [side.cumsum(2, dtype=np.int32) for side in (supply, demand)]
    matched = xp.minimum(ends[0][:, :, -1:], ends[1][:, :, -1:])
    supplied, demanded = (_steps(rule.taken(end, matched)) for end in ends)
    return supplied, demanded


# ---- rules ---------------------------------------------------------------------------


def _first(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Of the first tokens in a queue, those that take part: the first `matched`."""
    return namespace(end).minimum(end, matched)


def _share(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Of the first tokens in a queue, those that take part: in proportion."""
    return floor_share(end, matched, namespace(end).maximum(end[:, :, -1:], matched))


def _served_in_order(place: Place, demand: Line, member: Rank | None) -> Line:
    """Of the tokens before a place in the queue, those that go to `member`, or to each rank."""
    start = demand.cumsum(1, dtype=np.int32) - demand
    if member is not None:
        start, demand = _take(start, member), _take(demand, member)
    return namespace(demand).clip(place - start, 0, demand)


def _served_by_tree(place: Place, demand: Line, member: Rank | None) -> Line:
    """Likewise, down a tree whose nodes are blocks of ranks."""
    levels = _levels(demand)
    if member is None:
        return _down_to_all(place, levels)[:, : demand.shape[1]]
    xp = namespace(demand)
    for level, (total, left) in enumerate(levels):
        height = len(levels) - level
        to_left = floor_share(place, _take(left, member >> height), _take(total, member >> height))
        place = xp.where((member >> (height - 1)) & 1, place - to_left, to_left)
    return place


def _down_to_all(place: Place, levels: list[tuple[AnyArray, AnyArray]]) -> AnyArray:
    """What goes to each leaf of the tree."""
    xp = namespace(place)
    num_experts, width = place.shape
    if width > 1:
        place = xp.pad(place, ((0, 0), (0, 2 ** len(levels) - width)))
    place = place[:, None]  # [E, nodes, ranks of each, or 1]
    for total, left in levels:
        half = place.shape[2] // 2
        to_left = floor_share(place, left[:, :, None], total[:, :, None])
        to_right = place - to_left
        if half:
            to_left, to_right = to_left[:, :, :half], to_right[:, :, half:]
        place = xp.stack([to_left, to_right], axis=2).reshape(num_experts, -1, max(half, 1))
    return place[:, :, 0]


def _levels(demand: Line) -> list[tuple[AnyArray, AnyArray]]:
    """Of every level of the tree, the root first: what each node's ranks serve, and what its left half does."""
    depth = (demand.shape[1] - 1).bit_length()
    nodes = namespace(demand).pad(demand, ((0, 0), (0, 2**depth - demand.shape[1])))
    levels = []
    for _ in range(depth):
        left, nodes = nodes[:, ::2], nodes[:, ::2] + nodes[:, 1::2]
        levels.append((nodes, left))
    return levels[::-1]


@dataclass(frozen=True)
class _Rule:
    """How a tier is matched.

    Args:
        taken: which tokens of the queue take part, where only some can.
        served: which of those before a place go where.
    """

    taken: Callable[[Grid, AnyArray], Grid]
    served: Callable[[Place, Line, Rank | None], Line]


_NEAREST = _Rule(_first, _served_in_order)
_PROPORTIONAL = _Rule(_share, _served_by_tree)


def _take(array: AnyArray, index: Rank) -> AnyArray:
    """One entry along axis 1, which stays."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(index, np.int32).reshape(1), axis=1, mode="clip")


def _steps(ends: AnyArray) -> AnyArray:
    """The inverse of `cumsum` along the last axis."""
    xp = namespace(ends)
    return xp.diff(ends, axis=-1, prepend=xp.zeros_like(ends[..., :1]))
