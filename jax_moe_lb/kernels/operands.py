"""Preparation of the operands of grouped products: zeros beyond the last group, and the layout of weights."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import GroupSizes, Rows, iota

TILE_ROWS = 128
"""Kernels on GPUs read beyond the last group up to a multiple of this number of rows."""

CLEARED_ROWS = 1024
"""Rows per step of the loop that clears all rows beyond the last group on TPUs."""


def clear_tail(rows: Rows, group_sizes: GroupSizes, *, are_results: bool = False) -> Rows:
    """Returns the rows with zeros where `grouped_outer` reads beyond the last group.

    Kernels mask what they read there by multiplying with 0, which leaves the NaN of a row that nobody wrote.

    Args:
        rows: `[A, ...]`, sorted by group; give up what is passed here, so that it is changed in place.
        group_sizes: `[S]` int32.
        are_results: whether they are computed element by element right before, so that a mask is a part of that.
    """
    on_tpu = _clear_all if are_results else _clear_rest
    return jax.lax.platform_dependent(
        *vary_alike((rows, group_sizes)),
        cuda=_clear_tile,
        tpu=on_tpu,
        default=lambda rows, group_sizes: rows,
    )


def usual_layout(weights: Float[Array, "S ..."]) -> Float[Array, "S ..."]:
    """Holds a GPU's compiler to the usual layout of weights before it turns them around for a product.

    Free to choose, it gives them the layout of the transposed product and carries that out of all loops around: a scan
    over layers then turned the weights of all of them around, and every layer its own back.

    Args:
        weights: `[S, ...]`, the weights of groups, or a bias.
    """

    def pinned(weights: Array) -> Array:
        return with_layout_constraint(weights, Layout(tuple(range(weights.ndim))))

    return jax.lax.platform_dependent(weights, cuda=pinned, default=lambda weights: weights)


def _clear_tile(rows: Rows, group_sizes: GroupSizes) -> Rows:
    # One tile, whatever the number of rows: a mask over all of them would read and write them once more.
    rows = with_layout_constraint(rows, Layout((0, 1)))
    size = min(TILE_ROWS, rows.shape[0])
    used = group_sizes.sum(dtype=jnp.int32)
    start = jnp.minimum(used, rows.shape[0] - size)
    tile = jax.lax.dynamic_slice_in_dim(rows, start, size, 0)
    tile = jnp.where((start + iota(size) < used)[:, None], tile, 0)
    return with_layout_constraint(jax.lax.dynamic_update_slice_in_dim(rows, tile, start, 0), Layout((0, 1)))


def _clear_all(rows: Rows, group_sizes: GroupSizes) -> Rows:
    return jnp.where((iota(rows.shape[0]) < group_sizes.sum(dtype=jnp.int32))[:, None], rows, 0)


def _clear_rest(rows: Rows, group_sizes: GroupSizes) -> Rows:
    # All rows beyond the last group, but block by block from there on: a mask over all rows would read and write those
    # once more that are served.
    if not rows.size:
        return rows
    used = group_sizes.sum(dtype=jnp.int32)
    size = min(CLEARED_ROWS, rows.shape[0])

    def clear_block(i: Array, rows: Array) -> Array:
        # The last block begins earlier where rows are no multiple of blocks.
        start = jnp.minimum(i * size, rows.shape[0] - size)
        block = jax.lax.dynamic_slice_in_dim(rows, start, size, 0)
        block = jnp.where((start + iota(size) < used)[:, None], block, 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, block, start, 0)

    return jax.lax.fori_loop(used // size, -(-rows.shape[0] // size), clear_block, rows)
