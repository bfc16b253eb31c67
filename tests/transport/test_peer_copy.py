import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Experts, Plan, Topology, greedy
from jax_moe_lb.transport import Gather
from jax_moe_lb.transport.replicate import PeerCopy
from tests.layer_cases import Case, make_mesh, sharded_moe, with_gradients

RANKS, HOME, SLOTS = 8, 3, 6
MESH = make_mesh((RANKS,), ("expert",))
TOPOLOGY = Topology.from_mesh(MESH)
SPEC = PartitionSpec("expert")


def experts():
    rng = np.random.default_rng(1)
    up, gate = rng.normal(size=(2, RANKS * HOME, 2, 5))
    down = rng.normal(size=(RANKS * HOME, 5, 2))
    return Experts(*(jnp.asarray(w, jnp.float32) for w in (up, down, gate)))


def slots_and_gradients(replicate, placement, relay=None, topology=TOPOLOGY):
    def one_rank(experts, target, placement, relay):
        plan = Plan(placement, jnp.zeros((RANKS * HOME, RANKS), jnp.int32), relay=relay, domain=RANKS)
        slots, vjp = jax.vjp(lambda e: replicate(e, plan, topology), experts)
        return slots, vjp(target)[0]

    run = jax.shard_map(
        one_rank, mesh=MESH, in_specs=(SPEC, SPEC, PartitionSpec(), PartitionSpec()), out_specs=(SPEC, SPEC)
    )
    rng = np.random.default_rng(2)
    target = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=(RANKS * SLOTS, *w.shape[1:])), jnp.float32), experts())
    return jax.jit(run)(experts(), target, jnp.asarray(placement), relay)


@pytest.mark.slow
def test_a_plan_with_relays_copies_along_them():
    """Expert 0 is relayed from rank to rank; Gather rejects such a plan, and fills the same slots without relays."""
    placement = np.full((RANKS, SLOTS), -1, np.int32)
    placement[:, :HOME] = np.arange(RANKS * HOME).reshape(RANKS, HOME)
    placement[1:, HOME] = 0
    relay = np.repeat(np.arange(RANKS, dtype=np.int32)[:, None], SLOTS, 1)
    relay[1:, HOME] = np.arange(RANKS - 1)
    slots, gradients = slots_and_gradients(PeerCopy(chunk_bytes=16), placement, jnp.asarray(relay))
    of_gather, gradients_of_gather = slots_and_gradients(Gather(), placement)
    jax.tree.map(np.testing.assert_array_equal, slots, of_gather)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, gradients_of_gather)
    relay[3, HOME] = 3
    with pytest.raises(jax.errors.JaxRuntimeError, match="PeerCopy: relay of rank 3, slot 0 is 3; expected a chain"):
        jax.block_until_ready(slots_and_gradients(PeerCopy(), placement, jnp.asarray(relay)))


def test_without_replica_slots_the_home_experts_are_the_slots():
    placement = np.arange(RANKS * HOME, dtype=np.int32).reshape(RANKS, HOME)

    def one_rank(experts, placement):
        return PeerCopy()(experts, Plan(placement, jnp.zeros((24, 8), jnp.int32), domain=8), TOPOLOGY)

    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, PartitionSpec()), out_specs=SPEC))
    jax.tree.map(np.testing.assert_array_equal, run(experts(), jnp.asarray(placement)), experts())


@pytest.mark.thorough
def test_replicas_are_copied_again_in_the_backward_pass():
    """Residuals would take memory in every layer, so the compiler must not merge the two copies."""
    case = Case()
    layer = with_gradients(sharded_moe(MESH, TOPOLOGY, dataclasses.replace(greedy(2), replicate=PeerCopy())))
    x, mask = case.tokens(WORKLOADS[0], RANKS, jnp.float32)
    compiled = layer.lower(x, mask, *case.params(jnp.float32), x).compile().as_text()
    # The CPU compiler of jaxlib 0.10 drops the barrier before merging equal calls.
    copies = 2 if jax.__version_info__ >= (0, 11) else 1
    assert compiled.count('custom_call_target="moe_lb_copy_start"') == copies
