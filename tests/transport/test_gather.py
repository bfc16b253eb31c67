from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts, Plan, Topology
from jax_moe_lb.collectives import expert_gather as gather
from jax_moe_lb.collectives.expert_gather import zero_sums
from jax_moe_lb.transport import Gather
from tests.layer_cases import make_mesh
from tests.oracle import random_plan

RANKS, HOME, SLOTS = 8, 3, 6
MESH = make_mesh((RANKS,), ("expert",))
TOPOLOGY = Topology.from_mesh(MESH)
SPEC = PartitionSpec("expert")


def plans():
    rng = np.random.default_rng(0)
    counts = np.ones((RANKS, RANKS * HOME), np.int32)
    drawn = [random_plan(rng, counts, SLOTS, domain)[0] for domain in (8, 4, 1)]
    everywhere = drawn[0].copy()
    everywhere[:, HOME:] = -1
    everywhere[1:, HOME] = 1
    of_one_home = everywhere.copy()
    of_one_home[1:, HOME:] = np.arange(HOME)
    return {
        "any": drawn[0],
        "domains": drawn[1],
        "no replicas": drawn[2],
        "one expert everywhere": everywhere,
        "all of one home": of_one_home,
    }


PLANS = plans()


def weights(dtype):
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(-8, 8, (RANKS * HOME, 2, 5)), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_hold_their_experts_and_gradients_come_home(dtype):
    """Small integers make every sum exact, independent of order."""
    home, quota = weights(dtype), np.zeros((RANKS * HOME, RANKS), np.int32)
    upstream = jnp.asarray(np.random.default_rng(2).integers(-3, 3, (RANKS * SLOTS, 2, 5)), dtype)

    def one_rank(home, upstream, placement):
        plan = Plan(placement, jnp.asarray(quota), domain=8)
        slots, vjp = jax.vjp(lambda w: Gather()(Experts(w, w.swapaxes(1, 2)), plan, TOPOLOGY).up, home)
        return slots, vjp(upstream)[0]

    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, SPEC, PartitionSpec()), out_specs=SPEC))
    for name, placement in PLANS.items():
        slots, gradients = run(home, upstream, jnp.asarray(placement))
        flat = placement.reshape(-1)
        expected = np.where((flat >= 0)[:, None, None], np.asarray(home, np.float32)[np.maximum(flat, 0)], 0)
        np.testing.assert_array_equal(np.asarray(slots, np.float32), expected, err_msg=name)
        sums = np.zeros(home.shape, np.float32)
        np.add.at(sums, flat[flat >= 0], np.asarray(upstream, np.float32)[flat >= 0])
        np.testing.assert_array_equal(np.asarray(gradients, np.float32), sums, err_msg=name)


@pytest.mark.slow
def test_every_form_of_exchange_moves_the_same():
    group, room = gather.Group(("expert",)), RANKS * (SLOTS - HOME)

    def one_rank(home, upstream, wanted):
        there = gather.fetch(home, wanted, HOME, group)
        by_rank = gather.fetch_by_rank((home,), wanted, room, group).reshape(there.shape)
        zeros = zero_sums((upstream,), HOME)
        add = partial(gather.add_at_home, zeros, (upstream,), wanted, HOME, RANKS, group)
        (sums,), (in_place,) = (add(in_place=each) for each in (False, True))
        return there, by_rank, sums, in_place

    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, SPEC, PartitionSpec()), out_specs=SPEC))
    home = np.asarray(weights("float32"))
    for name, placement in PLANS.items():
        wanted = placement[:, HOME:]
        flat, filled = wanted.reshape(-1), wanted.reshape(-1) >= 0
        # The gradient of an empty slot must not be used.
        upstream = np.where(filled, 1.0 + np.arange(wanted.size), np.nan)
        upstream = np.broadcast_to(upstream[:, None, None], (wanted.size, 2, 5)).astype(np.float32)
        there, by_rank, sums, in_place = run(home, upstream, jnp.asarray(wanted))
        np.testing.assert_array_equal(there, np.where(filled[:, None, None], home[flat], 0), err_msg=name)
        np.testing.assert_array_equal(there, by_rank, err_msg=name)
        expected = np.zeros_like(home)
        np.add.at(expected, flat[filled], upstream[filled])
        np.testing.assert_array_equal(sums, expected, err_msg=name)
        np.testing.assert_array_equal(sums, in_place, err_msg=name)


@pytest.mark.slow
def test_memory_is_that_of_slots_not_of_all_experts():
    """64 experts, of which a rank has 8 home experts and 2 replicas."""
    expert_bytes = 32 * 32 * 4

    def one_rank(home, placement):
        plan = Plan(placement, jnp.zeros((64, 8), jnp.int32), domain=8)
        return jax.value_and_grad(
            lambda w: jnp.square(Gather()(Experts(w, w.swapaxes(1, 2)), plan, TOPOLOGY).up).sum()
        )(home)[1]

    run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, PartitionSpec()), out_specs=SPEC))
    shapes = jax.ShapeDtypeStruct((64, 32, 32), jnp.float32), jax.ShapeDtypeStruct((8, 10), jnp.int32)
    temporaries = run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 6 * 10 * expert_bytes
    assert temporaries < 64 * expert_bytes


def test_relays_are_refused():
    placement = jnp.asarray(PLANS["any"])
    plan = Plan(placement, jnp.zeros((24, 8), jnp.int32), relay=placement, domain=8)
    with pytest.raises(ValueError, match=r"plan.relay is set; expected None"):
        Gather()(Experts(weights("float32"), weights("float32").swapaxes(1, 2)), plan, TOPOLOGY)


ONE_PROCESS = replace(TOPOLOGY, platform="cuda", ranks_per_process=RANKS)
PROCESSES = replace(ONE_PROCESS, ranks_per_process=1, processes=tuple(range(RANKS)))


def replicated(topology):
    def one_rank(home, placement):
        plan = Plan(placement, jnp.zeros((RANKS * HOME, RANKS), jnp.int32), domain=RANKS)
        replicas = Gather().start(Experts(home, home.swapaxes(1, 2), home), plan, topology)
        return replicas.up, replicas.down, replicas.gate

    return jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=(SPEC, PartitionSpec()), out_specs=SPEC))


@pytest.mark.parametrize(("topology", "exchanges", "updates"), [(ONE_PROCESS, 3, 64), (PROCESSES, 1, 1)])
def test_all_weight_arrays_travel_as_one_slice_per_rank_if_updates_have_a_cost(topology, exchanges, updates):
    traced = replicated(topology).trace(weights("bfloat16"), jnp.asarray(PLANS["any"]))
    calls = [
        line
        for line in traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
        if "@ragged_all_to_all(" in line
    ]
    assert len(calls) == exchanges
    assert all(line.count(f"tensor<{RANKS * updates}xi") == 4 for line in calls)


@pytest.mark.slow
def test_packed_weights_are_the_same():
    for placement in map(jnp.asarray, PLANS.values()):
        together, apart = (replicated(one)(weights("bfloat16"), placement) for one in (PROCESSES, ONE_PROCESS))
        jax.tree.map(np.testing.assert_array_equal, together, apart)
