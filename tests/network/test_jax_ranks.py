"""JAX processes in network namespaces compute the layer, send the planned bytes, and stop if a rank dies."""

import jax
import numpy as np
import pytest

from benchmarks.network.layer import PLAIN, Choice, Sizes, jitted_step, wan_bytes, wan_s
from benchmarks.network.shaping import payload_bytes_per_s
from tests.network.programs import LAYER
from tests.network.sandboxed import run

pytestmark = pytest.mark.slow


@pytest.mark.thorough
@pytest.mark.netns
def test_a_layer_across_datacenters_equals_that_of_one_process_and_moves_what_was_predicted():
    ranks = run("layer", timeout_s=120)
    sizes = Sizes(*LAYER)
    for number, choice in enumerate((PLAIN, Choice(2, 1))):
        assert ranks[0][number]["sent_bytes"] == pytest.approx([wan_bytes(sizes, choice)] * 2, rel=0.03)
        step, args = jitted_step(choice, sizes)
        leaves = jax.tree.leaves(step.lower(*args).compile({"xla_backend_optimization_level": 0})(*args))
        for rank in ranks:
            for leaf, blocks in zip(leaves, rank[number]["leaves"], strict=True):
                want = {tuple(p.start or 0 for p in shard.index): shard.data for shard in leaf.addressable_shards}
                for start, got in blocks:
                    expected = np.asarray(want[tuple(start)]).reshape(-1)[::97]
                    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(np.asarray(leaf)).max(), rtol=0)


@pytest.mark.netns
def test_a_rank_that_dies_in_a_collective_is_named_within_seconds():
    result = run("dead_rank")
    assert "rank 1 was ended by SIGKILL" in result["message"]
    assert result["seconds"] < 20


def test_the_prediction_is_that_of_the_model():
    """Half of a rank's copies cross five times, or its experts cross with their gradients returning."""
    sizes, rate = Sizes(1024, 512, 64), 1e8
    bytes_per_s = payload_bytes_per_s(rate)
    router_bytes = 1.5 * 4 * 512 * 16
    assert wan_bytes(sizes, PLAIN) == 2 * 5 * sizes.token_bytes / 2 + router_bytes
    assert wan_bytes(sizes, Choice(2, 1)) == 2 * 2 * sizes.expert_bytes + router_bytes
    for choice in (PLAIN, Choice(2, 1), Choice(2, 2, 10.0)):
        assert wan_s(sizes, choice, bytes_per_s) == pytest.approx(wan_bytes(sizes, choice) / bytes_per_s)
