"""Pallas kernels for TPUs: grouped products with an epilogue, and the gradients of their matrices.

XLA's `ragged_dot` reads all matrices from one array. Its tiles need not divide the width: of 768 columns it multiplies
640 twice. These kernels read and write matrices in parts, of home experts and of replicas, transposed or not, in tiles
that divide the width into equal numbers of vectors.

A step of the grid multiplies the rows of one group in one tile of rows. Steps are in the order of rows, so the results
of a tile with several groups, and the sums of a group over its tiles, stay in vector memory until they are complete.

Rows and results may be in the layout of exchanges, in words. A word has a number of either half of a row, and the words
of a row are contiguous. A tile of rows in words is unpacked once, in vector memory.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_moe_lb.core.tpu_vectors import LANES
from jax_moe_lb.core.types import DType, GroupSizes, ReceivedRows, Ref, iota
from jax_moe_lb.kernels.backends import Product
from jax_moe_lb.kernels.fused_products import Epilogue, Factor, Results, Term, store_products
from jax_moe_lb.kernels.operands import RowGroups, in_rows
from jax_moe_lb.kernels.parts import for_part, starts
from jax_moe_lb.kernels.tpu_rows import PACKED, halves, packed

ITEMSIZE = 2
"""Bytes of a bfloat16."""

FOR_TILES, FOR_KERNEL = 9 / 16, 7 / 8
"""Shares of the vector memory for the largest tiles, and for a kernel with values between operations."""

VALUES_BYTES = 16 * 2**20
"""Bytes of these values. The compiler keeps other arrays in the rest of the vector memory."""


class Visits(NamedTuple):
    """Steps of a grid, and rows per group."""

    group: Int[Array, "V"]  # group of a step
    tile: Int[Array, "V"]  # tile of rows of a step
    starts: Int[Array, "S"]  # first row of a group
    ends: Int[Array, "S"]  # end of the rows


def why_not(product: Product) -> str | None:
    """Return the reason why XLA's kernel may be faster for a product, or `None`."""
    if product.kind == "outer":
        return None
    depth, width = product.widths
    columns, least = _columns(width, len(product.parts), [depth], 1), _least_columns(width)
    if columns < least:
        return f"{columns} of {width} columns fit in a tile; expected {least}, as its rows are read once per tile"
    return None


def can_fuse(inner: int, hidden: int, num_parts: int) -> bool:
    """Return whether the kernels of a whole network have tiles wide enough for the matrix units."""
    # Rows are read once for `up` and gate.
    of_rows = 2 * _columns(inner, 2 * num_parts, [hidden], 3)
    return of_rows >= _least_columns(inner) and _columns(hidden, num_parts, [inner] * 2, 1) >= _least_columns(hidden)


def has_words(width: int) -> bool:
    """Return whether the words of a row, each with a number of either half, fill whole lines of a vector."""
    return width % (2 * LANES) == 0


def width_of(rows: ReceivedRows) -> int:
    """Return the width of rows."""
    return math.prod(rows.shape[1:])


def _least_columns(width: int) -> int:
    # By fewer columns, a step would take less time than the copy of its rows.
    return min(2 * _chip().mxu_column_size, pl.cdiv(width, _chip().num_cores))


def visits_of(
    group_sizes: GroupSizes, num_rows: int, is_cleared: Bool[Array, "S"] | None = None
) -> tuple[Visits, Array]:
    """Return the steps over the tiles of all groups with rows or with `is_cleared`, and their number."""
    size, num_groups = _chip().mxu_column_size, group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    begins = ends - group_sizes
    first = jax.lax.div(begins, jnp.int32(size))
    without_rows = 0 if is_cleared is None else is_cleared.astype(jnp.int32)
    count = jnp.where(group_sizes > 0, jax.lax.div(ends - 1, jnp.int32(size)) - first + 1, without_rows)
    until, step = jnp.cumsum(count, dtype=jnp.int32), iota(pl.cdiv(num_rows, size) + num_groups)[:, None]
    group = jnp.minimum((until[None] <= step).sum(1, dtype=jnp.int32), num_groups - 1)
    # A sum in place of a gather, which takes a TPU longer.
    is_mine = group[:, None] == iota(num_groups)[None]
    tile = jnp.where(is_mine, (first + count - until)[None] + step, 0).sum(1, dtype=jnp.int32)
    return Visits(group, jnp.clip(tile, 0, pl.cdiv(num_rows, size) - 1), begins, ends), until[-1]


def products(
    terms: Sequence[Term],
    width: int,
    group_sizes: GroupSizes,
    *,
    transposed: bool,
    epilogue: Epilogue | None = None,
    name: str = "grouped_product",
    travels: bool = False,
) -> Results:
    """Sum the products of terms and apply an epilogue; `travels` if the next operation reads words of whole rows."""
    # Rows beyond the last group affect no others.
    terms = [term if has_words(width_of(term.rows)) else Term(in_rows(term.rows), term.factors) for term in terms]
    epilogue = epilogue or Epilogue(store_products, len(terms[0].factors))
    kernel, num_rows = _Product.of(terms, width, transposed, epilogue, travels), terms[0].rows.shape[0]
    terms, lines = [kernel.sliced(term) for term in terms], (pl.cdiv(num_rows, kernel.rows), 1, kernel.rows)
    weights = None
    if epilogue.weights is not None:
        weights = jnp.pad(epilogue.weights, (0, lines[0] * kernel.rows - num_rows)).reshape(lines)
    factors = [[one.parts for one in term.factors for _ in range(kernel.num_blocks)] for term in terms]
    operands = [(term.rows, of) for term, of in zip(terms, factors, strict=True)], epilogue.operands, weights
    of_result = (num_rows, 2, width // 2) if kernel.writes_words else (num_rows, width)
    shapes: list[Any] = [(of_result, terms[0].rows.dtype)] * epilogue.num_results
    if epilogue.has_sums:
        shapes.append(((kernel.num_tiles, *lines), jnp.float32))
    visits, total = visits_of(group_sizes, num_rows)
    sizes = num_rows, sum(width_of(term.rows) for term in terms), width * len(terms[0].factors)
    grid = kernel.num_tiles, total
    results = _launch(kernel.step, grid, visits, operands, kernel.tiles(terms), shapes, name, sizes)
    sums = results.pop().sum(0).reshape(-1)[:num_rows] if epilogue.has_sums else None
    return Results(tuple(one.reshape(num_rows, width) for one in results), sums)


def product(
    rows: Float[Array, "A I"], *parts: Float[Array, "_ _ _"], group_sizes: GroupSizes, transposed: bool
) -> Float[Array, "A O"]:
    """Compute `grouped_matmul`."""
    # Rows beyond the last group affect no others, and their products are not written.
    width = parts[0].shape[1 if transposed else 2]
    return products([Term(rows, (Factor(parts),))], width, group_sizes, transposed=transposed).arrays[0]


def outer(
    rows: Float[Array, "A *I"],
    others: Float[Array, "A *O"] | tuple[Float[Array, "A *_"], ...],
    groups: RowGroups,
    *,
    parts: tuple[int, ...],
    dtype: DType,
    before: tuple[Float[Array, "_ I O"], ...] | None = None,
    name: str = "grouped_outer",
) -> tuple[Float[Array, "_ I O"], ...]:
    """Compute `grouped_outer`, added to `before` in place; several arrays `others` are neighboring columns."""
    # Rows beyond the groups may be NaN.
    given, num_rows, inner = others if isinstance(others, tuple) else (others,), rows.shape[0], width_of(rows)
    kernel = _Outer.of(rows, given, parts, dtype, before is not None)
    if len(given) > 1 and (kernel.tile[1] % LANES or kernel.widths[1] % kernel.tile[1]):
        # A tile of columns must not cross the border between two arrays.
        given = (jnp.concatenate(list(map(in_rows, given)), 1),)
        kernel = _Outer.of(rows, given, parts, dtype, before is not None)
    rows = rows if kernel.reads_words(0) else in_rows(rows)
    given = given if kernel.reads_words(1) else tuple(map(in_rows, given))
    visits, total = visits_of(groups.sizes, num_rows, groups.has_sums)
    shapes = [((count, inner, kernel.width), dtype) for count in parts]
    grid, sizes = (*kernel.num_tiles, total), (num_rows, inner, kernel.width)
    operands = rows, given, list(before or ())
    tiles = kernel.tiles(rows, given)
    return tuple(_launch(kernel.step, grid, visits, operands, tiles, shapes, name, sizes, len(operands[2])))


class _Tiles(NamedTuple):
    operands: PyTree
    results: list[Any]
    scratch: tuple[Any, ...] = ()


def _launch(
    step: Callable[..., None],
    grid: tuple[Any, ...],
    visits: Visits,
    operands: PyTree,
    tiles: _Tiles,
    shapes: Sequence[tuple[tuple[int, ...], DType]],
    name: str,
    sizes: tuple[int, int, int],
    num_in_place: int = 0,
) -> list[Array]:
    """Run a kernel; a step takes the visits, the operands as given, the results and the scratch memory."""
    # As many of the last operands as are in place have the memory of the results.
    leaves, form = jax.tree.flatten(operands)
    varies = jax.typeof(leaves[0]).manual_axis_type
    results = [jax.ShapeDtypeStruct(*one, manual_axis_type=varies) for one in shapes]
    nbytes = sum(one.size * one.dtype.itemsize for one in (*leaves, *results))
    blocks = zip([*jax.tree.leaves(tiles.operands), *tiles.results], [*leaves, *results], strict=True)
    tile_bytes = 2 * sum(math.prod(spec.block_shape) * one.dtype.itemsize for spec, one in blocks)
    tile_bytes += sum(math.prod(one.shape) * one.dtype.itemsize for one in tiles.scratch)

    def run(*refs: Ref) -> None:
        first, last = len(visits), len(visits) + len(leaves)
        step(Visits(*refs[:first]), jax.tree.unflatten(form, refs[first:last]), *refs[last:])

    call: Any = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=jax.tree.leaves(tiles.operands),
            out_specs=tiles.results,
            scratch_shapes=tiles.scratch,
        ),
        out_shape=results,
        input_output_aliases={len(visits) + len(leaves) - num_in_place + n: n for n in range(num_in_place)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, *[pltpu.ARBITRARY] * (len(grid) - 1)),
            vmem_limit_bytes=min(tile_bytes + VALUES_BYTES, _vector_bytes(FOR_KERNEL)),
        ),
        # By its cost, the compiler decides which exchanges run beside the kernel.
        cost_estimate=pl.CostEstimate(flops=2 * math.prod(sizes), bytes_accessed=nbytes, transcendentals=0),
        # `aot` reads the sizes.
        name=f"{name}_{'x'.join(map(str, sizes))}",
    )
    return list(call(*visits, *leaves))


@dataclass(frozen=True, eq=False)
class _Product:
    rows: int  # rows of a tile
    columns: int  # columns of a tile
    width: int
    groups: tuple[int, ...]  # groups per part
    transposed: bool
    epilogue: Epilogue
    writes_words: bool  # whether the words of a row are contiguous, as in exchanges

    @classmethod
    def of(cls, terms: Sequence[Term], width: int, transposed: bool, epilogue: Epilogue, travels: bool) -> "_Product":
        depths, parts = [width_of(term.rows) for term in terms], terms[0].factors[0].parts
        num_results = len(epilogue.operands) + epilogue.num_results
        columns = _columns(width, len(parts) * len(terms[0].factors), depths, num_results)
        size, groups = _chip().mxu_column_size, tuple(part.shape[0] for part in parts)
        writes_words = travels and width % columns == 0 and has_words(columns)
        return cls(size, columns, width, groups, transposed, epilogue, writes_words)

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.width, self.columns)

    @property
    def num_blocks(self) -> int:
        """Blocks of consecutive columns of a tile: of words of a part of each row, one of either half."""
        return 2 if self.writes_words and self.num_tiles > 1 else 1

    @property
    def block(self) -> int:
        """Columns of a block."""
        return self.columns // self.num_blocks

    def tiles(self, terms: Sequence[Term]) -> _Tiles:
        of_results = pl.BlockSpec((self.rows, self.columns), lambda j, v, group, tile, *_: (tile[v], j))
        # Row weights and sums lie along lanes: as columns, each of them would take a vector of memory.
        of_sums = pl.BlockSpec((1, 1, 1, self.rows), lambda j, v, group, tile, *_: (j, tile[v], 0, 0))
        of_line = pl.BlockSpec((1, 1, self.rows), lambda j, v, group, tile, *_: (tile[v], 0, 0))
        of_weights = None if self.epilogue.weights is None else of_line
        operands = list(map(self._of_term, terms)), [of_results] * len(self.epilogue.operands), of_weights
        if self.writes_words:
            words = self.rows, 2, self.columns // 2
            of_results = pl.BlockSpec(words, lambda j, v, group, tile, *_: (tile[v], 0, j))
        results = [of_results] * self.epilogue.num_results + [of_sums] * self.epilogue.has_sums
        in_words = [term.rows for term in terms if term.rows.ndim > 2]
        return _Tiles(operands, results, tuple(pltpu.VMEM((self.rows, width_of(one)), one.dtype) for one in in_words))

    def sliced(self, term: Term) -> Term:
        """Return a term whose slices begin at tiles; others are copied."""
        length, block = (width_of(term.rows),) * 2 if self.transposed else (self.width, self.block)

        def aligned(factor: Factor) -> Factor:
            if factor.parts[0].shape[2] == length or (block % LANES == 0 and factor.offset % block == 0):
                return factor
            return Factor(tuple(part[:, :, factor.offset : factor.offset + length] for part in factor.parts))

        return Term(term.rows, tuple(map(aligned, term.factors)))

    def _of_term(self, term: Term) -> PyTree:
        depth = width_of(term.rows)

        def of_part(factor: Factor, block: int, before: int, count: int) -> Any:
            # Steps of other parts keep the tile, which then is not copied once more.
            def at(j: Array, v: Array, group: Ref, *_: Ref) -> tuple[Any, ...]:
                index, column = jnp.clip(group[v] - before, 0, count - 1), j + block * self.num_tiles
                if self.transposed:
                    return index, column, factor.offset // depth
                return index, 0, column + factor.offset // self.block

            return pl.BlockSpec((1, self.block, depth) if self.transposed else (1, depth, self.block), at)

        parts = list(zip(starts(self.groups), self.groups, strict=True))
        blocks = itertools.product(term.factors, range(self.num_blocks))
        shape = self.rows, *(term.rows.shape[1:])
        of_rows = pl.BlockSpec(shape, lambda j, v, group, tile, *_: (tile[v], *[0] * (len(shape) - 1)))
        return of_rows, [[of_part(*block, *part) for part in parts] for block in blocks]

    def step(self, visits: Visits, operands: PyTree, *refs: Ref) -> None:
        terms, extras, weights = operands
        outs = refs[: self.epilogue.num_results + self.epilogue.has_sums]
        j, v, shape = pl.program_id(0), pl.program_id(1), (self.rows, self.block)
        inside = _inside(visits, v, (self.rows, LANES) if self.writes_words else shape)

        matrices = self._as_matrices(visits, v, [rows for rows, _ in terms], refs[len(outs) :])

        def compute(part: int, _: Array) -> None:
            numbers, left = range(len(terms[0][1])), [rows[...] for rows in matrices]
            factors = [[of[n][part] for _, of in terms] for n in numbers]
            values = [_sum(list(map(self._multiply, left, factors[n]))) for n in numbers]
            of_rows = None if weights is None else jnp.broadcast_to(_turned(weights[0], axis=1), shape)
            results, summand = self.epilogue.compute(values, [one[...].astype(jnp.float32) for one in extras], of_rows)
            if self.writes_words:
                self._write_words(results, inside, outs[0])
                return
            for result, out in zip(results, outs, strict=False):
                _write(result, inside, out)
            if self.epilogue.has_sums:
                sums = _turned(jnp.sum(self._of_width(summand, j), axis=1, keepdims=True), axis=0)
                of_group = _inside(visits, v, sums.shape, axis=1)
                outs[-1][0, 0] = jnp.where(of_group, sums, outs[-1][0, 0])

        for_part(visits.group[v], self.groups, compute)

    def _as_matrices(self, visits: Visits, v: Array, rows: list[Ref], scratch: tuple[Ref, ...]) -> list[Ref]:
        """Return the rows of a step; those in words are unpacked in the first step of a tile."""
        memory = iter(scratch)
        matrices = [one if one.ndim == 2 else next(memory) for one in rows]

        @pl.when((v == 0) | (visits.tile[jnp.maximum(v - 1, 0)] != visits.tile[v]))
        def _() -> None:
            for one, matrix in zip(rows, matrices, strict=True):
                if one.ndim > 2:
                    _unpack(one, matrix)

        return matrices

    def _write_words(self, blocks: list[Array], inside: Array, out: Ref) -> None:
        lower, upper = blocks if len(blocks) == 2 else jnp.split(blocks[0], 2, axis=1)
        lines, num_lines = _lines(out)
        for line in range(num_lines):
            # The same words of all rows.
            columns, at = slice(line * LANES, (line + 1) * LANES), pl.ds(line, self.rows, stride=num_lines)
            lines[at] = jnp.where(inside, packed(lower[:, columns], upper[:, columns]), lines[at])

    def _multiply(self, rows: Array, matrices: Ref) -> Array:
        return _dot(rows, matrices[0], (1, 1 if self.transposed else 0))

    def _of_width(self, summand: Array, j: Array) -> Array:
        if self.width % self.columns == 0:
            return summand
        column = j * self.columns + jax.lax.broadcasted_iota(jnp.int32, summand.shape, 1)
        return jnp.where(column < self.width, summand, 0)


@dataclass(frozen=True, eq=False)
class _Outer:
    rows: int  # rows of a tile of the operands
    tile: tuple[int, int]  # tile of the result
    widths: tuple[int, int]  # width of the rows, and of each of the others
    num_others: int
    groups: tuple[int, ...]  # groups per part
    adds: bool  # whether the results are sums with given arrays

    @classmethod
    def of(cls, rows: Array, others: tuple[Array, ...], parts: tuple[int, ...], dtype: DType, adds: bool) -> "_Outer":
        size, widths = _chip().mxu_column_size, (width_of(rows), width_of(others[0]))

        def nbytes(tile: tuple[int, int]) -> int:
            of_results = 4 + 2 * (1 + adds) * len(parts) * jnp.dtype(dtype).itemsize
            return tile[0] * tile[1] * of_results + 2 * ITEMSIZE * size * (tile[0] + tile[1] * len(others))

        left, right = _tile_widths(widths[0], _chip().num_cores), _tile_widths(widths[1])
        tile = next(left), next(right)
        while nbytes(tile) > _vector_bytes(FOR_TILES) and max(tile) > LANES:
            tile = (next(left), tile[1]) if tile[0] >= tile[1] else (tile[0], next(right))
        return cls(size, tile, widths, len(others), parts, adds)

    @property
    def width(self) -> int:
        return self.widths[1] * self.num_others

    @property
    def num_tiles(self) -> tuple[int, int]:
        return pl.cdiv(self.widths[0], self.tile[0]), self.num_others * self.num_columns

    @property
    def num_columns(self) -> int:
        return pl.cdiv(self.widths[1], self.tile[1])

    def reads_words(self, axis: int) -> bool:
        """Return whether a tile of an operand is all words of a row, or words with one number each."""
        width, tile = self.widths[axis], self.tile[axis]
        return has_words(width) and (tile == width or (width // 2) % tile == 0)

    def tiles(self, rows: Array, others: Sequence[Array]) -> _Tiles:
        def of_other(n: int, other: Array) -> Any:
            def at(i: Array, j: Array, v: Array, group: Ref, tile: Ref, *_: Ref) -> tuple[Any, Any]:
                mine = j - n * self.num_columns
                is_read = (mine >= 0) & (mine < self.num_columns)
                # A tile that is not read stays the same, and is not copied.
                return jnp.where(is_read, tile[v], 0), jnp.where(is_read, mine, 0)

            return self._of_rows(1, other, at)

        def of_part(before: int, count: int) -> Any:
            def at(i: Array, j: Array, v: Array, group: Ref, *_: Ref) -> tuple[Any, ...]:
                return jnp.clip(group[v] - before, 0, count - 1), i, j

            return pl.BlockSpec((1, *self.tile), at)

        of_rows = self._of_rows(0, rows, lambda i, j, v, group, tile, *_: (tile[v], i))
        results = [of_part(before, count) for before, count in zip(starts(self.groups), self.groups, strict=True)]
        operands = of_rows, list(itertools.starmap(of_other, enumerate(others))), results if self.adds else []
        return _Tiles(operands, results, (pltpu.VMEM(self.tile, jnp.float32),))

    def _of_rows(self, axis: int, rows: Array, at: Callable[..., tuple[Any, Any]]) -> Any:
        tile, half = self.tile[axis], self.widths[axis] // 2
        if rows.ndim == 2:
            return pl.BlockSpec((self.rows, tile), at)

        def of_words(*indices: Any) -> tuple[Any, ...]:
            row, column = at(*indices)
            return row, 0, jax.lax.rem(column, max(1, half // tile))

        return pl.BlockSpec((self.rows, 2, min(half, tile)), of_words)

    def _half(self, axis: int, at: Array) -> Array | None:
        # Whether a tile has the upper numbers of words, and no others.
        width, tile = self.widths[axis], self.tile[axis]
        return None if tile == width else 2 * at * tile >= width

    def step(self, visits: Visits, operands: PyTree, *refs: Ref) -> None:
        (rows, others, before), outs, sums = operands, refs[:-1], refs[-1]
        v, last = pl.program_id(2), pl.num_programs(2) - 1
        group = visits.group[v]

        def masked(ref: Ref, axis: int, at: Array) -> Array:
            # Both operands: 0 times the NaN of another group would be NaN.
            inside = _inside(visits, v, (self.rows, self.tile[axis]))
            return jnp.where(inside, _in_float32(ref, self._half(axis, at)), 0).astype(ref.dtype)

        @pl.when((v == 0) | (visits.group[jnp.maximum(v - 1, 0)] != group))
        def _() -> None:
            def read(part: int, _: Array) -> None:
                sums[...] = before[part][0].astype(jnp.float32)

            if self.adds:
                for_part(group, self.groups, read)
            else:
                sums[...] = jnp.zeros_like(sums)

        def add(n: int, at: Array) -> None:
            sums[...] += _dot(masked(rows, 0, pl.program_id(0)), masked(others[n], 1, at), (0, 0))

        for_part(pl.program_id(1), (self.num_columns,) * self.num_others, add)

        @pl.when((v == last) | (visits.group[jnp.minimum(v + 1, last)] != group))
        def _() -> None:
            def write(part: int, _: Array) -> None:
                outs[part][0] = sums[...].astype(outs[part].dtype)

            for_part(group, self.groups, write)


def _dot(left: Array, right: Array, over: tuple[int, int]) -> Array:
    # The precision of the context may be one that the matrix units lack for these dtypes.
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(
        left, right, dimensions, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )


def _lines(words: Ref) -> tuple[Ref, int]:
    """Return a block of words in lines of a vector's width, and the number of lines of a row."""
    num_rows, _, width = words.shape
    return words.bitcast(jnp.uint32).reshape(num_rows * width // LANES, LANES), width // LANES


def _unpack(words: Ref, rows: Ref) -> None:
    """Write a block of whole rows in words as a matrix."""
    (lines, num_lines), half = _lines(words), words.shape[2]

    def some(i: Array, carry: Array) -> Array:
        first = pl.multiple_of(i * PACKED, PACKED)
        for line in range(num_lines):
            # The same words of consecutive rows.
            numbers = halves(lines[pl.ds(first * num_lines + line, PACKED, stride=num_lines)])
            for at, column in zip((line * LANES, half + line * LANES), numbers, strict=True):
                rows[pl.ds(first, PACKED), pl.ds(at, LANES)] = column.astype(rows.dtype)
        return carry

    jax.lax.fori_loop(0, words.shape[0] // PACKED, some, 0)


def _in_float32(rows: Ref, is_upper: Array | None) -> Array:
    """Return a block of rows as a matrix; of words, the numbers in one half or, one after the other, in both."""
    if rows.ndim == 2:
        return rows[...].astype(jnp.float32)
    lines, num_lines = _lines(rows)
    pairs = [halves(lines[pl.ds(line, rows.shape[0], stride=num_lines)]) for line in range(num_lines)]
    if is_upper is None:
        return jnp.concatenate([*[lower for lower, _ in pairs], *[upper for _, upper in pairs]], axis=1)
    return jnp.concatenate([jnp.where(is_upper, upper, lower) for lower, upper in pairs], axis=1)


def _columns(width: int, num_matrices: int, depths: Sequence[int], num_results: int) -> int:
    """Return the columns of a tile: as many as fit, twice, beside the rows; `num_matrices` is per term."""
    rows, widths = _chip().mxu_column_size, _tile_widths(width, _chip().num_cores)

    def nbytes(columns: int) -> int:
        return 2 * ITEMSIZE * (sum(depths) * (rows + num_matrices * columns) + rows * num_results * columns)

    return next(size for size in widths if nbytes(size) <= _vector_bytes(FOR_TILES) or size <= LANES)


def _chip() -> pltpu.TpuInfo:
    return pltpu.get_tpu_info()


def _vector_bytes(share: float) -> int:
    return int(share * _chip().vmem_capacity_bytes)


def _tile_widths(width: int, least: int = 1) -> Iterator[int]:
    """Yield widths of tiles, of which there are at least so many, the largest first: whole vectors, or all."""
    for number in itertools.count(min(least, pl.cdiv(width, LANES))):
        yield width if number == 1 else max(1, pl.cdiv(pl.cdiv(width, number), LANES)) * LANES


def _write(result: Array, inside: Array, out: Ref) -> None:
    out[...] = jnp.where(inside, result, out[...].astype(jnp.float32)).astype(out.dtype)


def _inside(visits: Visits, v: Array, shape: tuple[int, ...], axis: int = 0) -> Array:
    row = visits.tile[v] * shape[axis] + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    group = visits.group[v]
    return (row >= visits.starts[group]) & (row < visits.ends[group])


def _turned(line: Array, axis: int) -> Array:
    # A column becomes a row by a sum along axis 0, and a row a column along axis 1.
    square = (line.size, line.size)
    on_diagonal = jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)
    return jnp.sum(jnp.where(on_diagonal, jnp.broadcast_to(line, square), 0), axis=axis, keepdims=True)


def _sum(arrays: list[Array]) -> Array:
    return sum(arrays[1:], start=arrays[0])
