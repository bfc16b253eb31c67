import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.planners.greedy import greedy, greedy_reference
from tests.planners.planner_cases import STOPPED, assert_same, draw_placement, draw_plan, draw_tokens

RUN = jax.jit(greedy, static_argnums=(2, 3))
REFERENCE = jax.jit(greedy_reference, static_argnums=(2, 3))
# ranks, home experts, slots, ranks per domain
SHAPES = [(1, 1, 1, 1), (2, 1, 1, 2), (6, 3, 5, 3), (8, 2, 6, 4)]
MORE_SHAPES = [(4, 1, 2, 4), (8, 4, 6, 8), (4, 2, 3, 1)]
EACH_SHAPE = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.thorough) for shape in MORE_SHAPES)], ids=str
)


def assert_three_agree(placement, quota, domain, min_tokens):
    want = REFERENCE(placement, quota, domain, min_tokens)
    assert_same(RUN(placement, quota, domain, min_tokens), want)
    assert_same(_planning.greedy(placement, quota, domain, min_tokens), want)
    np.testing.assert_array_equal(np.asarray(want[1]).sum(1), quota.sum(1))


@pytest.mark.slow
@EACH_SHAPE
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), empty=st.sampled_from([0.1, 0.9]), min_tokens=st.sampled_from([1, 5]))
def test_legal_plans(shape, seed, empty, min_tokens):
    num_ranks, num_home, slots, domain = shape
    placement, quota = draw_plan(np.random.default_rng(seed), num_ranks, num_home, slots, domain, empty)
    assert_three_agree(placement, quota, domain, min_tokens)


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


@pytest.mark.parametrize(
    ("placement", "quota", "message"),
    [
        ([[0], [2]], [[1, 0], [0, 1]], "placement of rank 1, slot 0 is 2; expected an expert below 2, or -1"),
        ([[-3], [1]], [[1, 0], [0, 1]], "placement of rank 0, slot 0 is -3; expected an expert below 2, or -1"),
        ([[0], [1]], [[1, 0], [0, -1]], "quota of expert 1, rank 1 is -1; expected at least 0"),
        ([[0], [1]], [[2**31 - 1, 0], [0, 1]], "quota sums to 2147483648 tokens; expected at most 2147483647"),
    ],
)
def test_bad_values_stop_the_program(placement, quota, message):
    with pytest.raises(STOPPED, match=message):
        jax.block_until_ready(RUN(jnp.array(placement, jnp.int32), jnp.array(quota, jnp.int32), 2, 1))


def test_bad_shapes_and_options_are_refused_when_traced():
    placement, quota = jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 2), jnp.int32)
    for args, message in [
        (
            (placement, jnp.zeros((3, 2), jnp.int32), 2, 1),
            r"quota has 3 experts; expected a positive multiple of the 2",
        ),
        ((placement[:, :0], quota, 2, 1), r"placement has shape \(2, 0\); expected \[2, S\] with S at least 1"),
        ((placement, quota, 3, 1), r"domain is 3; expected a divisor of the 2 ranks"),
        ((placement, quota, 2, 0), r"min_tokens is 0; expected at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            greedy(*args)


@pytest.mark.slow
def test_numpy_arrays_are_planned_without_a_jax_program():
    placement = np.array([[0, 1, -1], [2, 3, -1]])
    quota = np.array([[8, 0], [4, 0], [0, 1], [0, 1]])
    answer = greedy(placement, quota, 2, 1)
    want = greedy_reference(jnp.asarray(placement, jnp.int32), jnp.asarray(quota, jnp.int32), 2, 1)
    for host, device in zip(answer, want, strict=True):
        assert isinstance(host, np.ndarray)
        np.testing.assert_array_equal(host, device)
    with pytest.raises(ValueError, match="quota of expert 0, rank 0 is -8; expected at least 0"):
        greedy(placement, -quota, 2, 1)
