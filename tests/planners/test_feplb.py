import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.feplb import feplb, feplb_reference
from tests.planners.planner_cases import assert_same, draw_placement, draw_tokens

STATIC = (2, 3, 4, 5, 6)
RUN = jax.jit(feplb, static_argnums=STATIC)
REFERENCE = jax.jit(feplb_reference, static_argnums=STATIC)
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 2, 3, 1), (4, 4, 6, 4), (6, 3, 5, 3), (8, 2, 3, 8)]
# dynamic experts, experts taken by a rank, threshold, skip
OPTIONS = [(4, 8, 1, False), (4, 8, 1, True), (2, 1, 20, True)]


def by_the_rule(placement, quota, domain, num_dynamic, max_num_dyn, tau, skip):
    """Apply the rule of `ffi/planning/feplb.h` literally."""
    placement, quota = placement.copy(), quota.copy()
    num_experts, num_ranks = quota.shape
    home = np.arange(num_experts) // (num_experts // num_ranks)
    served = quota[np.arange(num_experts), home].copy()
    dynamic, taken = set(), np.zeros(num_ranks, int)
    for rank in range(num_ranks):
        mine = sorted(np.flatnonzero(home == rank), key=lambda e: (-served[e], e))
        dynamic |= set(mine[:num_dynamic])
    for first in range(0, num_ranks, domain):
        ranks = range(first, first + domain)
        moved = True
        while moved:
            moved, load = False, quota.sum(0)
            giver = max(ranks, key=lambda r: (load[r], -r))
            experts = sorted((e for e in dynamic if home[e] == giver), key=lambda e: (-served[e], e))
            for expert in experts if skip else experts[:1]:
                able = [
                    r for r in ranks if -1 in placement[r] and taken[r] < max_num_dyn and expert not in placement[r]
                ]
                taker = min(able, key=lambda r: (load[r], r), default=None)
                if taker is None or served[expert] < tau or load[taker] + served[expert] >= load[giver]:
                    continue
                placement[taker, list(placement[taker]).index(-1)] = expert
                quota[expert, taker] += served[expert]
                quota[expert, giver] = 0
                taken[taker] += 1
                dynamic.discard(expert)
                moved = True
                break
    return placement, quota


def assert_all_agree(placement, quota, domain, options):
    want = REFERENCE(placement, quota, domain, *options)
    assert_same(RUN(placement, quota, domain, *options), want)
    assert_same(_planning.feplb(placement, quota, domain, *options), want)
    assert_same(by_the_rule(placement, quota, domain, *options), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        # Each shape, and all options with two domains.
        pytest.param(shape, options, marks=() if i == 2 or i % 3 == j else pytest.mark.thorough)
        for i, shape in enumerate(SHAPES)
        for j, options in enumerate(OPTIONS)
    ],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([5, 200, 10**6]), empty=st.sampled_from([1.0, 0.6]))
def test_it_is_the_rule(shape, options, seed, scale, empty):
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty)
    holds = (placement[:, :, None] == np.arange(num_ranks * num_home)).any(1).T
    quota = np.where(holds, draw_tokens(rng, holds.shape, scale), 0).astype(np.int32)
    assert_all_agree(placement, quota, domain, options)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([0, 1, 100, 2**31 // 260]))
def test_any_replicas_and_quota(seed, most):
    """Experts far from home or twice on a rank, quotas without a slot, many ties, large numbers."""
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, 6, 3, 5, 3)
    placement[:, 3:] = rng.integers(-1, 18, (6, 2))
    quota = rng.integers(0, most + 1, (18, 6), np.int32)
    for options in OPTIONS[:2]:
        assert_all_agree(placement, quota, 3, options)


@pytest.mark.slow
def test_the_largest_loads():
    placement = np.array([[0, 1, -1], [2, 3, -1]], np.int32)
    quota = np.array([[2**30, 0], [2**30 - 1, 0], [0, 0], [0, 0]], np.int32)
    want = REFERENCE(placement, quota, 2, 2, 8, 1, False)
    assert_same(RUN(placement, quota, 2, 2, 8, 1, False), want)
    assert want[1].sum(0).tolist() == [2**30 - 1, 2**30]
