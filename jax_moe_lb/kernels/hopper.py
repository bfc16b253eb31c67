"""Pallas kernels of grouped products for NVIDIA Hopper, compiled by Mosaic.

They read matrices in several arrays, such as home experts and replicas, and operands without a transposed copy. Their
Triton counterparts are faster on an H100 and come first; these serve operands of 2**31 entries or more.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.types import DType, GroupSizes, iota

TILE = 128
"""Rows and columns of a thread block; its 64 KB of accumulators are in the registers of a warpgroup."""

DEPTH = 64
"""Depth of a pipeline step: rows of 128 bytes, the widest swizzle of shared memory."""

STAGES = 3
"""Pipeline stages. At 32 KB each, two blocks fit a multiprocessor, and one multiplies while the other writes."""

ALIGNED_ROWS = 8
"""Row alignment of tiles in shared memory."""


AXES = ("of_inner", "of_outer", "of_groups")
"""Dimensions of a grid; their names must differ from those of mesh axes."""

_PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class RowTiles(NamedTuple):
    """Rows of each tile of a product, all of one group; some tiles are empty.

    Args:
        group: `[N]` int32, group of the tile.
        first: `[N]` int32, first row to read, a multiple of `ALIGNED_ROWS`.
        skipped: `[N]` int32, number of leading rows of the previous group.
        size: `[N]` int32, number of rows of the tile, after the skipped ones.
    """

    group: Int[Array, "N"]
    first: Int[Array, "N"]
    skipped: Int[Array, "N"]
    size: Int[Array, "N"]

    @classmethod
    def of(cls, group_sizes: GroupSizes, num_rows: int) -> "RowTiles":
        """Cut the rows of groups into tiles.

        Args:
            group_sizes: `[S]` int32, rows of each group.
            num_rows: `A`, number of rows.
        """
        ends = group_sizes.cumsum(dtype=jnp.int32)
        starts = ends - group_sizes
        aligned = starts // ALIGNED_ROWS * ALIGNED_ROWS
        tiles_of = jnp.where(group_sizes > 0, (ends - aligned + TILE - 1) // TILE, 0)
        last = tiles_of.cumsum(dtype=jnp.int32)
        # An upper bound: full tiles of a group end before the aligned start of the next group, so they are disjoint and
        # at most `A / TILE`. Each group has at most one more tile.
        tile = iota(num_rows // TILE + group_sizes.shape[0])
        group = jnp.minimum((last[None] <= tile[:, None]).sum(1, dtype=jnp.int32), group_sizes.shape[0] - 1)
        first = aligned[group] + (tile - last[group] + tiles_of[group]) * TILE
        begin, end = jnp.maximum(first, starts[group]), jnp.minimum(first + TILE, ends[group])
        # A tile after the last one starts beyond all rows and is empty.
        return cls(group, first, begin - first, jnp.maximum(end - begin, 0))


def product(
    rows: Float[Array, "A I"],
    *parts: Float[Array, "_ _ _"],
    group_sizes: GroupSizes,
    transposed: bool,
) -> Float[Array, "A O"]:
    """Compute `grouped_matmul`. Rows beyond the last group affect no result, and are not written.

    Args:
        rows: `[A, I]`; `choose_backend` checks its shape and dtype.
        *parts: `[G, I, O]`, or `[G, O, I]` if `transposed`, matrices of consecutive groups.
        group_sizes: `[S]` int32.
        transposed: if True, multiply rows with the transposes.
    """
    width = parts[0].shape[1 if transposed else 2]
    tiles = RowTiles.of(group_sizes, rows.shape[0])
    kernel: Any = plgpu.kernel(
        partial(_multiply_tile, transposed=transposed),
        out_type=jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype),
        # Neighboring blocks read the same rows: the last axis of a grid is the fastest one.
        grid=(tiles.group.shape[0], width // TILE),
        grid_names=AXES[1::-1],
        kernel_name="grouped_product",
        compiler_params=_PARAMETERS,
    )
    return kernel(*tiles, rows, *parts)


def _multiply_tile(
    groups: Any,
    firsts: Any,
    skipped: Any,
    sizes: Any,
    rows: Any,
    *parts_and_out: Any,
    transposed: bool,
) -> None:
    *parts, out = parts_and_out
    column, tile = (jax.lax.axis_index(axis) for axis in AXES[:2])
    group, size = groups[tile], sizes[tile]
    first = pl.multiple_of(firsts[tile], ALIGNED_ROWS)

    def multiply(matrices: Any, at: Array) -> None:
        def sum_of(total: Any) -> Array:
            def add(_: Any, left: Any, right: Any) -> None:
                plgpu.wgmma(total, left, right.transpose((1, 0)) if transposed else right)
                # Wait for the previous product only, which frees its operands, while this one runs.
                plgpu.wgmma_wait(1)

            def of_weights(step: Array) -> tuple[Array, Array]:
                return (column, step) if transposed else (step, column)

            weights_shape = (TILE, DEPTH) if transposed else (DEPTH, TILE)
            plgpu.emit_pipeline(
                add,
                grid=(rows.shape[1] // DEPTH,),
                in_specs=[
                    plgpu.BlockSpec((pl.Element(TILE), DEPTH), lambda step: (first, step), delay_release=1),
                    plgpu.BlockSpec(weights_shape, of_weights, delay_release=1),
                ],
                max_concurrent_steps=STAGES,
            )(rows, matrices.at[at])
            return total[...]

        _write_rows(pl.run_scoped(sum_of, plgpu.ACC((TILE, TILE))), out, first, skipped[tile], size, column)

    before = 0
    for matrices in parts:
        inside = (group >= before) & (group < before + matrices.shape[0])
        pl.when((size > 0) & inside)(partial(multiply, matrices, group - before))
        before += matrices.shape[0]


def _write_rows(total: Array, out: Any, first: Array, skipped: Array, size: Array, column: Array) -> None:
    """Write the rows of a tile."""

    @partial(pl.run_scoped, tile=plgpu.SMEM((TILE, TILE), out.dtype))
    def _(tile: Any) -> None:
        tile[...] = total.astype(out.dtype)
        plgpu.commit_smem()
        # Copies have static sizes: copy powers of two, by the bits of the row count.
        at, num_rows = skipped, TILE
        while num_rows:

            @pl.when((size & num_rows) != 0)
            def _(at: Array = at, num_rows: int = num_rows) -> None:
                to = out.at[pl.ds(first + at, num_rows), pl.ds(column * TILE, TILE)]
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(at, num_rows)], to)

            at, num_rows = at + (size & num_rows), num_rows // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def outer(
    rows: Float[Array, "A I"],
    others: Float[Array, "A O"],
    group_sizes: GroupSizes,
    *,
    parts: tuple[int, ...],
    dtype: DType,
) -> tuple[Float[Array, "_ I O"], ...]:
    """Compute `grouped_outer`. Rows beyond the last group are masked and may be uninitialized.

    Args:
        rows: `[A, I]`; `choose_backend` checks its shape and dtype.
        others: `[A, O]`, in the same order and dtype.
        group_sizes: `[S]` int32.
        parts: number of groups of each array of the result; their sum is `S`.
        dtype: dtype of the result; the accumulators are float32.
    """
    shape = rows.shape[1], others.shape[1]
    ends = group_sizes.cumsum(dtype=jnp.int32)
    kernel: Any = plgpu.kernel(
        _sum_of_tile,
        out_type=tuple(jax.ShapeDtypeStruct((num_groups, *shape), dtype) for num_groups in parts),
        # Neighboring blocks read the same rows of one group.
        grid=(shape[0] // TILE, shape[1] // TILE, group_sizes.shape[0]),
        grid_names=AXES,
        kernel_name="grouped_outer",
        compiler_params=_PARAMETERS,
    )
    return kernel(ends - group_sizes, ends, rows, others)


def _sum_of_tile(starts: Any, ends: Any, rows: Any, others: Any, *outs: Any) -> None:
    inner, column, group = (jax.lax.axis_index(axis) for axis in AXES)
    start, end = starts[group], ends[group]
    first = jax.lax.div(start, DEPTH)
    num_steps = jnp.where(end > start, pl.cdiv(end, DEPTH) - first, 0)

    def sum_of(total: Any) -> Array:
        def add(index: tuple[Array], left: Any, right: Any) -> None:
            at = (first + index[0]) * DEPTH

            # Only at the ends of a group. Mask both by a select: 0 times NaN would be NaN.
            @pl.when((at < start) | (at + DEPTH > end))
            def _() -> None:
                row = at + plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, (DEPTH, TILE), 0), plgpu.Layout.WGMMA)
                for part in (left, right):
                    part[...] = jnp.where((row >= start) & (row < end), part[...], jnp.zeros_like(part))
                plgpu.commit_smem()

            plgpu.wgmma(total, left.transpose((1, 0)), right)
            plgpu.wgmma_wait(1)

        @pl.when(num_steps > 0)
        def _() -> None:
            plgpu.emit_pipeline(
                add,
                grid=(num_steps,),
                in_specs=[
                    plgpu.BlockSpec((DEPTH, TILE), lambda step: (first + step, inner), delay_release=1),
                    plgpu.BlockSpec((DEPTH, TILE), lambda step: (first + step, column), delay_release=1),
                ],
                max_concurrent_steps=STAGES,
            )(rows, others)

        return total[...]

    total = pl.run_scoped(sum_of, plgpu.ACC((TILE, TILE)))

    @partial(pl.run_scoped, tile=plgpu.SMEM((TILE, TILE), outs[0].dtype))
    def _(tile: Any) -> None:
        tile[...] = total.astype(tile.dtype)
        plgpu.commit_smem()
        before = 0
        for out in outs:

            @pl.when((group >= before) & (group < before + out.shape[0]))
            def _(out: Any = out, before: int = before) -> None:
                to = out.at[group - before, pl.ds(inner * TILE, TILE), pl.ds(column * TILE, TILE)]
                plgpu.copy_smem_to_gmem(tile, to)

            before += out.shape[0]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
