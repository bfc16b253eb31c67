"""Unidirectional permutes, and all-gather and reduce-scatter over one mesh axis.

In a unidirectional permute, no rank sends to the rank that it receives from. Between processes, XLA:CPU uses one TCP
connection per pair of ranks, and the acknowledgement of a receiver waits behind its own data. Two ranks that send to
each other thus get half the bandwidth if they start at different times. Cycles of three or more ranks do not have this
problem.

`gather_tiles` and `sum_tiles` are transposes of each other; `exchange_tiles` sends a block to all ranks. They are XLA's
own collectives, except between two processes on CPUs, where they use unidirectional permutes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jax_moe_lb.core.manual_axes import varying_axes
from jax_moe_lb.core.types import Axes

Permutation = list[tuple[int, int]]
"""Pairs `(from, to)` of a permute; a rank sends at most once and receives at most once."""


def unidirectional_permutes(num_ranks: int, *, swaps: bool = False) -> list[Permutation]:
    """Return permutes in which every rank sends once to every other rank."""
    # Use it for an exchange between processes on CPUs. The ranks are halved recursively. In each step, every rank of
    # one half sends to a rank of the other, so both directions of a link between the halves are busy. Two single ranks
    # send one after the other.
    if num_ranks == 2:
        return [[(0, 1), (1, 0)]] if swaps else [[(0, 1)], [(1, 0)]]
    if num_ranks % 2:
        # An odd number of ranks has no halves, and a shift never pairs two ranks in both directions.
        return [[(i, (i + shift) % num_ranks) for i in range(num_ranks)] for shift in range(1, num_ranks)]
    half = num_ranks // 2
    ways = [
        [(i, half + (i + shift) % half) for i in range(half)]
        + [(half + i, (i + 1 - shift) % half) for i in range(half)]
        for shift in range(half)
    ]
    # Both halves continue independently, in the same permutes.
    inside = unidirectional_permutes(half, swaps=swaps)
    return ways + [way + [(half + source, half + to) for source, to in way] for way in inside]


def permute(
    x: Shaped[Array, "*X"], axes: Axes, pairs: Permutation, way_round: str | None = None
) -> Shaped[Array, "*X"]:
    """Apply `jax.lax.ppermute`, with a detour for pairs of ranks that send to each other."""
    # In such a pair, the lower rank sends to its peer. The peer sends to the lower rank of the next group, which
    # forwards the data. These are cycles over the groups along `way_round`, and one more hop between the lower ranks.
    if way_round is None or pairs[0][::-1] not in pairs:
        return jax.lax.ppermute(x, axes, pairs)
    groups, lower = jax.lax.axis_size(way_round), sorted(a for a, b in pairs if a < b)
    # A permute over both the group and `way_round` numbers ranks as `rank * groups + group`.
    place = {(a, i): a * groups + i for pair in pairs for a in pair for i in range(groups)}
    up = [(place[a, i], place[b, i]) for a, b in pairs if a < b for i in range(groups)]
    down = [(place[b, i], place[a, (i + 1) % groups]) for b, a in pairs if a < b for i in range(groups)]
    passed_on = [(place[a, (i + 1) % groups], place[a, i]) for a in lower for i in range(groups)]
    arrived = jax.lax.ppermute(x, (*axes, way_round), up + down)
    hopped = jax.lax.ppermute(arrived, (*axes, way_round), passed_on)
    # Data of a higher rank takes one more hop; data of a lower rank has already arrived.
    return jnp.where(is_one_of(lower, axes), hopped, arrived)


def ring_direction(x: Shaped[Array, "*X"], axes: Axes) -> str | None:
    """Return a mesh axis inside `axes` over which `x` varies; `None` if there is none."""
    # Its hops are short, because mesh axes are ordered with the slowest links outermost.
    mesh = jax.sharding.get_abstract_mesh()
    split = [name for name in axes if jax.lax.axis_size(name) > 1]
    # Without `check_vma`, the varying axes are unknown: use all manual axes.
    may = varying_axes(x) or mesh.manual_axes
    # Only axes inside the innermost axis of the group: the detour over an outer axis would be longer.
    last = max((mesh.axis_names.index(name) for name in split), default=len(mesh.axis_names))
    inside = [name for name in mesh.axis_names[last + 1 :] if name in may and name in mesh.manual_axes]
    return next((name for name in inside if jax.lax.axis_size(name) > 1), None)


def is_one_of(ranks: list[int], axes: Axes) -> Bool[Array, ""]:
    """Return whether the index of this rank in the group is in `ranks`."""
    table = jnp.zeros((jax.lax.axis_size(axes),), bool).at[jnp.asarray(ranks, jnp.int32)].set(True)
    return table[jax.lax.axis_index(axes)]


def other_manual_axes(axes: Axes) -> Axes:
    """Return the mesh axes of the enclosing `shard_map` that are not in `axes`: they distinguish groups."""
    return tuple(name for name in jax.sharding.get_abstract_mesh().manual_axes if name not in axes)


def near_neighbours(axes: Axes) -> Axes:
    """Return the axes of a sum over ranks in an order with few long hops."""
    # Between processes the sum passes the ranks in turn, so the axes get the order of the mesh. In one process the
    # order is unchanged.
    if jax.process_count() == 1:
        return axes
    return tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)


def agreed(number: Int[Array, "*X"], axes: Axes) -> Int[Array, "*X"]:
    """Return the number of iterations of a loop with exchanges over `axes`."""
    # Use it for every such loop. Between processes on CPUs it is the maximum over all groups. There the exchange
    # consists of permutes, which are operations of all devices of the mesh: with fewer iterations in one group, the
    # others would wait forever. In other cases it is `number`.
    others = other_manual_axes(axes)
    if jax.process_count() == 1 or jax.lax.axis_size(others) == 1:
        return number
    varying = tuple(name for name in others if name in varying_axes(number))

    def largest_of_groups(number: Array) -> Array:
        number = largest(number, others)
        # The maximum varies over fewer axes than `number`, and both branches of `platform_dependent` must have one
        # type.
        return jax.lax.pcast(number, varying, to="varying") if varying else number

    return jax.lax.platform_dependent(number, cpu=largest_of_groups, default=lambda number: number)


def largest(number: Int[Array, "*X"], axes: Axes) -> Int[Array, "*X"]:
    """Return the maximum over the ranks of `axes`."""
    # JAX cannot reduce over varying and unvarying axes at once. Without `check_vma`, the varying axes are unknown.
    varying = varying_axes(number)
    axes = tuple(name for name in axes if name in varying) if varying else axes
    return jax.lax.pmax(number, axes) if axes else number


def to_wire(x: Shaped[Array, "*X"]) -> Shaped[Array, "*X"]:
    """Bitcast floats of at most 16 bits to integers of the same width: XLA:CPU sends narrow floats as wider ones."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_wire(x: Shaped[Array, "*X"], dtype: jnp.dtype) -> Shaped[Array, "*X"]:
    """Bitcast the result of `to_wire` back to floats of the given dtype."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


Leaf = Shaped[Array, "L *X"]


def gather_tiles(leaf: Leaf, axis: str) -> Shaped[Array, "M *X"]:
    """Concatenate the blocks of all ranks of an axis."""
    # Use it for weights or tokens over a slow axis; in one process it is `jax.lax.all_gather(..., tiled=True)`.
    if jax.process_count() == 1:
        return jax.lax.all_gather(leaf, axis, tiled=True)
    return _between_processes(leaf, axis)


def sum_tiles(tiles: Shaped[Array, "M *X"], axis: str) -> Leaf:
    """Sum the blocks of all ranks of an axis, and return this rank's block; the transpose of `gather_tiles`."""
    # In the dtype of the tiles, as the transpose of a gather: wider sums would also travel as wider floats.
    scatter = partial(jax.lax.psum_scatter, axis_name=axis, tiled=True)
    if jax.process_count() == 1 or not _is_pair(tiles, axis):
        return scatter(tiles)
    return jax.lax.platform_dependent(tiles, cpu=partial(sum_of_pair, axis=axis), default=scatter)


def exchange_tiles(tiles: Shaped[Array, "M *X"], axis: str) -> Shaped[Array, "M *X"]:
    """Send a block to every rank of an axis, and return the received blocks in the order of the ranks."""
    exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    if jax.process_count() == 1 or not _is_pair(tiles, axis):
        return exchange(tiles)
    return jax.lax.platform_dependent(tiles, cpu=partial(exchange_of_pair, axis=axis), default=exchange)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _between_processes(leaf: Leaf, axis: str) -> Array:
    gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
    # Without a ring direction, the two ranks would send to each other anyway.
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
    """Compute `gather_tiles` for an axis of two ranks, by permutes without mutual sends."""
    other = _swap(leaf, axis)
    # Both ranks run one program with both orders, and select their own.
    return jnp.where(jax.lax.axis_index(axis) == 0, jnp.concatenate([leaf, other]), jnp.concatenate([other, leaf]))


def sum_of_pair(tiles: Array, axis: str) -> Leaf:
    """Compute `sum_tiles` for an axis of two ranks, by permutes without mutual sends."""
    first, second = jnp.split(tiles, 2)
    is_first = jax.lax.axis_index(axis) == 0
    mine, theirs = jnp.where(is_first, first, second), jnp.where(is_first, second, first)
    return mine + _swap(theirs, axis)


def exchange_of_pair(tiles: Array, axis: str) -> Array:
    """Compute `exchange_tiles` for an axis of two ranks, by permutes without mutual sends."""
    first, second = jnp.split(tiles, 2)
    is_first = jax.lax.axis_index(axis) == 0
    arrived = _swap(jnp.where(is_first, second, first), axis)
    return jnp.where(is_first, jnp.concatenate([first, arrived]), jnp.concatenate([arrived, second]))


def _swap(leaf: Leaf, axis: str) -> Leaf:
    """Return the data of the other rank."""
    # As integers: XLA:CPU sends narrow floats as wider ones.
    arrived = permute(to_wire(leaf), (axis,), [(0, 1), (1, 0)], ring_direction(leaf, (axis,)))
    return from_wire(arrived, leaf.dtype)


def _is_pair(leaf: Array, axis: str) -> bool:
    return jax.lax.axis_size(axis) == 2 and ring_direction(leaf, (axis,)) is not None


def _gather_bits(leaf: Leaf, axis: str) -> Array:
    return from_wire(jax.lax.all_gather(to_wire(leaf), axis, tiled=True), leaf.dtype)
