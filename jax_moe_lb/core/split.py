"""The split of a plan: which ranks serve the tokens of every source.

The tokens of an expert on a group of ranks form a queue, ordered by source. A rule gives, for every position in the
queue, the number of earlier tokens that a rank serves. The difference between two positions is the rank's share of the
tokens between them. A rank therefore needs only the two ends of its own tokens, or of one column, and no array of shape
`[E, R, R]` exists.

`floor_share` computes shares of integers with equal results in NumPy and in JAX, which has no 64-bit integers by
default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.core.types import AnyArray, Counts, Quota, host_iota, namespace

SMALL = 2**21
"""Below this a quotient in float32 is off by less than 1."""


def floor_share(part: AnyArray, share: AnyArray, whole: AnyArray) -> AnyArray:
    """Computes `floor(part * share / whole)` of int32 with `0 <= part, share <= whole`; 0 where `whole` is 0.

    Use it wherever a planner divides tokens in proportion: the plan on a host must be the one in a jitted program.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.core.split import floor_share
        >>> floor_share(np.array([7]), np.array([5]), np.array([10]))
        array([3], dtype=int32)
    """
    if namespace(part) is np:
        wide = part.astype(np.int64) * share // np.maximum(whole, 1)
        return wide.astype(np.int32)
    part, share, whole = jnp.broadcast_arrays(part, share, jnp.maximum(whole, 1))
    # The same integers on every machine: floating point only guesses, and integers correct it.
    return jax.lax.cond(whole.max() < SMALL, _small_share, _large_share, part, share, whole)


def _small_share(part: Array, share: Array, whole: Array) -> Array:
    # The guess is off by at most 1, so that the remainder fits 32 bits although the products do not.
    guess = (part.astype(jnp.float32) * share.astype(jnp.float32) / whole.astype(jnp.float32)).astype(jnp.int32)
    rest = part * share - guess * whole
    return guess + (rest >= whole).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


def _large_share(part: Array, share: Array, whole: Array) -> Array:
    # A guess, then another for what it misses, which is exact in 64 bits; the rest is below `whole`. The bound is the
    # largest float32 that int32 holds: beyond it the cast would be undefined.
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
    """Computes the upper and lower 32 bits of `a * b`."""
    # By halves of 16 bits, whose products fit: unsigned, so that sums wrap round instead of overflowing.
    a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    cross = (a & mask) * (b & mask)
    upper = (a >> half) * (b & mask) + (cross >> half)
    lower = (a & mask) * (b >> half) + (upper & mask)
    return (a >> half) * (b >> half) + (upper >> half) + (lower >> half), a * b


Tier = Literal["nearest", "proportional"]
"""It is the rule by which a group of ranks matches its tokens with what its ranks serve; see `Split`."""

Line = Int[AnyArray, "E N"]
"""It holds what the `N` ranks of one group supply or serve."""

Grid = Int[AnyArray, "E G N"]
"""It holds the same of all groups of a tier."""

Position = Int[AnyArray, "E #N"]
"""It counts the tokens in front of a position in the queue: of one position for all ranks, or of one for each."""

Rank = Int[AnyArray, ""] | int

MOST_AT_ONCE = 2**20
"""`rows_of_all` holds so many numbers of queues at a time; more are no faster."""


@dataclass(frozen=True)
class Split:
    """A split rule says which source sends which of its tokens to which of the ranks that serve their expert.

    Tokens go to their own rank first, then to their own domain, then to ranks of equal offset in other domains, then
    anywhere, always as far as the quota reaches. A balancer puts the rule into its plans; with the
    default as many copies as the quota allows stay on their own rank.

    Args:
        tier: who of a tier sends to whom. With `"nearest"`, the usual one, ranks are served in their order, so that
            most sources send to one rank. With `"proportional"` every source sends to all ranks in proportion to what
            they serve, as UltraEP does, which spreads the traffic.
        locality: whether tokens go to their own rank first, which is usual. Without it, their own rank is one of their
            domain like any other.

    Raises:
        ValueError: `tier` is another word.

    Examples:
        Two ranks with six tokens each for an expert that ranks 2 and 3 serve:

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

    def __post_init__(self) -> None:
        if self.tier not in get_args(Tier):
            raise ValueError(f"tier is {self.tier!r}; expected {' or '.join(map(repr, get_args(Tier)))}")


def nearest_first(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """Tells which rank serves how many of one rank's token copies.

    Use it to see where the tokens of a rank go under a plan; `rows_between` sums it over experts for all ranks. Tier by
    tier (see `Split`), supply (counts) is matched with demand (quota), and both come out exactly.

    With `"nearest"` that is the northwest-corner rule: the first in the queue go to the lowest rank. With
    `"proportional"`, where a tier cannot serve or does not have all, every rank takes part by what it has or serves. A
    binary tree over the ranks then splits the queue: of the first `a` tokens of a node, `floor(a * left / total)` go
    to the left half, whose ranks serve `left` of the node's `total`. A source is split as its tokens are, up to less
    than a token per level of the tree.

    Args:
        counts: `[R, E]` int32, token copies by source.
        quota: `[E, R]` int32, token copies by serving rank, with `quota.sum(1) == counts.sum(0)`.
        rank: the source whose tokens are asked for; a number, or a scalar of a jitted program.
        domain: `M`, ranks of a domain: usually `plan.domain`.
        split: the rule: usually `plan.split`.

    Returns:
        `[E, R]`, copies of each expert that `rank` sends to each rank; their sum over ranks is `counts[rank]`.

    Examples:
        Of rank 0's six copies one stays, two go to rank 1 of its domain, two to rank 2 of equal offset, one to rank 3:

        >>> import numpy as np
        >>> from jax_moe_lb.core import nearest_first
        >>> counts = np.zeros((4, 4), np.int32)
        >>> counts[0, 0] = 6
        >>> quota = np.zeros((4, 4), np.int32)
        >>> quota[0] = [1, 2, 2, 1]
        >>> nearest_first(counts, quota, rank=0, domain=2)[0]
        array([1, 2, 2, 1], dtype=int32)
    """

    def row(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        end = _take(supply.cumsum(1, dtype=np.int32), member)
        return rule.served(end, demand, None) - rule.served(end - _take(supply, member), demand, None)

    return _of_one_rank(counts, quota, rank, domain, split, row)


def rows_of_all(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Int[np.ndarray, "R R"]:
    """Sums `nearest_first` over experts for all ranks at once, on the host: `[R, R]`, from rank to rank.

    The arguments are those of `nearest_first`, in NumPy arrays. Queues are looked at only where a rank has tokens.
    """
    num_ranks = quota.shape[1]
    rows = np.zeros((num_ranks, num_ranks), np.int32)

    def add(supply: Grid, demand: Grid, shape: tuple[int, int], axis: int, rule: _Rule) -> Grid:
        # In the order of ranks, then of experts, so that what a rank sends stands together.
        group, member, expert = np.nonzero(np.moveaxis(supply, 0, 2))
        ends = supply.cumsum(2, dtype=np.int32)
        ranks = np.moveaxis(np.arange(num_ranks).reshape(shape), axis - 1, 1)
        most = max(1, MOST_AT_ONCE // supply.shape[2])
        for start in range(0, len(group), most):
            g, m, e = (index[start : start + most] for index in (group, member, expert))
            end, served = ends[e, g, m][:, None], demand[e, g]
            sent = rule.served(end, served, None) - rule.served(end - supply[e, g, m][:, None], served, None)
            first = np.flatnonzero(np.diff(ranks[g, m], prepend=-1))
            rows[ranks[g, m][first, None], ranks[g[first]]] += np.add.reduceat(sent, first, axis=0, dtype=np.int32)
        return np.zeros_like(supply)

    stay = _over_tiers(counts, quota, domain, split, np.ones((1, num_ranks), bool), add)
    rows[np.arange(num_ranks), np.arange(num_ranks)] += stay.sum(0, dtype=np.int32)
    return rows


def arrivals(counts: Counts, quota: Quota, rank: Rank, domain: int, split: Split = Split()) -> Quota:
    """Tells the other side of `nearest_first`: how many copies of each expert `rank` gets from each rank, `[E, R]`.

    A receiver asks it, and so knows what will arrive without being told. The arguments are those of `nearest_first`,
    but that `rank` is the rank that serves.
    """

    def column(supply: Line, demand: Line, member: Rank, rule: _Rule) -> Line:
        return _steps(rule.served(supply.cumsum(1, dtype=np.int32), demand, member))

    return _of_one_rank(counts, quota, rank, domain, split, column)


def kept(counts: Counts, quota: Quota, domain: int, split: Split = Split()) -> Quota:
    """Counts the copies of each expert that every rank serves of its own, `[E, R]`: the diagonal of the split."""
    if split.locality:
        # Later tiers add nothing: of what is left after this one a rank has no tokens, or serves none.
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
    """Computes the entries of one rank: `line(supply, demand, member, rule)` of its group in every tier."""
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
    """Sums `entries(supply, demand, shape, axis, rule)` over the tiers; `own` marks ranks that keep tokens."""
    xp = namespace(quota)
    rule = _NEAREST if split.tier == "nearest" else _PROPORTIONAL
    num_experts, num_ranks = quota.shape
    supply, demand, total = counts.T, quota, xp.zeros_like(quota)
    if split.locality:
        stay = xp.minimum(supply, demand)
        supply, demand, total = supply - stay, demand - stay, xp.where(own, stay, 0)
    for shape, axis in _tiers(num_ranks, domain):
        # Every tier is matched by the same code if its groups stand in front of their members.
        supplied, demanded = (xp.moveaxis(side.reshape(num_experts, *shape), axis, 2) for side in (supply, demand))
        if shape[0] > 1:  # otherwise this is the last tier, and all that is left meets
            supplied, demanded = _matched(supplied, demanded, rule)
        grids = entries(supplied, demanded, shape, axis, rule), supplied, demanded
        part, supplied, demanded = (xp.moveaxis(grid, 2, axis).reshape(num_experts, num_ranks) for grid in grids)
        total, supply, demand = total + part, supply - supplied, demand - demanded
    return total


def _tiers(num_ranks: int, domain: int) -> list[tuple[tuple[int, int], int]]:
    """Lists the rank grids whose lines are the groups to match within; trivial tiers are left out."""
    grid = (num_ranks // domain, domain)
    # The last tier takes what the offsets could not: with one domain, or domains of one rank, it does all by itself.
    own_domain, own_offset, anywhere = (grid, 2), (grid, 1), ((1, num_ranks), 2)
    if 1 in grid:
        return [anywhere]
    return [own_domain, own_offset, anywhere]


def _matched(supply: Grid, demand: Grid, rule: "_Rule") -> tuple[Grid, Grid]:
    """Tells what of both sides meets in this tier: all of the smaller side, of the larger one what the rule takes."""
    xp = namespace(supply)
    ends = [side.cumsum(2, dtype=np.int32) for side in (supply, demand)]
    matched = xp.minimum(ends[0][:, :, -1:], ends[1][:, :, -1:])
    supplied, demanded = (_steps(rule.taken(end, matched)) for end in ends)
    return supplied, demanded


# ---- rules ---------------------------------------------------------------------------
def _first(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Counts how many of the first tokens in a queue take part, where the first `matched` do."""
    return namespace(end).minimum(end, matched)


def _share(end: Grid, matched: Int[AnyArray, "E G 1"]) -> Grid:
    """Counts how many of the first tokens in a queue take part, where all do in proportion."""
    return floor_share(end, matched, namespace(end).maximum(end[:, :, -1:], matched))


def _served_in_order(position: Position, demand: Line, member: Rank | None) -> Line:
    """Counts, of the tokens before a position in the queue, those that go to `member`, or to each rank."""
    start = demand.cumsum(1, dtype=np.int32) - demand
    if member is not None:
        start, demand = _take(start, member), _take(demand, member)
    return namespace(demand).clip(position - start, 0, demand)


def _served_by_tree(position: Position, demand: Line, member: Rank | None) -> Line:
    """Counts the same as `_served_in_order`, down a tree whose nodes are blocks of ranks."""
    levels = _levels(demand)
    if member is None:
        return _down_to_all(position, levels)[:, : demand.shape[1]]
    xp = namespace(demand)
    for level, (total, left) in enumerate(levels):
        # The bits of a rank's number are its way down: the node on this level, and whether it is in the right half.
        height = len(levels) - level
        to_left = floor_share(position, _take(left, member >> height), _take(total, member >> height))
        position = xp.where((member >> (height - 1)) & 1, position - to_left, to_left)
    return position


def _down_to_all(position: Position, levels: list[tuple[AnyArray, AnyArray]]) -> AnyArray:
    """Counts what goes to each leaf of the tree."""
    xp = namespace(position)
    num_experts, width = position.shape
    if width > 1:
        position = xp.pad(position, ((0, 0), (0, 2 ** len(levels) - width)))
    position = position[:, None]  # [E, nodes, ranks of each, or 1]
    for total, left in levels:
        half = position.shape[2] // 2
        to_left = floor_share(position, left[:, :, None], total[:, :, None])
        to_right = position - to_left
        if half:
            to_left, to_right = to_left[:, :, :half], to_right[:, :, half:]
        position = xp.stack([to_left, to_right], axis=2).reshape(num_experts, -1, max(half, 1))
    return position[:, :, 0]


def _levels(demand: Line) -> list[tuple[AnyArray, AnyArray]]:
    """Sums up, for every level of the tree, the root first, what each node's ranks serve, and its left half's."""
    # Ranks that do not exist serve nothing: padded to a power of two, the tree is the same for every rank count.
    depth = (demand.shape[1] - 1).bit_length()
    nodes = namespace(demand).pad(demand, ((0, 0), (0, 2**depth - demand.shape[1])))
    levels = []
    for _ in range(depth):
        left, nodes = nodes[:, ::2], nodes[:, ::2] + nodes[:, 1::2]
        levels.append((nodes, left))
    return levels[::-1]


@dataclass(frozen=True)
class _Rule:
    """A rule matches the tokens of a tier with the ranks that serve them.

    Args:
        taken: counts the tokens of the queue that take part, where only some can.
        served: counts which of those before a position go where.
    """

    taken: Callable[[Grid, AnyArray], Grid]
    served: Callable[[Position, Line, Rank | None], Line]


_NEAREST = _Rule(_first, _served_in_order)
_PROPORTIONAL = _Rule(_share, _served_by_tree)


def _take(array: AnyArray, index: Rank) -> AnyArray:
    """Takes one entry along axis 1, which stays."""
    xp = namespace(array)
    # Clipping costs nothing here; without it XLA would fill entries that no rank has with the least integer.
    return xp.take(array, xp.asarray(index, np.int32).reshape(1), axis=1, mode="clip")


def _steps(ends: AnyArray) -> AnyArray:
    """Inverts `cumsum` along the last axis."""
    xp = namespace(ends)
    return xp.diff(ends, axis=-1, prepend=xp.zeros_like(ends[..., :1]))
