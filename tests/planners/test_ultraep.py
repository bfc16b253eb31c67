import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.ultraep import ultraep, ultraep_reference
from tests import released_ultraep
from tests.planners.planner_cases import assert_same, draw_placement

RUN = jax.jit(ultraep, static_argnums=(2, 3, 4))
REFERENCE = jax.jit(ultraep_reference, static_argnums=(2, 3, 4))
# ranks, home experts, slots, ranks per domain
SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 2, 2),
    (4, 1, 2, 4),
    (6, 3, 5, 3),
    (8, 2, 4, 4),
    (8, 1, 3, 8),
    (4, 2, 3, 1),
]
OPTIONS = [(0.01, 1024), (0.0, 7)]


def draw(rng, shape, scale, empty):
    """Return a placement, and heavy-tailed tokens, most of them at home."""
    num_ranks, num_home, slots, domain = shape
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty)
    holds = (placement[:, :, None] == np.arange(num_ranks * num_home)).any(1).T
    popularity = rng.pareto(rng.choice([0.3, 1.0, 3.0]), (len(holds), 1)) + 0.01
    quota = scale * popularity / popularity.max() * np.where(holds, rng.random(holds.shape), 0)
    at_home = np.arange(len(holds))[:, None] // num_home == np.arange(num_ranks)
    return placement, np.where(at_home, quota, quota // 8).astype(np.int32)


def assert_all_agree(placement, quota, *options):
    want = REFERENCE(placement, quota, *options)
    assert_same(RUN(placement, quota, *options), want)
    assert_same(_planning.ultraep(placement, quota, *options), want)
    *released, limits = released_ultraep.plan(placement, quota, *options)
    assert_same(tuple(released), want)
    return limits


NO_SLACK = [SHAPES[3]]
"""Shapes compiled with both options by default: of two domains."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(
            shape,
            options,
            marks=() if (options == OPTIONS[0] and shape[0] != 4) or shape in NO_SLACK else pytest.mark.thorough,
        )
        for shape in SHAPES
        for options in OPTIONS
    ],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([3, 50, 5000, 100_000, 2**25]),
    empty=st.sampled_from([1.0, 0.6]),
)
def test_it_is_the_released_planner(shape, options, seed, scale, empty):
    placement, quota = draw(np.random.default_rng(seed), shape, scale, empty)
    assert_all_agree(placement, quota, shape[3], *options)


@pytest.mark.slow
def test_these_cases_reach_the_search():
    """Limits not tried by the ladder, below the largest load."""
    found, rng = 0, np.random.default_rng(0)
    for _ in range(300):
        placement, quota = draw(rng, (8, 2, 3, 8), 5000, 1.0)
        *_, (limit,) = released_ultraep.plan(placement, quota, 8, 0.0, 7)
        load = quota.sum(0)
        low, step = -(-load.sum() // 8), max(1, -(-load.max() // 100))
        found += limit < load.max() and limit not in (low, low + step, low + 2 * step)
    assert found >= 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=() if shape in NO_SLACK else pytest.mark.thorough) for shape in SHAPES],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([0, 1, 100, 2**31 // 260]))
def test_any_replicas_and_quota(shape, seed, most):
    """Experts far from home or twice on a rank, quotas without a slot, many ties, large numbers."""
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, num_ranks, num_home, slots, domain)
    placement[:, num_home:] = rng.integers(-1, num_ranks * num_home, (num_ranks, slots - num_home))
    quota = rng.integers(0, most + 1, (num_ranks * num_home, num_ranks), np.int32)
    assert_all_agree(placement, quota, domain, *OPTIONS[1])


@pytest.mark.slow
def test_the_largest_loads():
    placement = np.array([[0, -1], [1, -1], [2, -1]], np.int32)
    quota = np.diag([2**31 - 1, 0, 0]).astype(np.int32)
    for eps in (0.0, 0.01, 1.0):
        assert_same(RUN(placement, quota, 3, eps, 1), REFERENCE(placement, quota, 3, eps, 1))
        assert_same(
            _planning.ultraep(placement, quota, 3, eps, 1),
            REFERENCE(placement, quota, 3, eps, 1),
        )
