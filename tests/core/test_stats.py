"""Load metrics under the names of the literature, and mesh axes of statistics."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts, MoEParams, Stats, TopK, Topology, greedy, moe
from jax_moe_lb.core.manual_axes import varying_axes
from tests.layer_cases import make_mesh


@pytest.mark.parametrize("xp", [np, jnp], ids=["host", "device"])
def test_max_violation_is_that_of_the_experts_of_each_group(xp):
    counts = np.array([[[4, 0, 2], [4, 2, 0]], [[1, 1, 1], [1, 1, 1]], np.zeros((2, 3))], np.int32)
    stats = SimpleNamespace(counts=xp.asarray(counts), imbalance_after=xp.ones(3, np.float32))
    # Experts of the first group get 8, 2 and 2 copies, 4 on average.
    np.testing.assert_allclose(Stats.max_violation.fget(stats), [1.0, 0.0, 0.0])
    assert Stats.overload_factor.fget(stats) is stats.imbalance_after


@pytest.mark.slow
def test_all_leaves_vary_over_the_data_axes():
    """One entry of `out_specs` then fits all leaves in a `shard_map` of one's own."""
    mesh = make_mesh((2, 2), ("data", "expert"))
    topology, found = Topology.from_mesh(mesh), set()

    def one_rank(x, kernel, experts):
        y, stats, _ = moe(x, MoEParams(kernel, experts), TopK(2), greedy(1), topology)
        found.update(varying_axes(leaf) for leaf in jax.tree.leaves(stats))
        return y, stats.of_group

    tokens, groups = PartitionSpec(("data", "expert")), PartitionSpec(topology.data_axes)
    specs = {"in_specs": (tokens, PartitionSpec(), PartitionSpec("expert")), "out_specs": (tokens, groups)}
    experts = Experts(jnp.ones((4, 8, 8)), jnp.ones((4, 8, 8)))
    run = jax.shard_map(one_rank, mesh=mesh, **specs)
    _, stats = jax.eval_shape(run, jnp.ones((16, 8)), jnp.ones((8, 4)), experts)
    assert found == {frozenset({"data"})}
    assert stats.rounds.shape == stats.loss.shape == (2,)
