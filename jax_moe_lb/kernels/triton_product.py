"""Pallas kernel of grouped products, compiled by Triton for GPUs such as A100, H100 and B200.

It reads matrices in parts, such as those of home experts and replicas, and transposed ones, without a copy. Widths need
not be multiples of its tiles.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jax_moe_lb.core.types import GroupSizes, Ref, iota
from jax_moe_lb.kernels.parts import for_part_of
from jax_moe_lb.kernels.triton_outer import TILE, Tile, tile_of

PRODUCT = Tile(TILE, 256, 64, 8, 3)
"""128 KB of sums fit in the registers of 8 warps; three steps take 144 KB of shared memory."""

NEIGHBORS = 8
"""Row tiles that are multiplied with the same columns of matrices one after the other, from the L2 cache."""


def product(
    rows: Float[Array, "A I"],
    *parts: Float[Array, "_ _ _"],
    group_sizes: GroupSizes,
    transposed: bool,
    tile: Tile = PRODUCT,
) -> Float[Array, "A O"]:
    """Compute `grouped_matmul`."""
    # Rows beyond the last group are not read, and their products are not written.
    width = parts[0].shape[1 if transposed else 2]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    tiles_of = (group_sizes + tile.rows - 1) // tile.rows
    last = jnp.cumsum(tiles_of, dtype=jnp.int32)
    # An upper bound: each group has at most one tile that is not full.
    num_tiles = -(-(rows.shape[0] // tile.rows + group_sizes.shape[0]) // NEIGHBORS) * NEIGHBORS
    index = iota(num_tiles)
    group = jnp.minimum((last[None] <= index[:, None]).sum(1, dtype=jnp.int32), group_sizes.shape[0] - 1)
    # A tile after the last one starts beyond the end of the last group and is empty.
    first = ends[group] - group_sizes[group] + (index - last[group] + tiles_of[group]) * tile.rows
    kernel: Any = pl.pallas_call(
        partial(_multiply_tile, tile=tile, transposed=transposed),
        grid=(num_tiles * pl.cdiv(width, tile.columns_of(width)),),
        out_shape=jax.ShapeDtypeStruct(
            (rows.shape[0], width), rows.dtype, manual_axis_type=jax.typeof(rows).manual_axis_type
        ),
        compiler_params=tile.parameters,
        name="grouped_product",
    )
    return kernel(group, first, ends[group], rows, *parts)


def _multiply_tile(
    groups: Ref, firsts: Ref, ends: Ref, rows: Ref, *parts_and_out: Ref, tile: Tile, transposed: bool
) -> None:
    """Multiply the rows of one tile with some columns of the matrix of the group."""
    *parts, out = parts_and_out
    inner, width = rows.shape[1], out.shape[1]
    columns = tile.columns_of(width)
    among, neighbor = jax.lax.div(pl.program_id(0), NEIGHBORS), jax.lax.rem(pl.program_id(0), NEIGHBORS)
    num_columns = pl.cdiv(width, columns)
    index = jax.lax.div(among, num_columns) * NEIGHBORS + neighbor
    column = tile_of(jax.lax.rem(among, num_columns), columns, width)
    group, first, end = groups[index], firsts[index], ends[index]
    these, inside = pl.ds(first, tile.rows), (first + iota(tile.rows) < end)[:, None]

    def multiply(matrices: Ref, at: Array) -> None:
        def add(n: Array, total: Array) -> Array:
            step = pl.ds(n * tile.depth, tile.depth)
            of_right = (at, column, step) if transposed else (at, step, column)
            of_both = (((1,), (1 if transposed else 0,)), ((), ()))
            if inner % tile.depth:
                # Masked columns load as 0.
                deep = n * tile.depth + iota(tile.depth) < inner
                left = triton.load(rows.at[these, step], mask=inside & deep[None], other=0)
                right = triton.load(matrices.at[of_right], mask=deep[None] if transposed else deep[:, None], other=0)
            else:
                left = triton.load(rows.at[these, step], mask=inside, other=0)
                right = triton.load(matrices.at[of_right])
            return total + jax.lax.dot_general(left, right, of_both, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((tile.rows, columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(inner, tile.depth), add, zeros)
        triton.store(out.at[these, column], total.astype(out.dtype), mask=inside)

    pl.when(first < end)(partial(for_part_of, group, tuple(parts), multiply))
