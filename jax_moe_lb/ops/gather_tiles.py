"""All-gather and reduce-scatter over one mesh axis, each other's transposes.

XLA's own, except between the processes of two datacenters, say, on CPUs: over an axis of two ranks each would send to
the other at once, which TCP makes slow (`one_way.py`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jax_moe_lb.ops.one_way import from_wire, permute, to_wire, way_round_of

Leaf = Shaped[Array, "L *X"]


def gather_tiles(leaf: Leaf, axis: str) -> Shaped[Array, "M *X"]:
    """The blocks of all ranks of `axis`, one after the other."""
    if jax.process_count() == 1:
        return jax.lax.all_gather(leaf, axis, tiled=True)
    return _between_processes(leaf, axis)


def sum_tiles(tiles: Shaped[Array, "M *X"], axis: str) -> Leaf:
    """Of all ranks' sums of blocks, the block of this rank: the transpose of `gather_tiles`."""
    scatter = partial(jax.lax.psum_scatter, axis_name=axis, tiled=True)
    if jax.process_count() == 1 or not _is_pair(tiles, axis):
        return scatter(tiles)
    return jax.lax.platform_dependent(tiles, cpu=partial(sum_of_pair, axis=axis), default=scatter)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _between_processes(leaf: Leaf, axis: str) -> Array:
    gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
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
    """`gather_tiles`, for an axis of two ranks."""
    other = _swap(leaf, axis)
    return jnp.where(jax.lax.axis_index(axis) == 0, jnp.concatenate([leaf, other]), jnp.concatenate([other, leaf]))


def sum_of_pair(tiles: Array, axis: str) -> Leaf:
    """`sum_tiles`, for an axis of two ranks."""
    first, second = jnp.split(tiles, 2)
    is_first = jax.lax.axis_index(axis) == 0
    mine, theirs = jnp.where(is_first, first, second), jnp.where(is_first, second, first)
    return mine + _swap(theirs, axis)


def _swap(leaf: Leaf, axis: str) -> Leaf:
    """What the other rank holds."""
    arrived = permute(to_wire(leaf), (axis,), [(0, 1), (1, 0)], way_round_of(leaf, (axis,)))
    return from_wire(arrived, leaf.dtype)


def _is_pair(leaf: Array, axis: str) -> bool:
    return jax.lax.axis_size(axis) == 2 and way_round_of(leaf, (axis,)) is not None


def _gather_bits(leaf: Leaf, axis: str) -> Array:
    return from_wire(jax.lax.all_gather(to_wire(leaf), axis, tiled=True), leaf.dtype)
