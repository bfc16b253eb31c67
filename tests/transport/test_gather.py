import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_moe_lb import Experts, Plan, Topology
from jax_moe_lb.transport import Gather
from tests.layer_cases import make_mesh
from tests.marks import parametrize
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


ONE_PROCESS = replace(TOPOLOGY, platform="cuda", ranks_per_process=RANKS)
PROCESSES = replace(ONE_PROCESS, ranks_per_process=1, processes=tuple(range(RANKS)))
STEPS = replace(TOPOLOGY, ranks_per_process=1)
NODES = Topology.from_mesh(make_mesh((2, 4), ("node", "gpu")), ("node", "gpu"))


@pytest.mark.slow
@parametrize(
    "topology, dtype",
    [(TOPOLOGY, "bfloat16"), (PROCESSES, "bfloat16"), (STEPS, "float32"), (NODES, "float32")],
    itertools.product([TOPOLOGY, PROCESSES, STEPS, NODES], ["float32", "bfloat16"]),
)
def test_slots_hold_their_experts_and_gradients_come_home(topology, dtype):
    """Small integers make every sum exact, independent of order."""
    shape, axes = tuple(level.size for level in topology.levels), topology.expert_axes
    mesh, spec, domain = make_mesh(shape, axes), PartitionSpec(axes), topology.ranks_per_domain
    home, quota = weights(dtype), np.zeros((RANKS * HOME, RANKS), np.int32)

    def one_rank(home, upstream, placement):
        plan = Plan(placement, jnp.asarray(quota), domain=domain)
        slots, vjp = jax.vjp(lambda experts: Gather()(experts, plan, topology), Experts(home, home.mT, 2 * home))
        return slots, vjp(Experts(upstream, upstream.mT, 2 * upstream))[0]

    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, spec, PartitionSpec()), out_specs=spec))
    for name, placement in PLANS.items() if domain == RANKS else [("domains", PLANS["domains"])]:
        flat = placement.reshape(-1)
        upstream = np.random.default_rng(2).integers(-3, 3, (RANKS * SLOTS, 2, 5)).astype(np.float32)
        # The gradient of an empty slot must not be used.
        upstream[flat < 0] = np.nan
        found = run(home, jnp.asarray(upstream, dtype), jnp.asarray(placement))
        expected = np.where((flat >= 0)[:, None, None], np.asarray(home, np.float32)[np.maximum(flat, 0)], 0)
        sums = np.zeros(home.shape, np.float32)
        np.add.at(sums, flat[flat >= 0], upstream[flat >= 0])
        for got, want in zip(found, (expected, sums), strict=True):
            for kind, factor in ((got.up, 1), (got.down.mT, 1), (got.gate, 2)):
                np.testing.assert_array_equal(np.asarray(kind, np.float32), factor * want, err_msg=name)


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


def replicated(topology):
    shape, axes = tuple(level.size for level in topology.levels), topology.expert_axes
    mesh, spec = make_mesh(shape, axes), PartitionSpec(axes)

    def one_rank(home, placement):
        plan = Plan(placement, jnp.zeros((RANKS * HOME, RANKS), jnp.int32), domain=topology.ranks_per_domain)
        replicas = Gather().start(Experts(home, home.swapaxes(1, 2), home), plan, topology)
        return replicas.up, replicas.down, replicas.gate

    return jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (NODES, "[[0, 1, 2, 3], [4, 5, 6, 7]]"),
        # Domains that are no blocks of the innermost axes exchange among all ranks.
        (replace(NODES, ranks_per_domain=2), "[[0, 1, 2, 3, 4, 5, 6, 7]]"),
        (replace(NODES, ranks_per_domain=8), "[[0, 1, 2, 3, 4, 5, 6, 7]]"),
    ],
)
def test_replicas_travel_among_the_ranks_of_a_domain(topology, groups):
    traced = replicated(topology).trace(weights("bfloat16"), jnp.asarray(PLANS["no replicas"]))
    found = re.findall(
        r"@ragged_all_to_all\(.*replica_groups = dense<(.*?)>", traced.lower(lowering_platforms=("tpu",)).as_text()
    )
    assert set(found) == {groups}


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
