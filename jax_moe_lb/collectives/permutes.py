"""Unidirectional permutes, and all-gather and reduce-scatter over one mesh axis.

In a unidirectional permute no rank sends to the rank that it receives from. Between processes XLA:CPU uses one TCP
connection per pair of ranks, on which the acknowledgement of a receiver waits behind its own data. Two ranks that send
to each other at once therefore get half the bandwidth if they start at different times. Cycles of three or more ranks
do not have this problem.

`gather_tiles` and `sum_tiles` are each other's transposes. They are XLA's own collectives, except between two processes
on CPUs, where they use unidirectional permutes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jax_moe_lb.core.manual_axes import varying_axes
from jax_moe_lb.core.types import Axes

Permutation = list[tuple[int, int]]
"""A permute: pairs `(from, to)`, in which each rank sends at most once and receives at most once."""


def unidirectional_permutes(num_ranks: int, *, swaps: bool = False) -> list[Permutation]:
    """Lists permutes by which every rank sends once to every other one.

    Use it for an exchange between processes on CPUs. The ranks are halved again and again, and each time every rank of
    one half sends to a rank of the other, so that where a link is shared between the halves both directions are busy.
    Two ranks alone send one after the other.

    Args:
        num_ranks: how many ranks a group has, at least 1.
        swaps: whether two ranks alone may send to each other in one permute, since `permute` will find a way round.

    Examples:
        >>> unidirectional_permutes(3)
        [[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
        >>> unidirectional_permutes(4)[:2]
        [[(0, 2), (1, 3), (2, 1), (3, 0)], [(0, 3), (1, 2), (2, 0), (3, 1)]]
    """
    if num_ranks == 2:
        return [[(0, 1), (1, 0)]] if swaps else [[(0, 1)], [(1, 0)]]
    if num_ranks % 2:
        # An odd number has no halves, and its shifts never pair two ranks both ways.
        return [[(i, (i + shift) % num_ranks) for i in range(num_ranks)] for shift in range(1, num_ranks)]
    half = num_ranks // 2
    ways = [
        [(i, half + (i + shift) % half) for i in range(half)]
        + [(half + i, (i + 1 - shift) % half) for i in range(half)]
        for shift in range(half)
    ]
    # Both halves go on by themselves, in the same permutes.
    inside = unidirectional_permutes(half, swaps=swaps)
    return ways + [way + [(half + source, half + to) for source, to in way] for way in inside]


def permute(
    x: Shaped[Array, "*X"], axes: Axes, pairs: Permutation, way_round: str | None = None
) -> Shaped[Array, "*X"]:
    """Does what `jax.lax.ppermute` does, where ranks may also send to each other if there is a way round.

    Then the group's lower rank sends to its peer, but the peer to the next group's lower rank, which passes it on:
    cycles over the groups along `way_round`, and one more hop inside their lower halves.

    Args:
        x: what this rank sends.
        axes: the mesh axes of the group.
        pairs: every pair together with its reverse, or none with it.
        way_round: what `ring_direction(x, axes)` returned; not needed for pairs without their reverse.
    """
    if way_round is None or pairs[0][::-1] not in pairs:
        return jax.lax.ppermute(x, axes, pairs)
    groups, lower = jax.lax.axis_size(way_round), sorted(a for a, b in pairs if a < b)
    # A permute over the group and the way round at once counts ranks as `rank * groups + group`.
    place = {(a, i): a * groups + i for pair in pairs for a in pair for i in range(groups)}
    up = [(place[a, i], place[b, i]) for a, b in pairs if a < b for i in range(groups)]
    down = [(place[b, i], place[a, (i + 1) % groups]) for b, a in pairs if a < b for i in range(groups)]
    passed_on = [(place[a, (i + 1) % groups], place[a, i]) for a in lower for i in range(groups)]
    arrived = jax.lax.ppermute(x, (*axes, way_round), up + down)
    hopped = jax.lax.ppermute(arrived, (*axes, way_round), passed_on)
    # What a higher rank sent came by one hop more; what a lower one sent has arrived already.
    return jnp.where(is_one_of(lower, axes), hopped, arrived)


def ring_direction(x: Shaped[Array, "*X"], axes: Axes) -> str | None:
    """Finds a mesh axis inside `axes`, over which `x` differs anyway; `None` where there is none.

    Hops along it are the short ones, since mesh axes are taken to be in order, the slowest links outermost.
    """
    mesh = jax.sharding.get_abstract_mesh()
    split = [name for name in axes if jax.lax.axis_size(name) > 1]
    # Without `check_vma` nothing is known to vary.
    may = varying_axes(x) or mesh.manual_axes
    # Only an axis inside the innermost of the group: one outside would make the way round the longer one.
    last = max((mesh.axis_names.index(name) for name in split), default=len(mesh.axis_names))
    inside = [name for name in mesh.axis_names[last + 1 :] if name in may and name in mesh.manual_axes]
    return next((name for name in inside if jax.lax.axis_size(name) > 1), None)


def is_one_of(ranks: list[int], axes: Axes) -> Bool[Array, ""]:
    """Says whether this rank is among the given ones of its group."""
    table = jnp.zeros((jax.lax.axis_size(axes),), bool).at[jnp.asarray(ranks, jnp.int32)].set(True)
    return table[jax.lax.axis_index(axes)]


def other_manual_axes(axes: Axes) -> Axes:
    """Returns the mesh axes of the surrounding `shard_map` that tell groups apart."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().manual_axes if name not in axes)


def near_neighbours(axes: Axes) -> Axes:
    """Orders the axes of a sum over ranks so that few of its hops are long ones.

    Between processes a sum passes the ranks one after the other, so the axes are put in the order of the mesh. In one
    process they stay in the order in which they were given.
    """
    if jax.process_count() == 1:
        return axes
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)


def agreed(number: Int[Array, "*X"], axes: Axes) -> Int[Array, "*X"]:
    """Tells how often a loop runs whose body exchanges over `axes`.

    Use it for the length of every such loop. Between processes on CPUs it is the largest number over the groups side by
    side, for the exchange is made of permutes there: a permute is one operation of all devices of a mesh, and a group
    that ran fewer would keep the others waiting for ever. Elsewhere it is `number`.

    Args:
        number: int32, how often this group has to.
        axes: the mesh axes of the group.
    """
    others = other_manual_axes(axes)
    if jax.process_count() == 1 or jax.lax.axis_size(others) == 1:
        return number
    varying = tuple(name for name in others if name in varying_axes(number))

    def largest_of_groups(number: Array) -> Array:
        number = largest(number, others)
        # The largest number varies over fewer axes than `number`. Both branches of `platform_dependent` must have one
        # type.
        return jax.lax.pcast(number, varying, to="varying") if varying else number

    return jax.lax.platform_dependent(number, cpu=largest_of_groups, default=lambda number: number)


def largest(number: Int[Array, "*X"], axes: Axes) -> Int[Array, "*X"]:
    """Computes the largest number on the ranks of `axes`.

    Args:
        number: int32.
        axes: mesh axes. Over some of them, such as those of ranks that have the same tokens, `number` may not vary.
    """
    # JAX refuses to reduce over axes of both kinds at once. Without `check_vma` nothing is known to vary.
    varying = varying_axes(number)
    axes = tuple(name for name in axes if name in varying) if varying else axes
    return jax.lax.pmax(number, axes) if axes else number


def to_wire(x: Shaped[Array, "*X"]) -> Shaped[Array, "*X"]:
    """Turns floats of 16 bits or less into integers of the same width: XLA:CPU sends a narrow float as a wider one."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_wire(x: Shaped[Array, "*X"], dtype: jnp.dtype) -> Shaped[Array, "*X"]:
    """Turns what `to_wire` returned back into floats of the given dtype."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


Leaf = Shaped[Array, "L *X"]


def gather_tiles(leaf: Leaf, axis: str) -> Shaped[Array, "M *X"]:
    """Gathers the blocks of all ranks of an axis, one after the other.

    Use it for weights or tokens over a slow axis; in one process it is `jax.lax.all_gather(..., tiled=True)`.

    Args:
        leaf: this rank's block, `[L, ...]`.
        axis: the name of one mesh axis.
    """
    if jax.process_count() == 1:
        return jax.lax.all_gather(leaf, axis, tiled=True)
    return _between_processes(leaf, axis)


def sum_tiles(tiles: Shaped[Array, "M *X"], axis: str) -> Leaf:
    """Sums the blocks of all ranks of an axis, and returns this rank's block of the sum: the transpose of
    `gather_tiles`.

    Args:
        tiles: one block for each rank of the axis, one after the other.
        axis: the name of one mesh axis.
    """
    # In the dtype of the tiles, as the transpose of a gather: wider sums would travel as wider floats.
    scatter = partial(jax.lax.psum_scatter, axis_name=axis, tiled=True)
    if jax.process_count() == 1 or not _is_pair(tiles, axis):
        return scatter(tiles)
    return jax.lax.platform_dependent(tiles, cpu=partial(sum_of_pair, axis=axis), default=scatter)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _between_processes(leaf: Leaf, axis: str) -> Array:
    gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
    # Without a way round the two ranks would send to each other all the same.
    on_cpu = gather_of_pair if _is_pair(leaf, axis) else _gather_bits
    return jax.lax.platform_dependent(leaf, cpu=partial(on_cpu, axis=axis), default=gather)


def _save(leaf: Leaf, axis: str) -> tuple[Array, None]:
    return _between_processes(leaf, axis), None


def _backward(axis: str, residuals: None, upstream: Array) -> tuple[Array]:
    del residuals
    return (sum_tiles(upstream, axis),)


_between_processes.defvjp(_save, _backward)


# ---- two ranks, with a way round ---------------------------------------------------
def gather_of_pair(leaf: Leaf, axis: str) -> Array:
    """Computes `gather_tiles` for an axis of two ranks, by permutes in which neither sends to the other."""
    other = _swap(leaf, axis)
    # Both ranks run one program, so both orders are in it; each selects its own.
    return jnp.where(jax.lax.axis_index(axis) == 0, jnp.concatenate([leaf, other]), jnp.concatenate([other, leaf]))


def sum_of_pair(tiles: Array, axis: str) -> Leaf:
    """Computes `sum_tiles` for an axis of two ranks, by permutes in which neither sends to the other."""
    first, second = jnp.split(tiles, 2)
    is_first = jax.lax.axis_index(axis) == 0
    mine, theirs = jnp.where(is_first, first, second), jnp.where(is_first, second, first)
    return mine + _swap(theirs, axis)


def _swap(leaf: Leaf, axis: str) -> Leaf:
    """What the other rank holds."""
    # As integers: XLA:CPU sends a narrow float as a wider one.
    arrived = permute(to_wire(leaf), (axis,), [(0, 1), (1, 0)], ring_direction(leaf, (axis,)))
    return from_wire(arrived, leaf.dtype)


def _is_pair(leaf: Array, axis: str) -> bool:
    return jax.lax.axis_size(axis) == 2 and ring_direction(leaf, (axis,)) is not None


def _gather_bits(leaf: Leaf, axis: str) -> Array:
    return from_wire(jax.lax.all_gather(to_wire(leaf), axis, tiled=True), leaf.dtype)
