"""Pallas kernels for TPUs that copy rows by index from device memory: gathers of rows, and sums of the rows of entries.

Both read rows in the layout of exchanges, in which the words of a row are contiguous. For sums, XLA would gather the
rows of each choice into an array of its own, in float32; the kernel adds each row to the sum of its entry. After a
gather, XLA would copy all rows into the layout of products; the kernel writes them in this layout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.tpu_vectors import LANES, OLDEST_JAX, SUBLANES
from jax_moe_lb.core.types import DType, Ref, Rows, iota

BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS
"""Entries of one step of the grid."""

IN_FLIGHT = 64
"""Copies of rows in flight, a power of two. 4 KB each cover the latency of device memory."""

UNROLLED = 4
"""Rows added by one iteration, so that the instructions of several rows fill a bundle."""

GATHERED = 128
"""Rows of one step of a gather."""

PACKED = 16
"""Rows of a tile of bfloat16 numbers."""

MOST_LIST_BYTES = 768 * 2**10
"""Bytes of lists in scalar memory, of which a core has 1 MB."""

HIGH = 0xFFFF0000
"""Bits of the number in the upper half of a word."""


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
    # The last block is whole; copies beyond the end read the first row.
    items = jnp.pad(at, (0, num_blocks * GATHERED - num_taken))
    run: Any = pl.pallas_call(
        partial(_gather_block, num_blocks=num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((GATHERED, width), lambda block, *_: (block, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, GATHERED, half // LANES, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((2,)),
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


def _gather_block(items: Ref, rows: Ref, out: Ref, buffers: Ref, semaphores: Ref, *, num_blocks: int) -> None:
    """Write the rows of one block in the layout of products, while those of the next one arrive."""
    block, tile = pl.program_id(0), buffers.shape[2:]
    words = rows.bitcast(jnp.uint32).reshape(rows.shape[0], *tile)
    mine = block & 1

    def start(block: Array) -> None:
        at = block & 1

        def one(i: Array) -> None:
            row = words.at[items[block * GATHERED + i]]
            pltpu.make_async_copy(row, buffers.at[at, i], semaphores.at[at]).start()

        def some(i: Array) -> None:
            for j in range(UNROLLED):
                one(i * UNROLLED + j)

        _for_each(0, GATHERED // UNROLLED, some)

    pl.when(block == 0)(lambda: start(block))
    pl.when(block + 1 < num_blocks)(lambda: start(block + 1))
    # One wait for the bytes of all rows; its source is not read.
    pltpu.make_async_copy(buffers.at[mine], buffers.at[mine], semaphores.at[mine]).wait()
    lines = buffers.reshape(2 * GATHERED * tile[0], LANES)
    half = tile[0] * LANES

    def write(i: Array) -> None:
        into = pl.ds(i * PACKED, PACKED)
        for column in range(tile[0]):
            # The same words of consecutive rows.
            first = (mine * GATHERED + i * PACKED) * tile[0] + column
            low, high = _halves(lines[pl.ds(first, PACKED, stride=tile[0])])
            out[into, pl.ds(column * LANES, LANES)] = low.astype(out.dtype)
            out[into, pl.ds(half + column * LANES, LANES)] = high.astype(out.dtype)

    _for_each(0, GATHERED // PACKED, write)


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
    # An item has the row and the entry in its block. Copies beyond the last item read the first row.
    items = jnp.pad(order << BLOCK_BITS | sorted_entry & (BLOCK - 1), (0, IN_FLIGHT))
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
                pltpu.VMEM((2, BLOCK, *tile), jnp.float32),
                pltpu.VMEM((IN_FLIGHT, *tile), jnp.uint32),
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
    """Return rows in the order of their entries, and these entries."""
    num_rows = entry.shape[0]
    bits = max(num_rows - 1, 1).bit_length()
    if bits + num_entries.bit_length() <= 32:
        # In one word: sorts of several operands take the compiler long.
        keys = jax.lax.sort(entry.astype(jnp.uint32) << bits | iota(num_rows).astype(jnp.uint32), is_stable=False)
        return (keys & ((1 << bits) - 1)).astype(jnp.int32), (keys >> bits).astype(jnp.int32)
    sorted_entry, order = jax.lax.sort((entry, iota(num_rows)), num_keys=2, is_stable=False)
    return order, sorted_entry


def _sum_block(first: Ref, items: Ref, *refs: Ref, tile: tuple[int, int], is_weighted: bool) -> None:
    """Sum the rows of the entries of one block, while the rows of later items arrive."""
    rows, out, sums, ring, semaphores = refs[is_weighted:]
    block, words = pl.program_id(0), rows.bitcast(jnp.uint32).reshape(rows.shape[0], *tile)
    begin, end = first[block], first[block + 1]

    def copy(item: Array) -> Any:
        place = item & (IN_FLIGHT - 1)
        return pltpu.make_async_copy(words.at[items[item] >> BLOCK_BITS], ring.at[place], semaphores.at[place])

    @pl.when(block == 0)
    def _() -> None:
        _for_each(0, IN_FLIGHT, lambda item: copy(item).start())

    def add(item: Array) -> None:
        low, high = _halves(ring[item & (IN_FLIGHT - 1)])
        if is_weighted:
            weight = refs[0][items[item] >> BLOCK_BITS]
            low, high = low * weight, high * weight
        entry = items[item] & (BLOCK - 1)
        sums[0, entry] += low
        sums[1, entry] += high

    def add_some(item: Array, count: int) -> None:
        for i in range(count):
            copy(item + i).wait()
        for i in range(count):
            add(item + i)
        for i in range(count):
            copy(item + i + IN_FLIGHT).start()

    sums[...] = jnp.zeros_like(sums)
    # A shift: Mosaic's quotient of integers depends on the kind of the default device.
    whole = (end - begin) >> (UNROLLED.bit_length() - 1)
    _for_each(0, whole, lambda i: add_some(begin + i * UNROLLED, UNROLLED))
    _for_each(begin + whole * UNROLLED, end, lambda item: add_some(item, 1))
    into = out.bitcast(jnp.uint32).reshape(BLOCK, *tile)

    def write(i: Array) -> None:
        at = pl.ds(i * SUBLANES, SUBLANES)
        into[at] = _rounded_bits(sums[0, at]) >> 16 | _rounded_bits(sums[1, at]) & jnp.uint32(HIGH)

    _for_each(0, BLOCK // SUBLANES, write)

    @pl.when(block == pl.num_programs(0) - 1)
    def _() -> None:
        _for_each(end, end + IN_FLIGHT, lambda item: copy(item).wait())


def _for_each(begin: Array | int, end: Array | int, run: Callable[[Array], None]) -> None:
    def step(i: Array, carry: Array) -> Array:
        run(i)
        return carry

    jax.lax.fori_loop(begin, end, step, 0)


def _halves(words: Array) -> tuple[Array, Array]:
    """Return the bfloat16 numbers in the lower and upper halves of words, as float32."""
    low, high = words << 16, words & jnp.uint32(HIGH)
    return jax.lax.bitcast_convert_type(low, jnp.float32), jax.lax.bitcast_convert_type(high, jnp.float32)


def _rounded_bits(values: Array) -> Array:
    """Return the bits of float32 values rounded to bfloat16, to nearest even, in the upper halves of words."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    near = bits + jnp.uint32(0x7FFF) + (bits >> 16 & jnp.uint32(1))
    return jnp.where(values == values, near, jnp.uint32(0x7FC00000))
