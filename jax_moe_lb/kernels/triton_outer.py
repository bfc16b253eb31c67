"""Pallas kernel of weight gradients, compiled by Triton for GPUs such as A100, H100 and B200.

It takes rows without a transposed copy, widths that are no multiples of its tiles, and writes sums in parts, such as
those of home experts and replicas.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jax_moe_lb.core.types import DType, Ref, iota
from jax_moe_lb.kernels.operands import RowGroups
from jax_moe_lb.kernels.parts import for_part_of

TILE = 128
"""Least width of operands and results."""


class Tile(NamedTuple):
    """Work of one program of a Triton kernel."""

    rows: int  # rows of the result tile
    columns: int  # columns of the result tile; `TILE` for results with fewer
    depth: int  # length of the sum in one step of the pipeline
    warps: int  # number of warps
    stages: int  # steps of the pipeline in shared memory at a time

    def columns_of(self, width: int) -> int:
        """Return the columns of the result tile for a width."""
        return self.columns if width >= self.columns else TILE

    @property
    def parameters(self) -> triton.CompilerParams:
        """Options of the compiler."""
        return triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


OUTER = Tile(TILE, 256, 32, 8, 5)
"""128 KB of sums fit in the registers of 8 warps; five steps take 120 KB of shared memory."""


def tile_of(index: Array, size: int, width: int) -> Any:
    """Return the slice of a tile of a width."""
    # If the tiles do not divide the width, the last one starts earlier: both programs of the columns of an overlap
    # write the same values, and no load needs a mask.
    last = pl.cdiv(width, size) - 1
    overlap = (last + 1) * size - width
    # Not a minimum, of which Triton would not know the alignment.
    return pl.ds(index * size - ((index == last).astype(jnp.int32) * overlap if overlap else 0), size)


def outer(
    rows: Float[Array, "A I"],
    others: Float[Array, "A O"],
    groups: RowGroups,
    *,
    parts: tuple[int, ...],
    dtype: DType,
    tile: Tile = OUTER,
) -> tuple[Float[Array, "_ I O"], ...]:
    """Compute `grouped_outer`; rows beyond the last group are never read."""
    inner, width = rows.shape[1], others.shape[1]
    ends = jnp.cumsum(groups.sizes, dtype=jnp.int32)
    varies = jax.typeof(rows).manual_axis_type
    kernel: Any = pl.pallas_call(
        partial(_sum_of_tile, tile=tile),
        # Neighboring programs read the same rows of one group.
        grid=(pl.cdiv(inner, tile.rows), pl.cdiv(width, tile.columns_of(width)), ends.shape[0]),
        out_shape=tuple(jax.ShapeDtypeStruct((n, inner, width), dtype, manual_axis_type=varies) for n in parts),
        compiler_params=tile.parameters,
        name="grouped_outer",
    )
    return kernel(ends - groups.sizes, ends, groups.has_sums.astype(jnp.int32), rows, others)


def _sum_of_tile(starts: Ref, ends: Ref, has_result: Ref, rows: Ref, others: Ref, *outs: Ref, tile: Tile) -> None:
    """Sum `rows.T @ others` over the rows of one group, for a tile of the result."""
    i, j, group = (pl.program_id(axis) for axis in range(3))
    start, end = starts[group], ends[group]
    columns = tile.columns_of(others.shape[1])
    of_rows, of_others = tile_of(i, tile.rows, rows.shape[1]), tile_of(j, columns, others.shape[1])

    def add_rows(n: Array, total: Array) -> Array:
        first = start + n * tile.depth
        # Masked rows load as 0: rows of the next group, or uninitialized rows, which may be NaN.
        inside = (first + iota(tile.depth) < end)[:, None]
        left = triton.load(rows.at[pl.ds(first, tile.depth), of_rows], mask=inside, other=0)
        right = triton.load(others.at[pl.ds(first, tile.depth), of_others], mask=inside, other=0)
        over_rows = (((0,), (0,)), ((), ()))
        return total + jax.lax.dot_general(left, right, over_rows, preferred_element_type=jnp.float32)

    zeros = jnp.zeros((tile.rows, columns), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - start, tile.depth), add_rows, zeros)

    def write(out: Ref, at: Array) -> None:
        triton.store(out.at[at, of_rows, of_others], total.astype(out.dtype))

    pl.when(has_result[group] > 0)(lambda: for_part_of(group, outs, write))
