"""Pallas kernel of weight gradients for Hopper, compiled by Mosaic GPU.

It reads rows without a transposed copy, and writes sums in parts, such as those of home experts and replicas. RowGroups
without rows are cleared, or not written if they are not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.types import DType, Ref, iota
from jax_moe_lb.kernels.mosaic_api import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    SWIZZLE_BYTES,
    launch,
    multiprocessors,
    swizzled,
)
from jax_moe_lb.kernels.mosaic_product import MAX_STAGES, SHARED_BYTES
from jax_moe_lb.kernels.mosaic_tiles import ALIGNMENT
from jax_moe_lb.kernels.operands import RowGroups
from jax_moe_lb.kernels.parts import for_part_of

ROWS, MAX_COLUMNS = 128, 256
"""Largest tile of a result: each consumer has all rows and half of the columns, 128 registers of a thread."""

DEPTH = 64
"""Rows of the operands in one step of the sum."""

CLEARED_COLUMNS = 64
"""Columns cleared at a time, in the registers beside the accumulators."""


def outer(
    rows: Float[Array, "A I"],
    others: Float[Array, "A O"] | tuple[Float[Array, "A _"], ...],
    groups: RowGroups,
    *,
    parts: tuple[int, ...],
    dtype: DType,
    name: str = "grouped_outer",
) -> tuple[Float[Array, "_ I O"], ...]:
    """Compute `grouped_outer`; rows beyond the last group may be NaN."""
    others = _whole_tiles(others if isinstance(others, tuple) else (others,))
    (num_rows, inner), width = rows.shape, sum(part.shape[1] for part in others)
    group_sizes = groups.sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    ranges = _Ranges(ends - group_sizes, ends, *_written(groups.has_sums))
    tile = ROWS, _tile_columns(others)
    stored = CONSUMERS * tile[0] * SWIZZLE_BYTES
    step_bytes = rows.dtype.itemsize * DEPTH * sum(tile)
    kernel = _Kernel(
        num_rows=num_rows,
        widths=(inner, width),
        num_others=len(others),
        tile=tile,
        stages=min(MAX_STAGES, (SHARED_BYTES - stored) // step_bytes),
        programs=multiprocessors(),
        dtypes=(rows.dtype, jnp.dtype(dtype)),
    )
    out_types = [jax.ShapeDtypeStruct((count, inner, width), dtype) for count in parts]
    return tuple(launch(kernel.run, out_types, (rows, *others, *ranges), name, (num_rows, inner, width)))


def _whole_tiles(others: tuple[Array, ...]) -> tuple[Array, ...]:
    # A tile of columns must not cross the border between two arrays.
    return others if len(others) == 1 or others[0].shape[1] % ROWS == 0 else (jnp.concatenate(others, 1),)


def _tile_columns(others: tuple[Array, ...]) -> int:
    """Return the columns of a tile; each consumer has a multiple of 64."""
    width = others[0].shape[1]
    is_large = width >= MAX_COLUMNS and (len(others) == 1 or width % MAX_COLUMNS == 0)
    return MAX_COLUMNS if is_large else ROWS


class _Ranges(NamedTuple):
    """Rows per group, and the groups with a result in their order."""

    start: Int[Array, "S"]
    end: Int[Array, "S"]
    order: Int[Array, "S"]
    total: Int[Array, "1"]


def _written(has_result: Array) -> tuple[Array, Array]:
    # Returns the indices of true entries, and their number.
    last = jnp.cumsum(has_result, dtype=jnp.int32)
    order = (last[None] <= iota(has_result.shape[0])[:, None]).sum(1, dtype=jnp.int32)
    return jnp.minimum(order, has_result.shape[0] - 1), last[-1:]


class _Place(NamedTuple):
    """Tile of a result: its group, first row and column, and its steps over rows of the operands from `begin` on."""

    group: Array
    row: Array
    column: Array
    begin: Array
    steps: Array


class _Scratch(NamedTuple):
    rows: Ref
    others: Ref
    results: Ref
    full: Ref
    empty: Ref
    masked: Ref


@dataclass(frozen=True, eq=False)
class _Kernel:
    num_rows: int
    widths: tuple[int, int]
    num_others: int
    tile: tuple[int, int]
    stages: int
    programs: int
    dtypes: tuple[np.dtype, np.dtype]

    @property
    def consumer_columns(self) -> int:
        return self.tile[1] // CONSUMERS

    def run(self, rows: Ref, *refs: Ref) -> None:
        others, refs = refs[: self.num_others], refs[self.num_others :]
        groups, outs = _Ranges(*refs[:4]), refs[4:]
        transforms, barrier = swizzled(self.dtypes[0]), mosaic_gpu.Barrier
        chunk = SWIZZLE_BYTES // self.dtypes[1].itemsize
        pl.run_scoped(
            lambda *scratch: self._run_warpgroup((rows, others), groups, outs, _Scratch(*scratch)),
            mosaic_gpu.SMEM((self.stages, DEPTH, self.tile[0]), self.dtypes[0], transforms=transforms),
            mosaic_gpu.SMEM((self.stages, DEPTH, self.tile[1]), self.dtypes[0], transforms=transforms),
            mosaic_gpu.SMEM((CONSUMERS, self.tile[0], chunk), self.dtypes[1], transforms=swizzled(self.dtypes[1])),
            barrier(num_arrivals=2, num_barriers=self.stages),
            barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
            barrier(num_arrivals=CONSUMERS),
            collective_axes="warpgroup",
        )

    def _run_warpgroup(
        self, operands: tuple[Ref, Sequence[Ref]], groups: _Ranges, outs: Sequence[Ref], scratch: _Scratch
    ) -> None:
        program, warpgroup = (jax.lax.axis_index(name) for name in ("program", "warpgroup"))
        of_group = pl.cdiv(self.widths[0], self.tile[0]) * pl.cdiv(self.widths[1], self.tile[1])
        mine = jax.lax.div(groups.total[0] * of_group - program + self.programs - 1, self.programs)

        def each_tile(run: Callable[[_Place, Array], None]) -> Array:
            """Run a function of the place and the number of earlier steps per tile; return all steps."""

            def one(t: Array, before: Array) -> Array:
                place = self._place(program + t * self.programs, groups)
                run(place, before)
                return before + place.steps

            return jax.lax.fori_loop(0, mine, one, jnp.int32(0))

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            mosaic_gpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            steps = each_tile(partial(self._produce, operands=operands, scratch=scratch))
            # The program must not end before its last steps are read.
            for stage in range(self.stages):
                pl.when(steps > stage)(partial(mosaic_gpu.barrier_wait, scratch.empty.at[stage]))

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            mosaic_gpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            each_tile(partial(self._consume, warpgroup=warpgroup, groups=groups, outs=outs, scratch=scratch))
            mosaic_gpu.wait_smem_to_gmem(0)

    def _place(self, index: Array, groups: _Ranges) -> _Place:
        # Neighboring programs read the same rows of one group.
        (height, width), (inner, outer) = self.tile, self.widths
        across = pl.cdiv(inner, height)
        of_group = across * pl.cdiv(outer, width)
        group, inside = groups.order[jax.lax.div(index, of_group)], jax.lax.rem(index, of_group)
        start, end = groups.start[group], groups.end[group]
        begin = jax.lax.div(start, ALIGNMENT) * ALIGNMENT
        steps = jnp.where(end > start, jax.lax.div(end - begin + DEPTH - 1, DEPTH), 0)
        # If the tiles do not divide a width, the last one starts earlier: both programs store the same values.
        row = jnp.minimum(jax.lax.rem(inside, across) * height, inner - height)
        column = jnp.minimum(jax.lax.div(inside, across) * width, outer - width)
        return _Place(group, pl.multiple_of(row, 64), pl.multiple_of(column, 64), begin, steps)

    def _first_row(self, place: _Place, k: Array) -> Array:
        # The last step starts earlier if it would exceed the operands.
        return pl.multiple_of(jnp.minimum(place.begin + k * DEPTH, self.num_rows - DEPTH), ALIGNMENT)

    def _produce(self, place: _Place, before: Array, operands: tuple[Ref, Sequence[Ref]], scratch: _Scratch) -> None:
        def step(k: Array, _: None) -> None:
            stage = jax.lax.rem(before + k, self.stages)
            pl.when(before + k >= self.stages)(lambda: mosaic_gpu.barrier_wait(scratch.empty.at[stage]))
            rows, full = pl.ds(self._first_row(place, k), DEPTH), scratch.full.at[stage]
            left = operands[0].at[rows, pl.ds(place.row, self.tile[0])]
            mosaic_gpu.copy_gmem_to_smem(left, scratch.rows.at[stage], full)

            def copy(others: Ref, column: Array) -> None:
                right = others.at[rows, pl.ds(pl.multiple_of(column, 64), self.tile[1])]
                mosaic_gpu.copy_gmem_to_smem(right, scratch.others.at[stage], full)

            for_part_of(place.column, operands[1], copy, axis=1)

        jax.lax.fori_loop(0, place.steps, step, None)

    def _consume(
        self,
        place: _Place,
        before: Array,
        warpgroup: Array,
        groups: _Ranges,
        outs: Sequence[Ref],
        scratch: _Scratch,
    ) -> None:
        start, end = groups.start[place.group], groups.end[place.group]
        columns = pl.ds(warpgroup * self.consumer_columns, self.consumer_columns)
        half = pl.ds(warpgroup * (self.tile[0] // CONSUMERS), self.tile[0] // CONSUMERS)

        def stage_of(k: Array) -> Array:
            return jax.lax.rem(before + k, self.stages)

        def multiply(accumulator: Ref) -> Array:
            def step(k: Array, _: None) -> None:
                stage, first = stage_of(k), self._first_row(place, k)
                mosaic_gpu.barrier_wait(scratch.full.at[stage])
                begin = jnp.maximum(start, place.begin + k * DEPTH) - first

                # Rows of other groups, and rows of the previous step, are in the first and last step only.
                @pl.when((begin > 0) | (end - first < DEPTH))
                def clear() -> None:
                    # Both factors: 0 times the NaN of an uninitialized row is NaN.
                    for shared, these in ((scratch.rows, half), (scratch.others, columns)):
                        for at in range(0, these.size, CLEARED_COLUMNS):
                            part = pl.ds(these.start + at, CLEARED_COLUMNS)
                            _clear_rows(shared.at[stage, :, part], begin, end - first)
                    mosaic_gpu.commit_smem()
                    # The other consumer reads this half of the rows.
                    mosaic_gpu.barrier_arrive(scratch.masked)
                    mosaic_gpu.barrier_wait(scratch.masked)

                left, right = scratch.rows.at[stage].transpose((1, 0)), scratch.others.at[stage, :, columns]
                mosaic_gpu.wgmma(accumulator, left, right)
                # The product of the last step is done, the one of this step runs.
                mosaic_gpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: mosaic_gpu.barrier_arrive(scratch.empty.at[stage_of(k - 1)]))

            jax.lax.fori_loop(0, place.steps, step, None)
            value = accumulator[...]
            pl.when(place.steps > 0)(lambda: mosaic_gpu.barrier_arrive(scratch.empty.at[stage_of(place.steps - 1)]))
            return value

        shape = self.tile[0], self.consumer_columns
        value = pl.run_scoped(multiply, mosaic_gpu.ACC(shape, jnp.float32))
        self._store(value, place, warpgroup, outs, scratch.results.at[warpgroup])

    def _store(self, value: Array, place: _Place, warpgroup: Array, outs: Sequence[Ref], shared: Ref) -> None:
        size = shared.shape[1]
        for chunk in range(self.consumer_columns // size):
            mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared[...] = value[:, chunk * size : (chunk + 1) * size].astype(self.dtypes[1])
            mosaic_gpu.commit_smem()
            column = place.column + warpgroup * self.consumer_columns + chunk * size
            where = pl.ds(place.row, self.tile[0]), pl.ds(pl.multiple_of(column, size), size)

            def copy(out: Ref, index: Array, where: tuple[pl.Slice, pl.Slice] = where) -> None:
                mosaic_gpu.copy_smem_to_gmem(shared, out.at[(index, *where)])

            for_part_of(place.group, outs, copy)


def _clear_rows(shared: Ref, begin: Array, end: Array) -> None:
    """Set the rows before `begin` and from `end` on to 0, without a product, as 0 times NaN is NaN."""
    row = mosaic_gpu.broadcasted_iota(jnp.int32, shared.shape, 0, layout=mosaic_gpu.Layout.WGMMA)
    tile = shared[...]
    shared[...] = jnp.where((row >= begin) & (row < end), tile, jnp.zeros_like(tile))
