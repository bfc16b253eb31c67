"""Blocks of rows stand one after the other: where they start, and which row comes from where."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.types import iota


def concatenated(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Puts blocks of rows one after the other: returns the row that each row comes from.

    Rows beyond the blocks get their own number, so that the result is a permutation where the blocks together are the
    first rows.

    Args:
        first: int32, the row at which each block starts.
        size: int32, the rows of each block; `num_rows` or fewer in all.
        num_rows: how many rows are asked for.
    """
    first, size = first.reshape(-1), size.reshape(-1)
    row = iota(num_rows)
    # `total_repeat_length` keeps the shape static. It also repeats the last block to the end, which is masked below.
    block = jnp.repeat(iota(size.shape[0]), size, total_repeat_length=num_rows)
    return jnp.where(row < size.sum(dtype=jnp.int32), row + (first - starts(size))[block], row)


def starts(sizes: Int[Array, "N"]) -> Int[Array, "N"]:
    """Returns where blocks of these sizes start, one after the other."""
    return sizes.cumsum(dtype=jnp.int32) - sizes
