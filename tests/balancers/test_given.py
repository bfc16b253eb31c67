"""Plans made ahead are followed for the counts that they were made for, and are legal for all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Topology, plain
from jax_moe_lb.balancers import Exact, Given, plan_all
from jax_moe_lb.core import check_plan, imbalance, load, plain_plan
from jax_moe_lb.layer.systems import System
from tests.layer_cases import make_layer, make_mesh

TOPOLOGY = Topology.flat(8, 4)
SLOTS = 4
COUNTS = np.stack([workload.counts(0, 8, 512, 16, 2) for workload in WORKLOADS[:4]])
PLANS = plan_all(Exact(eps=0.0, cost=None), COUNTS, TOPOLOGY, SLOTS)
GIVEN = Given(len(COUNTS))


def test_known_counts_get_their_plans_again_and_again():
    rebalance = jax.jit(lambda c, state: GIVEN.rebalance(c, plain_plan(c, TOPOLOGY, SLOTS), TOPOLOGY, state))
    state = traced = GIVEN.follow(PLANS)
    for step in range(2 * len(COUNTS)):
        counts = COUNTS[step % len(COUNTS)]
        plan, state = GIVEN.rebalance(counts, plain_plan(counts, TOPOLOGY, SLOTS), TOPOLOGY, state)
        check_plan(plan, counts)
        np.testing.assert_array_equal(plan.quota, PLANS.quota[step % len(COUNTS)])
        jitted, traced = rebalance(jnp.asarray(counts), jax.tree.map(jnp.asarray, traced))
        jax.tree.map(np.testing.assert_array_equal, jitted, plan)
    assert rebalance._cache_size() == 1


def test_other_counts_keep_the_placement_and_split_evenly():
    other = COUNTS[0].copy()
    expert = int(np.argmax((PLANS.quota[0] > 0).sum(1)))
    other[0, expert] += 7
    want, _ = GIVEN.rebalance(COUNTS[0], plain_plan(COUNTS[0], TOPOLOGY, SLOTS), TOPOLOGY, GIVEN.follow(PLANS))
    plan, _ = GIVEN.rebalance(other, plain_plan(other, TOPOLOGY, SLOTS), TOPOLOGY, GIVEN.follow(PLANS))
    check_plan(plan, other)
    np.testing.assert_array_equal(plan.placement, want.placement)
    changed = (plan.quota != want.quota).any(1)
    assert changed.nonzero()[0].tolist() == [expert]
    shares = plan.quota[expert][plan.quota[expert] > 0]
    assert len(shares) == (want.quota[expert] > 0).sum() > 1
    assert np.ptp(shares) <= 1


def test_replicas_without_a_slot_are_left_out():
    plan, _ = GIVEN.rebalance(COUNTS[0], plain_plan(COUNTS[0], TOPOLOGY, 2), TOPOLOGY, GIVEN.follow(PLANS))
    check_plan(plan, COUNTS[0])
    np.testing.assert_array_equal(load(plan), load(plain_plan(COUNTS[0], TOPOLOGY, 2)))


def test_plans_of_another_number_are_refused():
    with pytest.raises(ValueError, match=r"plans.quota has shape \(4, 16, 8\); expected \[P, E, R\] with P = 3"):
        Given(3).follow(PLANS)
    with pytest.raises(ValueError, match=r"counts has shape \(0, 8, 16\); expected at least one microbatch"):
        plan_all(Exact(), COUNTS[:0], TOPOLOGY, SLOTS)


@pytest.mark.slow
def test_a_layer_follows_them():
    mesh = make_mesh((4,), ("expert",))
    x = jax.random.normal(jax.random.key(0), (64, 8)) + 1
    y, before = make_layer(mesh, plain())(x)
    counts = np.asarray(before.counts).reshape(1, 4, 8)
    balancer = Given(1)
    ahead = make_layer(mesh, System(balancer, replica_slots=6))
    state = balancer.follow(plan_all(Exact(eps=0.0, cost=None), counts, Topology.flat(4), slots=8))
    ahead.state.set_value(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state))
    found, after = ahead(x)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5)
    assert imbalance(np.asarray(after.load_after).reshape(-1)) < 1.05 < before.imbalance_before.max()
