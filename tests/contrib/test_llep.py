"""LLEP's rule: what a rank cannot hold spills to the least loaded ranks, in parts that are worth a product."""

import numpy as np

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Topology
from jax_moe_lb.contrib import LLEP
from jax_moe_lb.core import imbalance, load, plain_plan
from tests.balancers.plans import plan_for


def test_a_rule_by_hand():
    """The mean is 10: rank 1 keeps 10 of 15, and 4 of the rest go to rank 3, which is then full."""
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    plan = plan_for(LLEP(capacity=1.0, min_tokens=1), counts, 3)
    assert plan.quota[1].tolist() == [0, 10, 1, 4]
    # Then 2 of rank 0 go to rank 2.
    assert plan.quota[0].tolist() == [10, 0, 2, 0]
    assert load(plan).tolist() == [10] * 4


def test_colder_experts_stay_before_a_hot_one_leaves():
    """An expert is spilled only as far as its rank is full with its colder experts at home."""
    counts = np.array([[8, 4, 0, 0], [0, 0, 0, 0]], np.int32)
    plan = plan_for(LLEP(capacity=1.0, min_tokens=1), counts, 3)
    assert plan.quota.tolist() == [[2, 6], [4, 0], [0, 0], [0, 0]]


def test_parts_below_the_least_are_not_given_unless_they_are_the_last():
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    # A part of 4 for rank 3 of 5 is too small, and so is 3 for rank 2; the last 2 of rank 0 are given.
    assert load(plan_for(LLEP(capacity=1.0, min_tokens=5), counts, 3)).tolist() == [10, 15, 7, 8]


def test_nearly_balanced_domains_are_left_alone():
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    assert (plan_for(LLEP(min_tokens=1, min_imbalance=1.51), counts, 2).quota == counts.T).all()
    both = np.zeros((4, 4), np.int32)
    np.fill_diagonal(both, [10, 10, 30, 10])
    plan = plan_for(LLEP(capacity=1.0, min_tokens=1), both, 2, domain=2)
    assert load(plan).tolist() == [10, 10, 20, 20]


def test_a_hot_rank_spills_to_all():
    for workload in WORKLOADS:
        counts = workload.counts(0, 8, 512, 32, 4)
        before = imbalance(load(plain_plan(counts, Topology.flat(8))))
        after = imbalance(load(plan_for(LLEP(min_tokens=1), counts, 16)))
        assert after <= (1.1 if before >= 1.3 else before) + 1e-6
