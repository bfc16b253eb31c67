import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.fastermoe import fastermoe, fastermoe_reference
from tests.planners.planner_cases import assert_same, draw_counts

RUN = jax.jit(fastermoe, static_argnums=(3, 4))
REFERENCE = jax.jit(fastermoe_reference, static_argnums=(3, 4))
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 2, 3, 1), (4, 4, 6, 4), (6, 3, 5, 3), (8, 2, 3, 8)]


def by_the_rule(placement, quota, counts, domain, min_saved):
    """Apply the rule of `ffi/planning/fastermoe.h` literally."""
    placement, quota = placement.copy(), quota.copy()
    num_experts, num_ranks = quota.shape
    home = np.arange(num_experts) // (num_experts // num_ranks)
    for first in range(0, num_ranks, domain):
        ranks = range(first, first + domain)
        while True:
            load = quota.sum(0)
            giver = max(ranks, key=lambda r: (load[r], -r))
            others = [r for r in ranks if r != giver]
            able = [
                e
                for e in range(num_experts)
                if home[e] == giver and quota[e, giver] == counts[:, e].sum() and (placement == e).sum() == 1
            ]
            if not able or any(-1 not in placement[r] for r in others):
                break
            expert = max(able, key=lambda e: (quota[e, giver], -e))
            row = quota[expert].copy()
            row[others] = counts[others, expert]
            row[giver] -= row[others].sum()
            after = load - quota[expert] + row
            if load[ranks].max() - after[ranks].max() < min_saved:
                break
            quota[expert] = row
            for rank in others:
                placement[rank, list(placement[rank]).index(-1)] = expert
    return placement, quota


def assert_all_agree(placement, quota, counts, domain, min_saved):
    want = REFERENCE(placement, quota, counts, domain, min_saved)
    assert_same(RUN(placement, quota, counts, domain, min_saved), want)
    assert_same(_planning.fastermoe(placement, quota, counts, domain, min_saved), want)
    assert_same(by_the_rule(placement, quota, counts, domain, min_saved), want)
    return want[0]


@pytest.mark.slow
@pytest.mark.parametrize("min_saved", [1, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), empty=st.sampled_from([1.0, 0.6]))
def test_it_is_the_rule(shape, min_saved, seed, empty):
    placement, quota, counts = draw_counts(np.random.default_rng(seed), *shape, empty)
    assert_all_agree(placement, quota, counts, shape[3], min_saved)


@pytest.mark.slow
def test_these_cases_copy_experts():
    rng, copies = np.random.default_rng(0), 0
    for _ in range(50):
        placement, quota, counts = draw_counts(rng, 6, 3, 5, 3, 1.0)
        planned = assert_all_agree(placement, quota, counts, 3, 1)
        copies += int((np.asarray(planned) >= 0).sum() - (placement >= 0).sum())
    assert copies > 50


def test_the_largest_loads():
    placement = np.array([[0, -1], [1, -1]], np.int32)
    counts = np.array([[2**30, 0], [2**30 - 1, 0]], np.int32)
    quota = np.array([[2**31 - 1, 0], [0, 0]], np.int32)
    assert_all_agree(placement, quota, counts, 2, 1)
