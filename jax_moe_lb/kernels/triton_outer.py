"""Pallas kernel of weight gradients, compiled by Triton for GPUs such as A100, H100 and B200.

Tiles, warps and stages are those recorded as fastest for most shapes of tokamax's Triton kernel on an H100; see
`recorded_rates`. Unlike tokamax's Mosaic kernel, it takes rows without a transposed copy.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jax_moe_lb.core.types import DType, GroupSizes, iota

TILE = 128
"""Multiple of all widths."""


class Tile(NamedTuple):
    """Work of one program of a Triton kernel.

    Args:
        rows: rows of the result tile.
        columns: columns of the result tile, or `TILE` if it does not divide the width.
        depth: length of the sum in one step of the pipeline.
        warps: number of warps.
        stages: steps of the pipeline in shared memory at a time.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def columns_of(self, width: int) -> int:
        """Return the columns of the result tile for a width."""
        return TILE if width % self.columns else self.columns


OUTER = Tile(TILE, 256, 32, 8, 5)
"""128 KB of sums fit in the registers of 8 warps; five steps take 120 KB of shared memory."""


def outer(
    rows: Float[Array, "A I"],
    others: Float[Array, "A O"],
    group_sizes: GroupSizes,
    *,
    dtype: DType,
    tile: Tile = OUTER,
) -> Float[Array, "S I O"]:
    """Compute `grouped_outer`; rows beyond the last group are never read.

    Args:
        rows: `[A, I]`; `choose_backend` checks its shape and dtype.
        others: `[A, O]`, in the same order and dtype.
        group_sizes: `[S]` int32.
        dtype: dtype of the result; the accumulators are float32.
        tile: work of one program; `OUTER` by default.
    """
    shape = group_sizes.size, rows.shape[1], others.shape[1]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    columns = tile.columns_of(shape[2])
    varies = jax.typeof(rows).manual_axis_type
    kernel: Any = pl.pallas_call(
        partial(_sum_of_tile, depth=tile.depth),
        # Neighboring programs read the same rows of one group.
        grid=(shape[1] // tile.rows, shape[2] // columns, shape[0]),
        out_specs=pl.BlockSpec((None, tile.rows, columns), lambda i, j, group: (group, i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varies),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        name="grouped_outer",
    )
    return kernel(ends - group_sizes, ends, rows, others)


def _sum_of_tile(starts: Any, ends: Any, rows: Any, others: Any, out: Any, *, depth: int) -> None:
    """Sum `rows.T @ others` over the rows of one group, for a tile of the result."""
    i, j, group = (pl.program_id(axis) for axis in range(3))
    start, end = starts[group], ends[group]

    def add_rows(n: Array, total: Array) -> Array:
        first = start + n * depth
        # Masked rows load as 0: rows of the next group, or uninitialized rows, which may be NaN.
        inside = (first + iota(depth) < end)[:, None]

        def part(array: Any, tile: Array, width: int) -> Array:
            at = array.at[pl.ds(first, depth), pl.ds(tile * width, width)]
            return triton.load(at, mask=inside, other=0)

        left, right = part(rows, i, out.shape[0]), part(others, j, out.shape[1])
        over_rows = (((0,), (0,)), ((), ()))
        return total + jax.lax.dot_general(left, right, over_rows, preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, pl.cdiv(end - start, depth), add_rows, jnp.zeros(out.shape, jnp.float32))
    out[:, :] = total.astype(out.dtype)
