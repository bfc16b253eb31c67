"""Lists of updates in the form that XLA's one-shot kernel of `ragged_all_to_all` shares among most thread blocks.

On NVIDIA GPUs of one process the exchange is one kernel. Its grid has `z` blocks of 128 threads for each peer and each
run of `z` updates. `z` is the largest power of two that divides the updates per peer, at most `MOST_BLOCKS` and at most
one block per `ROWS_PER_BLOCK` rows of the operand. Every block copies `1 / z` of each of its updates. So the number of
updates, not their sizes, sets the number of blocks that copy.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

MAX_ONE_SHOT_RANKS = 32
"""Ranks of the one-shot kernel: its barrier has as many slots, and more ranks end in an illegal address
(openxla/xla#47283). `compiler_options` turns the kernel off for more.
"""

MOST_BLOCKS = 64
"""Blocks per peer: `RunRaggedAllToAllKernelImpl` in XLA's `ragged_all_to_all.cc`, read in jaxlib 0.12.0.1."""

ROWS_PER_BLOCK = 16
"""Rows of the operand per block of a peer: the same function."""

VECTOR_BYTES = 8
"""Bytes of the widest vector of a thread. Rows of no multiple are copied in narrower vectors."""

BLOCK_BYTES = 1024
"""Bytes that the 128 threads of a block copy at once, in vectors of 8 bytes."""


def blocks_per_peer(updates: int, operand_rows: int) -> int:
    """Return `z`, the thread blocks of XLA's one-shot kernel that share the updates of one peer."""
    most = min(-(-operand_rows // ROWS_PER_BLOCK), MOST_BLOCKS)
    blocks = 1
    while blocks < most and updates % (2 * blocks) == 0:
        blocks *= 2
    return blocks


def for_one_shot_kernel(
    operand: Shaped[Array, "P *X"], output: Shaped[Array, "Q *X"], updates: tuple[Int[Array, "U"], ...], num_ranks: int
) -> tuple[Shaped[Array, "A *Y"], Shaped[Array, "B *Y"], tuple[Int[Array, "V"], ...]]:
    """Return the operands of an exchange in the form that the one-shot kernel shares among its blocks."""
    # The exchange of the result is bitwise the same; reshape it to `output.shape`.
    split = row_split(operand)
    filled = tuple(fill_updates(split * one, num_ranks) for one in updates)
    return split_rows(operand, split), split_rows(output, split), filled


def fill_updates(updates: Int[Array, "U"], num_ranks: int) -> Int[Array, "V"]:
    """Append empty updates to those of a peer, up to a multiple of `MOST_BLOCKS`."""
    by_peer = updates.reshape(num_ranks, -1)
    return jnp.pad(by_peer, ((0, 0), (0, -by_peer.shape[1] % MOST_BLOCKS))).reshape(-1)


def row_split(operand: Shaped[Array, "P *X"]) -> int:
    """Return the number of finer rows that a row of an operand is viewed as: a power of two, 1 for many rows."""
    # Returns the smallest factor that gives `MOST_BLOCKS * ROWS_PER_BLOCK` rows. It is less if finer rows would have
    # less than `BLOCK_BYTES`, or a part of a vector.
    row_bytes = math.prod(operand.shape[1:]) * operand.dtype.itemsize
    finest = row_bytes // BLOCK_BYTES
    split = 1
    # Blocks share the bytes of an update, not its rows, so finer rows need no whole number of KiB.
    while operand.shape[0] * split < MOST_BLOCKS * ROWS_PER_BLOCK and 2 * split <= finest:
        if row_bytes % (2 * split * VECTOR_BYTES):
            break
        split *= 2
    return split


def split_rows(rows: Shaped[Array, "P *X"], split: int) -> Shaped[Array, "Q *Y"]:
    """View a row as `split` rows."""
    # Returns `[P * split, ...]`. Leading dimensions of a row are split first, so that the view is a bitcast in XLA's
    # usual layout.
    shape, left = list(rows.shape), split
    for axis in range(1, len(shape)):
        factor = math.gcd(left, shape[axis])
        shape[axis], left = shape[axis] // factor, left // factor
    return rows.reshape(rows.shape[0] * split, *shape[1:] if left == 1 else (-1,))
