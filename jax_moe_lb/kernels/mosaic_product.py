"""Pallas kernel of grouped products for Hopper, compiled by Mosaic GPU.

Matrices may be in parts, such as those of home experts and replicas, and are read in place, transposed or not. One
kernel multiplies rows with the matrices of several kinds, or sums the products of several rows. An epilogue computes
elementwise functions of the products before they are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float

from jax_moe_lb.core.types import DType, GroupSizes, Ref
from jax_moe_lb.kernels.fused_products import Epilogue, Factor, Results, Term, store_products
from jax_moe_lb.kernels.mosaic_api import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    launch,
    load,
    multiprocessors,
    swizzled,
)
from jax_moe_lb.kernels.mosaic_tiles import ALIGNMENT, RowTiles, place, row_tiles, tile_of_rows
from jax_moe_lb.kernels.parts import for_part_of

ROWS, CONSUMER_ROWS = 128, 64
"""Rows of a tile, and of one consumer."""

DEPTH = 64
"""Length of the sum in one step."""

STORED, FEW_STORED = 64, 32
"""Columns stored at a time, and with operands of the epilogue, so that no register spills."""

MAX_COLUMNS = 256
"""Most columns of the accumulators of a tile: 128 registers of a thread."""

SHARED_BYTES = 224 * 1024
"""Shared memory for steps and results; a program has at most 227 KB."""

SUM_BYTES = 4096
"""Shared memory for sums over columns, and in which Mosaic reduces these."""

MAX_STAGES = 4
"""Most steps in shared memory at a time."""


def products(
    terms: Sequence[Term],
    width: int,
    group_sizes: GroupSizes,
    *,
    transposed: bool,
    epilogue: Epilogue | None = None,
    name: str = "grouped_product",
) -> Results:
    """Sum the products of terms and apply an epilogue."""
    # Rows beyond the last group affect no others.
    num_accumulators = len(terms[0].factors)
    epilogue = epilogue or Epilogue(store_products, num_accumulators)
    rows = terms[0].rows
    tiles = row_tiles(group_sizes, ROWS, rows.shape[0])
    offsets = tuple(tuple(factor.offset for factor in term.factors) for term in terms)
    arrays = [(term.rows, [factor.parts for factor in term.factors]) for term in terms]
    operands, form = jax.tree.flatten((arrays, epilogue.operands, epilogue.weights, tiles))
    # Operands of an epilogue take registers, too.
    columns = min(MAX_COLUMNS // (2 if epilogue.operands else num_accumulators), width)
    step_bytes = rows.dtype.itemsize * DEPTH * (ROWS + num_accumulators * columns)
    kernel = _Kernel(
        form=form,
        num_operands=len(operands),
        offsets=offsets,
        depths=tuple(term.rows.shape[1] for term in terms),
        width=width,
        columns=columns,
        stored=FEW_STORED if epilogue.operands else STORED,
        stages=min(MAX_STAGES, (SHARED_BYTES - _result_bytes(rows.dtype, epilogue.has_sums)) // step_bytes),
        programs=multiprocessors(),
        dtype=rows.dtype,
        transposed=transposed,
        epilogue=epilogue._replace(operands=(), weights=None),
    )
    out_types = [jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype)] * epilogue.num_results
    if epilogue.has_sums:
        shape = tiles.group.shape[0], kernel.num_columns, ROWS
        out_types.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    sizes = rows.shape[0], sum(kernel.depths), width * num_accumulators
    results = launch(kernel.run, out_types, operands, name, sizes)
    if not epilogue.has_sums:
        return Results(tuple(results), None)
    *stored, partial_sums = results
    tile, at = tile_of_rows(group_sizes, tiles, ROWS, rows.shape[0])
    return Results(tuple(stored), partial_sums[tile, :, at].sum(1))


def product(
    rows: Float[Array, "A I"], *parts: Float[Array, "_ _ _"], group_sizes: GroupSizes, transposed: bool
) -> Float[Array, "A O"]:
    """Compute `grouped_matmul`."""
    # Rows beyond the last group affect no others, and their products are not written.
    width = parts[0].shape[1 if transposed else 2]
    return products([Term(rows, (Factor(parts),))], width, group_sizes, transposed=transposed).arrays[0]


def _result_bytes(dtype: DType, has_sums: bool) -> int:
    return 2 * CONSUMERS * CONSUMER_ROWS * STORED * jnp.dtype(dtype).itemsize + SUM_BYTES * has_sums


class _Operands(NamedTuple):
    terms: list[tuple[Ref, Sequence[Sequence[Ref]]]]
    extras: list[Ref]
    weights: Ref | None
    tiles: RowTiles


class _Scratch(NamedTuple):
    rows: Ref
    matrices: list[Ref]
    results: Ref
    sums: Ref
    full: Ref
    empty: Ref


@dataclass(frozen=True, eq=False)
class _Kernel:
    form: PyTreeDef
    num_operands: int
    offsets: tuple[tuple[int, ...], ...]
    depths: tuple[int, ...]
    width: int
    columns: int
    stored: int
    stages: int
    programs: int
    dtype: DType
    transposed: bool
    epilogue: Epilogue

    @property
    def num_accumulators(self) -> int:
        return len(self.offsets[0])

    @property
    def num_columns(self) -> int:
        return pl.cdiv(self.width, self.columns)

    @property
    def steps(self) -> int:
        return sum(self.depths) // DEPTH

    def run(self, *refs: Ref) -> None:
        operands = _Operands(*jax.tree.unflatten(self.form, refs[: self.num_operands]))
        matrix = (self.columns, DEPTH) if self.transposed else (DEPTH, self.columns)
        transforms, barrier = swizzled(self.dtype), mosaic_gpu.Barrier
        shared = partial(mosaic_gpu.SMEM, dtype=self.dtype)
        pl.run_scoped(
            lambda *scratch: self._run_warpgroup(operands, refs[self.num_operands :], _Scratch(*scratch)),
            shared((self.stages, ROWS, DEPTH), transforms=transforms),
            [shared((self.stages, *matrix), transforms=transforms)] * self.num_accumulators,
            shared((CONSUMERS, 2, CONSUMER_ROWS, self.stored)),
            mosaic_gpu.SMEM((CONSUMERS, CONSUMER_ROWS), jnp.float32),
            barrier(num_arrivals=1 + self.num_accumulators, num_barriers=self.stages),
            barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
            collective_axes="warpgroup",
        )

    def _run_warpgroup(self, operands: _Operands, outs: Sequence[Ref], scratch: _Scratch) -> None:
        program, warpgroup = (jax.lax.axis_index(name) for name in ("program", "warpgroup"))
        num_rows = operands.tiles.total[0]
        mine = jax.lax.div(num_rows * self.num_columns - program + self.programs - 1, self.programs)

        def tile_place(t: Array) -> tuple[Array, Array]:
            return place(program + t * self.programs, num_rows, self.num_columns)

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            mosaic_gpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            jax.lax.fori_loop(0, mine, lambda t, _: self._produce(t, tile_place(t), operands, scratch), None)
            # The program must not end before its last steps are read.
            for stage in range(self.stages):
                pl.when(mine * self.steps > stage)(partial(mosaic_gpu.barrier_wait, scratch.empty.at[stage]))

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            mosaic_gpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            jax.lax.fori_loop(
                0, mine, lambda t, _: self._consume(t, tile_place(t), warpgroup, operands, outs, scratch), None
            )
            mosaic_gpu.wait_smem_to_gmem(0)

    def _first_column(self, index: Array) -> Array:
        # If the tiles do not divide the width, the last one starts earlier. Both programs of the columns of an overlap
        # store the same values.
        return pl.multiple_of(jnp.minimum(index * self.columns, self.width - self.columns), DEPTH)

    def _produce(self, t: Array, at: tuple[Array, Array], operands: _Operands, scratch: _Scratch) -> None:
        group = operands.tiles.group[at[0]]
        rows = pl.ds(pl.multiple_of(operands.tiles.first[at[0]], ALIGNMENT), ROWS)
        columns = pl.ds(self._first_column(at[1]), self.columns)
        before = t * self.steps
        for (source, factors), offsets, depth in zip(operands.terms, self.offsets, self.depths, strict=True):
            copy = partial(self._produce_step, source.at[rows], factors, offsets, (group, columns), before, scratch)
            jax.lax.fori_loop(0, depth // DEPTH, copy, None)
            before += depth // DEPTH

    def _produce_step(
        self,
        rows: Ref,
        factors: Sequence[Sequence[Ref]],
        offsets: tuple[int, ...],
        at: tuple[Array, pl.Slice],
        before: Array,
        scratch: _Scratch,
        k: Array,
        _: None,
    ) -> None:
        stage = jax.lax.rem(before + k, self.stages)
        pl.when(before + k >= self.stages)(lambda: mosaic_gpu.barrier_wait(scratch.empty.at[stage]))
        full, depth = scratch.full.at[stage], pl.multiple_of(k * DEPTH, DEPTH)
        mosaic_gpu.copy_gmem_to_smem(rows.at[:, pl.ds(depth, DEPTH)], scratch.rows.at[stage], full)
        for parts, offset, shared in zip(factors, offsets, scratch.matrices, strict=True):
            self._copy_matrix(parts, offset, (at[0], depth, at[1]), shared.at[stage], full)

    def _copy_matrix(
        self, parts: Sequence[Ref], offset: int, at: tuple[Array, Array, pl.Slice], shared: Ref, full: Ref
    ) -> None:
        group, depth, columns = at
        if self.transposed:
            where = columns, pl.ds(depth + offset, DEPTH)
        else:
            where = pl.ds(depth, DEPTH), pl.ds(columns.start + offset, columns.size)

        def copy(part: Ref, index: Array) -> None:
            mosaic_gpu.copy_gmem_to_smem(part.at[(index, *where)], shared, full)

        for_part_of(group, parts, copy)

    def _consume(
        self,
        t: Array,
        at: tuple[Array, Array],
        warpgroup: Array,
        operands: _Operands,
        outs: Sequence[Ref],
        scratch: _Scratch,
    ) -> None:
        rows = pl.ds(warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)
        before = t * self.steps

        def stage_of(k: Array | int) -> Array:
            return jax.lax.rem(before + k, self.stages)

        def multiply(*accumulators: Ref) -> list[Array]:
            def step(k: Array, _: None) -> None:
                stage = stage_of(k)
                mosaic_gpu.barrier_wait(scratch.full.at[stage])
                for accumulator, matrices in zip(accumulators, scratch.matrices, strict=True):
                    matrix = matrices.at[stage]
                    right = matrix.transpose((1, 0)) if self.transposed else matrix
                    mosaic_gpu.wgmma(accumulator, scratch.rows.at[stage, rows], right)
                # The products of the last step are done, those of this one run.
                mosaic_gpu.wgmma_wait(self.num_accumulators)
                pl.when(k > 0)(lambda: mosaic_gpu.barrier_arrive(scratch.empty.at[stage_of(k - 1)]))

            jax.lax.fori_loop(0, self.steps, step, None)
            values = [accumulator[...] for accumulator in accumulators]
            mosaic_gpu.barrier_arrive(scratch.empty.at[stage_of(self.steps - 1)])
            return values

        accumulator = mosaic_gpu.ACC((CONSUMER_ROWS, self.columns), jnp.float32)
        values = pl.run_scoped(multiply, *[accumulator] * self.num_accumulators)
        self._store(values, at, warpgroup, operands, outs, scratch)

    def _store(
        self,
        values: list[Array],
        at: tuple[Array, Array],
        warpgroup: Array,
        operands: _Operands,
        outs: Sequence[Ref],
        scratch: _Scratch,
    ) -> None:
        """Apply the epilogue to the products of one consumer, some columns at a time."""
        layout, size = mosaic_gpu.Layout.WGMMA, self.stored
        tiles, first_column = operands.tiles, self._first_column(at[1])
        row = pl.multiple_of(tiles.first[at[0]] + warpgroup * CONSUMER_ROWS, ALIGNMENT)
        begin, end = (
            jnp.clip(bound[at[0]] - warpgroup * CONSUMER_ROWS, 0, CONSUMER_ROWS) for bound in (tiles.begin, tiles.end)
        )
        rows, weights, sums = pl.ds(row, CONSUMER_ROWS), None, []
        if operands.weights is not None:
            of_rows = load(operands.weights.at[rows], layout.reduce(1))
            weights = jax.lax.broadcast_in_dim(of_rows, (CONSUMER_ROWS, size), (0,))
        for chunk in range(self.columns // size):
            column = pl.multiple_of(first_column + chunk * size, size)
            chunks = [value[:, chunk * size : (chunk + 1) * size] for value in values]
            loaded = [load(extra.at[rows, pl.ds(column, size)], layout) for extra in operands.extras]
            results, summand = self.epilogue.compute(chunks, [one.astype(jnp.float32) for one in loaded], weights)
            if self.epilogue.has_sums:
                # Columns of the previous tile count once.
                is_own = (column >= at[1] * self.columns).astype(jnp.float32)
                sums.append(jnp.sum(summand, axis=1) * (is_own if self.width % self.columns else 1))
            for n, (result, out) in enumerate(zip(results, outs[: len(results)], strict=True)):
                number = chunk * len(results) + n
                buffer = scratch.results.at[warpgroup, number % 2]
                # At most the copy from the other buffer runs on.
                mosaic_gpu.wait_smem_to_gmem(min(number, 1), wait_read_only=True)
                buffer[...] = result.astype(self.dtype)
                mosaic_gpu.commit_smem()
                _store_rows(buffer, out, row, column, begin, end)
        if self.epilogue.has_sums:
            scratch.sums[warpgroup] = sum(sums[1:], start=sums[0])
            mosaic_gpu.commit_smem()
            place = outs[-1].at[at[0], at[1], pl.ds(warpgroup * CONSUMER_ROWS, CONSUMER_ROWS)]
            mosaic_gpu.copy_smem_to_gmem(scratch.sums.at[warpgroup], place)


def _store_rows(shared: Ref, out: Ref, row: Array, column: Array, begin: Array, end: Array) -> None:
    """Store the rows from `begin` to `end`, by bulk copies of powers of two rows, as one copy has a static size."""
    size, count = CONSUMER_ROWS, end - begin
    while size:

        @pl.when((count & size) != 0)
        def _(begin: Array = begin, size: int = size) -> None:
            target = out.at[pl.ds(row + begin, size), pl.ds(column, shared.shape[1])]
            mosaic_gpu.copy_smem_to_gmem(shared.at[pl.ds(begin, size)], target, commit_group=False)

        begin = begin + (count & size)
        size //= 2
    mosaic_gpu.commit_smem_to_gmem_group()
