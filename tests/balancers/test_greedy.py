import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Plan, Topology
from jax_moe_lb.balancers import Greedy
from jax_moe_lb.core import imbalance, load, plain_plan, traffic
from tests.balancers.plans import plan_for as planned
from tests.layer_cases import BY_NAME


def plan_for(counts, domain=None, slots=None, **options):
    return planned(Greedy(**options), counts, slots, domain)


def test_one_expert_with_all_tokens_is_shared_by_all():
    counts = np.zeros((8, 8), np.int32)
    counts[:, 3] = 100
    assert load(plan_for(counts, slots=2)).tolist() == [100] * 8


@pytest.mark.slow
def test_an_existing_replica_is_used_before_a_new_one_is_made():
    """Another balancer has put expert 0 on rank 1, with none of its tokens."""
    counts = np.diag([12, 0, 6]).astype(np.int32)
    topology = Topology.flat(3)
    start = plain_plan(jnp.asarray(counts), topology, 2)
    start = Plan(start.placement.at[1, 1].set(0), start.quota, domain=3)
    plan, _ = Greedy().rebalance(jnp.asarray(counts), start, topology, ())
    assert load(plan).tolist() == [6, 6, 6]
    assert int(traffic(plan, counts).replicas) == 1


def test_small_moves_are_not_worth_a_replica():
    counts = np.diag([11, 9, 10, 10]).astype(np.int32)
    assert load(plan_for(counts, slots=2)).tolist() == [10, 10, 10, 10]
    assert load(plan_for(counts, slots=2, min_tokens=2)).tolist() == [11, 9, 10, 10]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zipf", "lognormal", "hot_rank"])
def test_it_comes_near_the_mean_with_two_slots(name):
    for seed in range(3):
        counts = BY_NAME[name].counts(seed, 32, 512, 64, 4)
        before = imbalance(load(plain_plan(counts, Topology.flat(32))))
        after = float(imbalance(load(plan_for(counts, slots=4))))
        assert after <= 1.05 < before
