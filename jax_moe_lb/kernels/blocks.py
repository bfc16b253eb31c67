"""Grouped products as dense products of blocks of rows, on every platform.

The number of blocks is static, with at most one partly filled block per group. So there are at most a quarter more
operations than for the rows alone, and no loop length depends on the group sizes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import Carry, GroupSizes, iota, wide_dtype

MAX_BLOCK_ROWS = 512
"""Largest number of rows of a block; larger blocks gain little on any device."""


class RowBlock(NamedTuple):
    """Rows of one block, all of one group."""

    group: Int[Array, ""]  # group of the block
    start: Int[Array, ""]  # first row of the window to read
    inside: Bool[Array, "B"]  # `[B]` mask of the rows of the window that belong to the block


def matmul_by_blocks(
    rows: Float[Array, "A I"], weights: Float[Array, "S _ _"], group_sizes: GroupSizes, *, transposed: bool
) -> Float[Array, "A O"]:
    """Compute `grouped_matmul` block by block."""
    width = weights.shape[1 if transposed else 2]
    if weights.shape[0] == 1:
        return _product(rows, weights[0], transposed)

    def step(block: RowBlock, out: Array) -> Array:
        product = _product(_window(rows, block), weights[block.group], transposed)
        # Rows of other blocks in the window keep their values.
        mixed = jnp.where(block.inside[:, None], product, _window(out, block))
        return jax.lax.dynamic_update_slice_in_dim(out, mixed, block.start, 0)

    out = jnp.zeros((rows.shape[0], width), rows.dtype)
    return each_block(step, vary_like(out, rows, weights), rows.shape[0], group_sizes)


def outer_by_blocks(
    rows: Float[Array, "A I"], others: Float[Array, "A O"], group_sizes: GroupSizes
) -> Float[Array, "S I O"]:
    """Compute `grouped_outer` block by block."""
    if group_sizes.shape[0] == 1:
        inside = (iota(rows.shape[0]) < group_sizes)[:, None]
        mine, theirs = (jnp.where(inside, array, 0) for array in (rows, others))
        return jnp.matmul(mine.T, theirs, preferred_element_type=wide_dtype(rows))[None]

    def step(block: RowBlock, sums: Array) -> Array:
        # Mask both factors: 0 times the NaN of an uninitialized row is NaN.
        mine, theirs = (jnp.where(block.inside[:, None], _window(array, block), 0) for array in (rows, others))
        return sums.at[block.group].add(jnp.matmul(mine.T, theirs, preferred_element_type=sums.dtype))

    sums = jnp.zeros((group_sizes.shape[0], rows.shape[1], others.shape[1]), wide_dtype(rows))
    return each_block(step, vary_like(sums, rows, others), rows.shape[0], group_sizes)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Return the number of rows of a block: partly filled blocks then have at most a quarter of all rows."""
    return max(1, min(MAX_BLOCK_ROWS, num_rows // (4 * num_groups)))


def each_block(
    step: Callable[[RowBlock, Carry], Carry], carry: Carry, num_rows: int, group_sizes: Int[Array, "S"]
) -> Carry:
    """Run a step for each block, some of them empty; each row of a group is in exactly one block."""
    num_groups = group_sizes.shape[0]
    if num_rows == 0 or num_groups == 0:
        return vary_like(carry, group_sizes)
    size = block_rows(num_rows, num_groups)
    # Each group has its full blocks, and at most one partly filled.
    num_blocks = num_rows // size + num_groups
    ends, blocks_of = group_sizes.cumsum(dtype=jnp.int32), (group_sizes + size - 1) // size
    last_block = blocks_of.cumsum(dtype=jnp.int32)

    def one(carry: Carry, i: Array) -> tuple[Carry, None]:
        # Blocks after the last one belong to the last group, after its rows, and are empty.
        group = jnp.minimum((last_block <= i).sum(dtype=jnp.int32), num_groups - 1)
        first = ends[group] - group_sizes[group] + (i - last_block[group] + blocks_of[group]) * size
        # Move the last window back to stay inside the array; it then overlaps the previous block.
        start = jnp.clip(first, 0, num_rows - size)
        row = start + iota(size)
        inside = (row >= first) & (row < jnp.minimum(first + size, ends[group]))
        return step(RowBlock(group, start, inside), carry), None

    return jax.lax.scan(one, vary_like(carry, group_sizes), vary_like(iota(num_blocks), group_sizes))[0]


def _product(rows: Array, matrix: Array, transposed: bool) -> Array:
    product = jnp.matmul(rows, matrix.T if transposed else matrix, preferred_element_type=wide_dtype(rows))
    return product.astype(rows.dtype)


def _window(array: Array, block: RowBlock) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, block.start, block.inside.shape[0], 0)
