"""All-gather and reduce-scatter over one mesh axis, which are each other's transposes.

They are XLA's own, except between processes on CPUs, such as those of two datacenters: over an axis of two ranks each
would send to the other at once, which TCP makes slow (`one_way.py`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jax_moe_lb.ops.one_way import from_wire, permute, to_wire, way_round_of

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
    arrived = permute(to_wire(leaf), (axis,), [(0, 1), (1, 0)], way_round_of(leaf, (axis,)))
    return from_wire(arrived, leaf.dtype)


def _is_pair(leaf: Array, axis: str) -> bool:
    return jax.lax.axis_size(axis) == 2 and way_round_of(leaf, (axis,)) is not None


def _gather_bits(leaf: Leaf, axis: str) -> Array:
    return from_wire(jax.lax.all_gather(to_wire(leaf), axis, tiled=True), leaf.dtype)
