"""Copies of experts between ranks, from home and along relays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts, Plan, Topology, greedy
from jax_moe_lb.core import check_plan, traffic
from jax_moe_lb.transport import Gather, PeerCopy, Relay
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

    specs = (SPEC, SPEC, PartitionSpec(), PartitionSpec())
    run = jax.shard_map(one_rank, mesh=MESH, in_specs=specs, out_specs=(SPEC, SPEC))
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
    layer = with_gradients(sharded_moe(MESH, TOPOLOGY, dataclasses.replace(greedy(2), replicate=PeerCopy())))
    compiled = layer.lower(*Case().arguments("balanced", RANKS)).compile().as_text()
    # The CPU compiler of jaxlib 0.10 drops the barrier before merging equal calls.
    copies = 2 if jax.__version_info__ >= (0, 11) else 1
    assert compiled.count('custom_call_target="moe_lb_copy_start"') == copies


START = np.arange(RANKS * HOME, dtype=np.int32).reshape(RANKS, HOME)


def popular_placement():
    """Return experts 0 and 3 on all ranks, and random others."""
    placement = np.full((RANKS, SLOTS), -1, np.int32)
    placement[:, :HOME] = START
    placement[1:, HOME] = 0
    placement[np.arange(RANKS) != 1, HOME + 1] = 3
    placement[2:5, HOME + 2] = [15, 6, 6]
    return placement


def planned(placement, **options):
    quota = np.zeros((RANKS * HOME, RANKS), np.int32)
    return Relay(**options).plan(Plan(placement, quota, domain=RANKS))


def depths(plan):
    """Return the number of consecutive copies from home to each replica."""
    home, out = plan.num_home, np.zeros_like(plan.placement)
    for rank, slot in np.argwhere(plan.placement >= 0):
        at, expert = rank, plan.placement[rank, slot]
        while at != expert // home:
            at = plan.relay[at, np.flatnonzero(plan.placement[at] == expert)[0]]
            out[rank, slot] += 1
    return out


def test_of_many_replicas_some_forward():
    plan = planned(popular_placement())
    check_plan(plan, np.zeros((RANKS, RANKS * HOME), np.int32))
    # Seven replicas each: two relays, so home sends two copies, and the relays the other five.
    assert plan.relay[:, HOME].tolist() == [-1, 0, 0, 1, 2, 1, 2, 1]
    assert depths(plan)[:, HOME:].max() == 2
    assert (depths(plan)[:, :HOME] == 0).all()
    direct = dataclasses.replace(plan, relay=None)
    counts = np.zeros((RANKS, RANKS * HOME), np.int32)
    assert traffic(direct, counts).fan_out.tolist() == [7, 7, 2, 0, 0, 1, 0, 0]
    assert traffic(plan, counts).fan_out.max() == 5
    assert traffic(plan, counts).fan_out.sum() == traffic(plan, counts).replicas == 17


def test_relays_of_later_experts_are_ranks_that_send_nothing_yet():
    relays = planned(popular_placement()).relay[:, HOME + 1]
    assert set(relays[[0, 2, 3, 4, 5, 6, 7]]) == {1, 3, 4}


@pytest.mark.slow
def test_slots_and_gradients_are_those_of_copies_from_home_to_the_bit():
    placement = popular_placement()
    relayed = slots_and_gradients(Relay(PeerCopy(chunk_bytes=16)), placement)
    jax.tree.map(np.testing.assert_array_equal, relayed, slots_and_gradients(PeerCopy(), placement))
    slots, gradients = slots_and_gradients(Gather(), placement)
    jax.tree.map(np.testing.assert_array_equal, relayed[0], slots)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), relayed[1], gradients)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [PeerCopy(), Relay()])
def test_ranks_of_several_processes_gather_without_relays(copies, monkeypatch):
    apart, placement = dataclasses.replace(TOPOLOGY, ranks_per_process=1), popular_placement()
    expected = slots_and_gradients(Gather(), placement, topology=apart)
    monkeypatch.setattr("jax_moe_lb.transport.replicate.start", None)
    monkeypatch.setattr("jax_moe_lb.transport.replicate.add_copies_at_home", None)
    jax.tree.map(np.testing.assert_array_equal, slots_and_gradients(copies, placement, topology=apart), expected)


def test_a_plan_with_relays_is_refused():
    plan = planned(popular_placement())
    with pytest.raises(ValueError, match=r"plan\.relay is set; expected None, as Relay plans them"):
        Relay()(experts(), plan, TOPOLOGY)
