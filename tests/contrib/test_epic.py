"""EPIC's rule: the busiest and the idlest rank swap the pair of experts that lowers their maximum most."""

import itertools

import numpy as np
import pytest

from jax_moe_lb import Topology
from jax_moe_lb.contrib import EPIC
from jax_moe_lb.core import load, plain_plan
from tests.balancers.plans import plan_for

COUNTS = np.diag([9, 6, 5, 4, 1, 3, 2, 2]).reshape(4, 2, 8).sum(1).astype(np.int32)


def test_a_swap_must_save_more_than_it_takes():
    # The pairs fall from 15 to 11 and from 9 to 7.
    assert load(plan_for(EPIC(min_saved=2), COUNTS, 3)).tolist() == [8, 7, 6, 11]
    assert load(plan_for(EPIC(min_saved=3), COUNTS, 3)).tolist() == [8, 9, 4, 11]
    assert load(plan_for(EPIC(min_saved=5), COUNTS, 3)).tolist() == [15, 9, 4, 4]


def test_without_slots_or_with_one_expert_on_each_rank_nothing_moves():
    assert (plan_for(EPIC(), COUNTS, 2).quota == plain_plan(COUNTS, Topology.flat(4)).quota).all()
    counts = np.diag([12, 15, 7, 6]).astype(np.int32)
    assert load(plan_for(EPIC(), counts, 2)).tolist() == [12, 15, 7, 6]


@pytest.mark.parametrize("domain", [6, 3])
def test_no_other_swap_of_a_pair_is_better(domain):
    counts = np.random.default_rng(domain).integers(0, 50, (6, 18)).astype(np.int32)
    tokens, after = counts.sum(0).reshape(6, 3), load(plan_for(EPIC(), counts, 4, domain))
    for first in range(0, 6, domain):
        order = first + np.argsort(-tokens[first : first + domain].sum(1), kind="stable")
        for busy, idle in zip(order[: domain // 2], order[::-1], strict=False):
            loads = tokens[busy].sum(), tokens[idle].sum()
            swaps = [max(loads[0] - a + b, loads[1] + a - b) for a, b in itertools.product(tokens[busy], tokens[idle])]
            assert max(after[busy], after[idle]) == min(loads[0], *swaps)
        if domain % 2:
            middle = order[domain // 2]
            assert after[middle] == tokens[middle].sum()
