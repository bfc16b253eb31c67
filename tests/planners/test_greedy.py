import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.greedy import greedy, greedy_reference
from tests.planners.planner_cases import assert_same, draw_placement, draw_plan, draw_tokens

RUN = jax.jit(greedy, static_argnums=(2, 3))
REFERENCE = jax.jit(greedy_reference, static_argnums=(2, 3))
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 1, 1, 1), (2, 1, 1, 2), (6, 3, 5, 3), (8, 2, 6, 4)]
MORE_SHAPES = [(4, 1, 2, 4), (8, 4, 6, 8), (4, 2, 3, 1)]
EACH_SHAPE = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.thorough) for shape in MORE_SHAPES)], ids=str
)


def assert_three_agree(placement, quota, *options):
    want = REFERENCE(placement, quota, *options)
    assert_same(RUN(placement, quota, *options), want)
    assert_same(_planning.greedy(placement, quota, *options), want)
    np.testing.assert_array_equal(np.asarray(want[1]).sum(1), quota.sum(1))


@pytest.mark.slow
@EACH_SHAPE
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), empty=st.sampled_from([0.1, 0.9]), least=st.sampled_from([1, 5]))
def test_legal_plans(shape, seed, empty, least):
    num_ranks, num_home, slots, domain = shape
    placement, quota = draw_plan(np.random.default_rng(seed), num_ranks, num_home, slots, domain, empty)
    assert_three_agree(placement, quota, domain, least)


@pytest.mark.slow
@EACH_SHAPE
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([0, 1, 2, 100, 2**31 // 260]))
def test_any_placement_and_quota(shape, seed, most):
    """Experts far from home or twice on a rank, quotas without a slot, many ties, large numbers."""
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = rng.integers(-1, num_ranks * num_home, (num_ranks, slots), np.int32)
    quota = rng.integers(0, most + 1, (num_ranks * num_home, num_ranks), np.int32)
    assert_three_agree(placement, quota, domain, 1)


@pytest.mark.slow
@EACH_SHAPE
def test_many_tokens_of_few_experts(shape):
    num_ranks, num_home, slots, domain = shape
    for seed in range(10):
        rng = np.random.default_rng(seed)
        placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty=1.0)
        at_home = np.arange(num_ranks * num_home)[:, None] // num_home == np.arange(num_ranks)
        tokens = draw_tokens(rng, num_ranks * num_home, 10_000)
        assert_three_agree(placement, np.where(at_home, tokens[:, None], 0).astype(np.int32), domain, 1)
