import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb.collectives.one_shot_lists import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    ROWS_PER_BLOCK,
    VECTOR_BYTES,
    blocks_per_peer,
    for_one_shot_kernel,
    row_split,
    split_rows,
)
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
from tests.layer_cases import make_mesh
from tests.marks import parametrize

RANKS = 8
MESH = make_mesh((RANKS,), ("expert",))


@pytest.mark.parametrize(
    ("updates", "rows", "blocks"),
    [(1, 32768, 1), (18, 32768, 2), (2, 16, 1), (64, 1024, 64), (64, 16, 1), (128, 60, 4)],
)
def test_blocks_are_those_of_the_grid_of_xla(updates, rows, blocks):
    assert blocks_per_peer(updates, rows) == blocks


def lists(rng, slots, num_rows):
    """Sizes with empty slots, peers and sources; `[R, R * S]` offsets and sizes of a legal exchange."""
    size = rng.integers(0, max(num_rows // (RANKS * slots), 1) + 1, (RANKS, RANKS, slots))
    size *= rng.integers(0, 2, (RANKS, 1, slots)) * rng.integers(0, 4, (RANKS, RANKS, 1)).clip(max=1)
    first = (np.cumsum(size.reshape(RANKS, -1), 1) - size.reshape(RANKS, -1)).reshape(size.shape)
    landed = size.transpose(1, 0, 2).reshape(RANKS, -1)
    lands = (np.cumsum(landed, 1) - landed).reshape(RANKS, RANKS, slots).transpose(1, 0, 2)
    received = size.transpose(1, 0, 2)
    return [one.reshape(-1).astype(np.int32) for one in (first, size, lands, received)]


def exchange(filled):
    def one_rank(operand, output, *updates):
        rows, into = operand, output
        if filled:
            rows, into, updates = for_one_shot_kernel(operand, output, updates, RANKS)
        return ragged_all_to_all(rows, into, Slices(*updates), Group(("expert",))).reshape(output.shape)

    spec = PartitionSpec("expert")
    return jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(spec,) * 6, out_specs=spec))


@pytest.mark.slow
@parametrize(
    "slots, num_rows, row, dtype",
    [(18, 300, (12,), "bfloat16"), (2, 16, (64, 96), "bfloat16")],
    [
        (1, 300, (1,), "float32"),
        (70, 300, (512,), "bfloat16"),
        (2, 16, (3 * 64 * 96,), "float32"),
        (2, 16, (360, 360), "bfloat16"),
    ],
    ids=["tokens", "weights of experts", "row weights", "many slots", "gradients of replicas", "no whole KiB"],
)
def test_a_filled_exchange_has_the_same_bits(slots, num_rows, row, dtype):
    rng = np.random.default_rng(0)
    plain, filled = exchange(False), exchange(True)
    for _ in range(5):
        operand, output = (jnp.asarray(rng.normal(size=(RANKS * num_rows, *row)), dtype) for _ in range(2))
        updates = lists(rng, slots, num_rows)
        np.testing.assert_array_equal(plain(operand, output, *updates), filled(operand, output, *updates))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((32768, 2048), "bfloat16", (32768, 2048)),
        ((16, 2048, 768), "bfloat16", (1024, 32, 768)),
        ((2, 4718592), "bfloat16", (1024, 9216)),
        ((2, 2880, 2880), "bfloat16", (1024, 45, 360)),
        ((2, 2880), "bfloat16", (8, 720)),
        ((16, 12), "float32", (16, 12)),
    ],
)
def test_few_rows_are_split_to_feed_all_blocks(shape, dtype, expected):
    splits = []

    def split(rows):
        splits.append(row_split(rows))
        return split_rows(rows, splits[0])

    assert jax.eval_shape(split, jax.ShapeDtypeStruct(shape, dtype)).shape == expected
    row_bytes = math.prod(expected[1:]) * jnp.dtype(dtype).itemsize
    assert row_bytes % VECTOR_BYTES == 0
    assert expected[0] >= MOST_BLOCKS * ROWS_PER_BLOCK or row_bytes < 2 * BLOCK_BYTES


def lowered(in_one_process):
    """Return the lowered text of an exchange with 18 updates per peer, by platform."""

    def one_rank(operand, output, *updates):
        return ragged_all_to_all(operand, output, Slices(*updates), Group(("expert",), in_one_process))

    spec = PartitionSpec("expert")
    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(spec,) * 6, out_specs=spec))
    rows = jnp.zeros((RANKS * 2048, 8))
    updates = [jnp.zeros(RANKS * RANKS * 18, jnp.int32)] * 4
    return {
        platform: run.trace(rows, rows, *updates).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cuda", "rocm", "tpu")
    }


FILLED = f"tensor<{RANKS * MOST_BLOCKS}xi32>"


def test_lists_for_cuda_are_filled_in_one_process_only():
    apart, together = lowered(False), lowered(True)
    assert FILLED in together["cuda"]
    for text in (*apart.values(), together["rocm"], together["tpu"]):
        assert FILLED not in text


def test_lists_of_more_ranks_than_the_kernel_has_are_not_filled(monkeypatch):
    monkeypatch.setattr("jax_moe_lb.collectives.ragged_all_to_all.MAX_ONE_SHOT_RANKS", RANKS - 1)
    assert FILLED not in lowered(True)["cuda"]
