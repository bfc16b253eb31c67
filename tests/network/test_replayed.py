"""Counts that the replaying router reproduces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.network.replayed import OWN, Replayed
from jax_moe_lb import TokenInfo, TopK


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[10, 4, 3, 3], [5, 5, 5, 5], [0, 10, 10, 0]])
def test_counts_are_routed_exactly_and_tokens_have_distinct_experts(counts: list[int]) -> None:
    num_tokens, per_token = 10, 2
    records = np.array([[counts, counts[::-1]]], np.int32)
    router = Replayed(router=TopK(per_token), records=records)
    logits = jax.random.normal(jax.random.key(0), (num_tokens, 4))
    mesh = jax.make_mesh((2, 1), ("node", "expert"), devices=jax.devices()[:2])
    # A group of the layer has one rank here, and both ranks have the same first token.
    route = jax.shard_map(
        lambda logits: router(logits, jnp.zeros(4), TokenInfo()).experts,
        mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(("node", "expert")),
    )  # fmt: skip
    for rank, experts in enumerate(np.split(np.asarray(jax.jit(route)(logits)), 2)):
        assert (np.bincount(np.ravel(experts), minlength=4) == records[0, rank]).all()
        assert all(len(set(row)) == per_token for row in experts.tolist())


@pytest.mark.slow
def test_without_a_record_the_router_follows_its_logits() -> None:
    top_k = TopK(2)
    router = Replayed(router=top_k, records=np.array([[[3, 3, 0, 0]]], np.int32))
    logits = jax.random.normal(jax.random.key(0), (3, 4))
    assert (router(logits, jnp.full(4, OWN)).experts == top_k(logits).experts).all()
