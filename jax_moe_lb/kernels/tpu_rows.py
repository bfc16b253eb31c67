"""Pallas kernels for TPUs that copy rows by index from device memory: gathers of rows, and sums of the rows of entries.

Both read rows in the layout of exchanges, in which the words of a row are contiguous. For sums, XLA would gather the
rows of each choice into an array of its own, in float32; the kernel adds each row to the sum of its entry. After a
gather, XLA would copy all rows into the layout of products; the kernel writes them in this layout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.tpu_vectors import LANES, OLDEST_JAX, SUBLANES
from jax_moe_lb.core.types import DType, Ref, Rows, iota

BLOCK_BITS = 7
BLOCK = 1 << BLOCK_BITS
"""Entries of one step of the grid."""

ROW_SHIFT = BLOCK_BITS + 1

BATCH_BITS = 3
BATCH = 1 << BATCH_BITS
"""Rows of one wait."""

IN_FLIGHT = 16
"""Batches of copies in flight, a power of two: their bytes cover the latency of device memory."""

GATHERED = 128
"""Rows of one block of a gather."""

BLOCKS = 4
"""Blocks of a gather in memory, a power of two: one is written while the others arrive."""

MOST_RING_BYTES = 8 * 2**20
"""Bytes of these blocks. Of wider rows there are two, since a kernel has 16 MB for them and twice its results."""

PACKED = 16
"""Rows of a tile of bfloat16 numbers."""

MOST_LIST_BYTES = 576 * 2**10
"""Bytes of lists in scalar memory, of which a core has 1 MB. With 640 KB the compiler for v5e spills scalars to device
memory, and waits for them for each batch of rows."""

HIGH = 0xFFFF0000
"""Bits of the number in the upper half of a word."""

Sums = tuple[Array, Array]
"""Sums of an entry, of the lower and upper halves of words."""


def why_not_sum(rows: Rows, is_weighted: bool) -> str | None:
    """Return the reason why `sum_rows_of_entries` cannot sum rows, or `None`."""
    return why_not(rows.dtype, rows.shape[1], rows.shape[0] * (1 + is_weighted), 2 * LANES)


def why_not_gather(rows: Rows, at: Int[Array, "B"]) -> str | None:
    """Return the reason why `gather_rows` cannot take rows, or `None`."""
    return why_not(rows.dtype, rows.shape[1], at.shape[0])


def why_not(dtype: DType, width: int, num_items: int, multiple: int = 2 * LANES * SUBLANES) -> str | None:
    """Return the reason why a kernel cannot copy rows of a dtype and width by lists of so many items, or `None`."""
    if (reason := why_older_jax(OLDEST_JAX)) is not None:
        return reason
    if dtype != jnp.bfloat16:
        return f"rows are {dtype}; expected bfloat16"
    if width % multiple:
        return f"width is {width}; expected a multiple of {multiple}"
    if 4 * num_items > MOST_LIST_BYTES:
        return f"lists have {4 * num_items} bytes; expected at most {MOST_LIST_BYTES}"
    return None


def gather_rows(rows: Rows, at: Int[Array, "B"], *, interpret: bool = False) -> Float[Array, "B H"]:
    """Return `rows[at]` in the layout of products."""
    (num_rows, width), num_taken = rows.shape, at.shape[0]
    half, num_blocks = width // 2, pl.cdiv(num_taken, GATHERED)
    in_ring = BLOCKS if BLOCKS * GATHERED * width * rows.dtype.itemsize <= MOST_RING_BYTES else 2
    # All blocks are whole; copies beyond the end read the first row.
    items = jnp.pad(at, (0, (num_blocks + in_ring - 1) * GATHERED - num_taken))
    run: Any = pl.pallas_call(
        _gather_block,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((GATHERED, width), lambda block, *_: (block, 0)),
            scratch_shapes=[
                pltpu.VMEM((in_ring, GATHERED, half // LANES, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((in_ring,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_taken, width), rows.dtype, manual_axis_type=jax.typeof(rows).manual_axis_type
        ),
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="moe_gather_rows",
        interpret=interpret,
    )
    return run(items, rows.reshape(num_rows, 2, half))


def _gather_block(items: Ref, rows: Ref, out: Ref, ring: Ref, semaphores: Ref) -> None:
    """Write the rows of one block in the layout of products, while those of later blocks arrive."""
    block, in_ring, tile = pl.program_id(0), ring.shape[0], ring.shape[2:]
    words = rows.bitcast(jnp.uint32).reshape(rows.shape[0], *tile)
    lines, half = ring.reshape(in_ring * GATHERED * tile[0], LANES), tile[0] * LANES

    def copies(block: Array | int, i: Array) -> list[Any]:
        place, first = block & (in_ring - 1), block * GATHERED + i * PACKED
        # All items first: the compiler keeps the order of loads and copies.
        taken = [words.at[row] for row in [items[first + j] for j in range(PACKED)]]
        return [
            pltpu.make_async_copy(row, ring.at[place, i * PACKED + j], semaphores.at[place])
            for j, row in enumerate(taken)
        ]

    def start(block: Array | int, i: Array) -> None:
        for copy in copies(block, i):
            copy.start()

    def wait(block: Array) -> None:
        place = block & (in_ring - 1)
        # One wait for the bytes of all rows; its source is not read.
        pltpu.make_async_copy(ring.at[place], ring.at[place], semaphores.at[place]).wait()

    def step(i: Array) -> None:
        first, into = ((block & (in_ring - 1)) * GATHERED + i * PACKED) * tile[0], pl.ds(i * PACKED, PACKED)
        # The same words of consecutive rows.
        arrived = [lines[pl.ds(first + column, PACKED, stride=tile[0])] for column in range(tile[0])]
        # Into the place of the block before, whose rows were read.
        further = copies(block + in_ring - 1, i)
        for column, (low, high) in enumerate(map(halves, arrived)):
            # The instructions of copies and stores, whose order the compiler keeps, share bundles.
            for copy in further[column * PACKED // tile[0] : (column + 1) * PACKED // tile[0]]:
                copy.start()
            out[into, pl.ds(column * LANES, LANES)] = low.astype(out.dtype)
            out[into, pl.ds(half + column * LANES, LANES)] = high.astype(out.dtype)

    steps = GATHERED // PACKED
    for before in range(in_ring - 1):
        pl.when(block == 0)(partial(_for_each, 0, steps, partial(start, before)))
    wait(block)
    _for_each(0, steps, step)
    is_last = block == pl.num_programs(0) - 1
    pl.when(is_last)(lambda: _for_each(block + 1, block + in_ring, wait))


def sum_rows_of_entries(
    rows: Rows,
    entry: Int[Array, "A"],
    weights: Float[Array, "A"] | None,
    num_entries: int,
    *,
    interpret: bool = False,
) -> Float[Array, "B H"]:
    """Sum the weighted rows per entry in float32, and round once; rows of entry `B` belong to none."""
    (num_rows, width), num_blocks = rows.shape, pl.cdiv(num_entries, BLOCK)
    half = width // 2
    tile = (half // LANES, LANES) if half % (LANES * SUBLANES) == 0 else (1, half)
    order, sorted_entry = _by_entry(entry, num_entries)
    # An item has the row, whether it is the first one of its entry, and the entry in its block. Copies beyond the last
    # item read the first row.
    is_first = jnp.diff(sorted_entry, prepend=-1) != 0
    items = order << ROW_SHIFT | is_first.astype(jnp.int32) << BLOCK_BITS | sorted_entry & (BLOCK - 1)
    items = jnp.pad(items, (0, (IN_FLIGHT + 1) * BATCH))
    blocks = jnp.minimum(iota(num_blocks + 1) * BLOCK, num_entries)
    first = (sorted_entry[None] < blocks[:, None]).sum(1, dtype=jnp.int32)
    lists = (first, items) if weights is None else (first, items, weights)
    run: Any = pl.pallas_call(
        partial(_sum_block, tile=tile, is_weighted=weights is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(num_blocks,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((BLOCK, 2, half), lambda block, *_: (block, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((IN_FLIGHT, BATCH, *tile), jnp.uint32),
                pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(
            (num_entries, 2, half), rows.dtype, manual_axis_type=jax.typeof(rows).manual_axis_type
        ),
        # All rows of items are in range.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="moe_sum_rows",
        interpret=interpret,
    )
    return run(*lists, rows.reshape(num_rows, 2, half)).reshape(num_entries, width)


def _by_entry(entry: Int[Array, "A"], num_entries: int) -> tuple[Int[Array, "A"], Int[Array, "A"]]:
    num_rows = entry.shape[0]
    bits = max(num_rows - 1, 1).bit_length()
    if bits + num_entries.bit_length() <= 32:
        # In one word: sorts of several operands take the compiler long.
        keys = jax.lax.sort(entry.astype(jnp.uint32) << bits | iota(num_rows).astype(jnp.uint32), is_stable=False)
        return (keys & ((1 << bits) - 1)).astype(jnp.int32), (keys >> bits).astype(jnp.int32)
    sorted_entry, order = jax.lax.sort((entry, iota(num_rows)), num_keys=2, is_stable=False)
    return order, sorted_entry


class _Arrivals(NamedTuple):
    """Batches of rows that arrive in a ring of buffers."""

    words: Ref  # all rows
    items: Ref  # rows to copy
    ring: Ref  # `[IN_FLIGHT, BATCH, *tile]`
    semaphores: Ref  # one of each batch in flight

    def start(self, batch: Array) -> None:
        place = batch & (IN_FLIGHT - 1)
        # All items first: the compiler keeps the order of loads and copies.
        for i, row in enumerate([self.items[batch * BATCH + i] >> ROW_SHIFT for i in range(BATCH)]):
            pltpu.make_async_copy(self.words.at[row], self.ring.at[place, i], self.semaphores.at[place]).start()

    def wait(self, batch: Array) -> None:
        place = batch & (IN_FLIGHT - 1)
        # One wait for the bytes of all rows; its source is not read.
        pltpu.make_async_copy(self.ring.at[place], self.ring.at[place], self.semaphores.at[place]).wait()

    def row(self, batch: Array, i: Array | int) -> tuple[Array, Array]:
        """Return the item and the words of a row of a batch."""
        return self.items[batch * BATCH + i], self.ring[batch & (IN_FLIGHT - 1), i]


def _sum_block(first: Ref, items: Ref, *refs: Ref, tile: tuple[int, int], is_weighted: bool) -> None:
    """Sum the rows of the entries of one block, while the rows of later batches arrive."""
    rows, out, ring, semaphores = refs[is_weighted:]
    block, words = pl.program_id(0), rows.bitcast(jnp.uint32).reshape(rows.shape[0], *tile)
    into = out.bitcast(jnp.uint32).reshape(BLOCK, *tile)
    begin, end = first[block], first[block + 1]
    arrivals = _Arrivals(words, items, ring, semaphores)

    def add(item: Array, row: Array, sums: Sums) -> Sums:
        low, high = halves(row)
        if is_weighted:
            weight = refs[0][item >> ROW_SHIFT]
            low, high = low * weight, high * weight
        # Then the sums so far are those of another entry.
        is_first = jnp.full(tile, item) & BLOCK != 0
        low, high = (jnp.where(is_first, 0, total) + half for total, half in zip(sums, (low, high), strict=True))
        # The last row of an entry writes the whole sum.
        into[item & (BLOCK - 1)] = packed(low, high)
        return low, high

    def start_next(batch: Array) -> None:
        # Into the place of the batch before, whose rows were read.
        arrivals.start(batch + IN_FLIGHT - 1)

    def add_all(batch: Array, sums: Sums) -> Sums:
        arrivals.wait(batch)
        arrived = [arrivals.row(batch, i) for i in range(BATCH)]
        start_next(batch)
        for item, row in arrived:
            sums = add(item, row, sums)
        return sums

    def add_some(batch: Array, sums: Sums) -> Sums:
        at = batch * BATCH

        # A batch on the border of blocks arrives in the first of them.
        @pl.when(at >= begin)
        def _() -> None:
            arrivals.wait(batch)
            start_next(batch)

        def one(i: Array, sums: Sums) -> Sums:
            return add(*arrivals.row(batch, i), sums)

        return jax.lax.fori_loop(jnp.maximum(begin - at, 0), jnp.minimum(end - at, BATCH), one, sums)

    def step(batch: Array, sums: Sums) -> Sums:
        is_whole = (batch * BATCH >= begin) & (batch * BATCH + BATCH <= end)
        return jax.lax.cond(is_whole, add_all, add_some, batch, sums)

    pl.when(block == 0)(lambda: _for_each(0, IN_FLIGHT - 1, arrivals.start))
    # Entries may have no rows.
    into[...] = jnp.zeros_like(into)
    zeros, past = jnp.zeros(tile, jnp.float32), (end + BATCH - 1) >> BATCH_BITS
    jax.lax.fori_loop(begin >> BATCH_BITS, past, step, (zeros, zeros))
    is_last = block == pl.num_programs(0) - 1
    pl.when(is_last)(lambda: _for_each(past, past + IN_FLIGHT - 1, arrivals.wait))


def _for_each(begin: Array | int, end: Array | int, run: Callable[[Array], None]) -> None:
    def step(i: Array, carry: Array) -> Array:
        run(i)
        return carry

    jax.lax.fori_loop(begin, end, step, 0)


def halves(words: Array) -> tuple[Array, Array]:
    """Return the bfloat16 numbers in the lower and upper halves of words, as float32."""
    low, high = words << 16, words & jnp.uint32(HIGH)
    return jax.lax.bitcast_convert_type(low, jnp.float32), jax.lax.bitcast_convert_type(high, jnp.float32)


def packed(low: Array, high: Array) -> Array:
    """Return words with two numbers rounded to bfloat16, to nearest even; the inverse of `halves`."""
    return pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16)
