"""MoonEP's plan: exactly the mean on every rank with enough slots, and its own receive quotas."""

import numpy as np
import pytest

from jax_moe_lb.contrib import MoonEP
from jax_moe_lb.contrib.moonep import receive_quotas
from jax_moe_lb.core import load
from tests.balancers.plans import plan_for
from tests.layer_cases import BY_NAME


@pytest.mark.parametrize("name", ["zipf", "lognormal", "hot_rank", "one_hot"])
def test_every_rank_serves_its_own_number_of_copies(name):
    for seed in range(3):
        counts = BY_NAME[name].counts(seed, 8, 512, 32, 4)
        # As many slots as home experts are enough, by the authors' proof.
        assert (load(plan_for(MoonEP(), counts, 8)) == counts.sum(1)).all()


def test_the_most_overloaded_rank_fills_the_emptiest_one():
    # Rank 1 gives 4 to rank 3 and has 11; rank 0, with 12, fills rank 2; rank 1 then fills rank 0.
    assert receive_quotas(np.array([12, 15, 7, 6])).tolist() == [[0, 0, 3, 0], [1, 0, 0, 4], [0] * 4, [0] * 4]
    # A mean of 10.5: the first ranks serve one more.
    assert receive_quotas(np.array([12, 16, 7, 7])).sum(0).tolist() == [0, 1, 3, 3]
    assert receive_quotas(np.array([5, 5])).tolist() == [[0, 0], [0, 0]]


def test_hottest_experts_go_first_and_stay_without_a_slot():
    counts = np.zeros((2, 4), np.int32)
    counts[0] = 6, 4, 0, 0
    plan = plan_for(MoonEP(), counts, 3)
    assert plan.placement[1].tolist() == [2, 3, 0]
    assert plan.quota[:, 1].tolist() == [5, 0, 0, 0]
    # Nine tokens to move, of which the hottest expert has 6, and one slot.
    counts = np.array([[6, 5, 4, 3, 0, 0, 0, 0], [0] * 8], np.int32)
    plan = plan_for(MoonEP(), counts, 5)
    assert load(plan).tolist() == [12, 6]
    assert (plan_for(MoonEP(), counts, 6).quota.sum(0) == 9).all()
