"""ECHO's rule: tokens beyond the mean spill from the hottest experts, the largest spills into the largest rooms."""

import pickle

import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb.contrib import ECHO
from jax_moe_lb.contrib.echo import spilled_tokens
from jax_moe_lb.core import load
from tests.balancers.plans import plan_for


def test_the_worked_example_of_its_page():
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    moved = spilled_tokens(counts.sum(0).reshape(4, 1))
    assert moved.tolist() == [[0, 0, 2, 0], [0, 0, 1, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert load(plan_for(ECHO(), counts, 3)).tolist() == [10] * 4
    # Of the spills for rank 2 one slot takes the larger.
    plan = plan_for(ECHO(), counts, 2)
    assert plan.placement[:, 1].tolist() == [-1, -1, 0, 1]
    assert load(plan).tolist() == [10, 11, 9, 10]


def test_the_coldest_experts_stay():
    """Rank 0 keeps 1 and 2, and 3 of the 6 tokens of its hottest expert."""
    moved = spilled_tokens(np.array([[2, 6, 1], [1, 1, 1]]))
    assert moved.sum(1).tolist() == [0, 3, 0, 0, 0, 0]
    # Of two experts beyond the mean the colder one spills only if it does not fit alone.
    assert spilled_tokens(np.array([[5, 6], [1, 0]])).sum(1).tolist() == [0, 5, 0, 0]


@pytest.mark.parametrize("domain", [8, 4])
def test_if_slots_abound_all_ranks_have_the_mean_and_its_remainder(domain):
    for workload in WORKLOADS:
        counts = workload.counts(0, 8, 512, 32, 4)
        loads = load(plan_for(ECHO(), counts, 32, domain)).reshape(-1, domain)
        mean = loads.sum(1, keepdims=True) // domain
        assert (loads >= mean).all()
        assert (loads < mean + domain).all()


def test_a_balancer_that_planned_equals_a_new_one_and_is_pickled():
    """Statistics compare the planners of the host, and layers have a balancer each."""
    used = ECHO()
    plan_for(used, np.ones((2, 4), np.int32), 3)
    copy = pickle.loads(pickle.dumps(used))
    assert copy == used == ECHO()
    assert copy.host_errors == used.host_errors == ECHO().host_errors
