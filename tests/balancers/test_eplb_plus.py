import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Plan, Topology
from jax_moe_lb.balancers import EPLBPlus, Greedy
from jax_moe_lb.core import check_plan, load, plain_plan
from tests.balancers.plans import plan_for as planned


def plan_for(counts, domain=None, slots=None):
    return planned(EPLBPlus(), counts, slots, domain)


def test_the_heaviest_expert_gets_copies_first():
    """Shares 13, 7, 5, 4 of expert 0, then 4, 2 of expert 2."""
    plan = plan_for(np.diag([13, 2, 4, 0]).astype(np.int32), slots=2)
    assert plan.placement[:, 1].tolist() == [2, 0, 0, 0]
    assert plan.quota[[0, 2]].tolist() == [[4, 3, 3, 3], [2, 0, 2, 0]]


@pytest.mark.slow
def test_an_even_split_can_move_tokens_in_circles():
    """Half of expert 2 leaves the busy rank and half of expert 0 arrives; a quota would not send the latter."""
    counts = np.array([[10, 0, 10, 9], [0, 0, 0, 0]], np.int32)
    topology = Topology.flat(2)
    start = plain_plan(jnp.asarray(counts), topology, 3)
    assert load(start).tolist() == load(plan_for(counts, slots=3)).tolist() == [10, 19]
    assert load(Greedy().rebalance(jnp.asarray(counts), start, topology, ())[0]).tolist() == [14, 15]


def test_replicas_of_another_balancer_count_as_copies():
    counts, topology = np.diag([12, 0, 6]).astype(np.int32), Topology.flat(3)
    start = plain_plan(counts, topology, 3)
    placement = start.placement.copy()
    placement[1, 2] = 0
    plan, _ = EPLBPlus().rebalance(counts, Plan(placement, start.quota, domain=3), topology, ())
    check_plan(plan, counts)
    assert plan.placement.tolist() == [[0, 2, -1], [1, 2, 0], [2, 0, -1]]
    assert plan.quota[0].tolist() == [4, 4, 4]
