import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.ops.quota import quota, quota_reference
from tests.ops.planner_cases import STOPPED, assert_same, draw_placement

RUN, REFERENCE = jax.jit(quota), jax.jit(quota_reference)


def pour(tokens, placement):
    return RUN(jnp.array(tokens, jnp.int32), jnp.array(placement, jnp.int32))


def one_by_one(tokens, placement):
    """The same rule, a token at a time: each goes to the lightest rank, ties to the lower one."""
    holds = (placement[:, :, None] == np.arange(len(tokens))).any(1).T
    served = np.zeros(holds.shape, np.int32)
    alone = holds.sum(1) == 1
    served[alone] = holds[alone] * tokens[alone, None]
    load = served.sum(0)
    for expert in np.argsort(-tokens, kind="stable"):
        for _ in range(0 if alone[expert] else tokens[expert]):
            rank = np.flatnonzero(holds[expert])[load[holds[expert]].argmin()]
            served[expert, rank] += 1
            load[rank] += 1
    return served


SHAPES = [(1, 1, 1, 1), (2, 1, 4, 2), (4, 2, 5, 4), (6, 3, 4, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([0, 1, 3, 60]), anywhere=st.booleans())
def test_loop_custom_call_and_module_agree_with_one_token_at_a_time(shape, seed, most, anywhere):
    num_ranks, num_home, slots, domain = shape
    rng = np.random.default_rng(seed)
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty=0.2)
    num_experts = num_ranks * num_home
    if anywhere:  # experts without a slot, and with two on a rank
        placement = rng.integers(-1, num_experts, placement.shape, np.int32)
    tokens = rng.integers(0, most + 1, num_experts, np.int32) * np.isin(np.arange(num_experts), placement)
    tokens = tokens.astype(np.int32)
    want = one_by_one(tokens, placement)
    np.testing.assert_array_equal(want.sum(1), tokens)
    assert_same(REFERENCE(tokens, placement), want)
    assert_same(RUN(tokens, placement), want)
    assert_same(_planning.quota(tokens, placement), want)


def test_experts_without_a_choice_go_first():
    assert pour([10, 6], [[0, 1], [0, -1]]).tolist() == [[2, 8], [6, 0]]


def test_the_rest_goes_to_the_lowest_ranks():
    assert pour([11], [[0], [0], [0], [0]]).tolist() == [[3, 3, 3, 2]]


@pytest.mark.parametrize("run", [RUN, REFERENCE, _planning.quota])
def test_the_largest_sums_do_not_wrap_round(run):
    placement = np.array([[0, 1], [0, 2], [0, 3]], np.int32)
    tokens = np.array([2**30, 2**29, 2**28, 2**28 - 1], np.int32)
    served = np.asarray(run(tokens, placement))
    np.testing.assert_array_equal(served.sum(1), tokens)
    assert served.sum(0).tolist() == [715827883, 715827882, 715827882]
    assert np.asarray(run(np.array([2**31 - 1], np.int32), np.zeros((2, 1), np.int32))).tolist() == [[2**30, 2**30 - 1]]


@pytest.mark.parametrize(
    ("tokens", "placement", "message"),
    [
        ([1, 2], [[0, -1]], "tokens of expert 1 is 2; expected 0: no slot holds it"),
        ([1, -2], [[0, 1]], "tokens of expert 1 is -2; expected at least 0"),
        ([1, 2**31 - 1], [[0, 1]], "tokens sum to 2147483648; expected at most 2147483647"),
        ([1, 2], [[0], [2]], "placement of rank 1, slot 0 is 2; expected an expert below 2, or -1 for an empty slot"),
        ([1, 2], [[0], [-2]], "placement of rank 1, slot 0 is -2; expected an expert below 2, or -1 for an empty slot"),
    ],
)
def test_bad_values_stop_the_program(tokens, placement, message):
    with pytest.raises(STOPPED, match=message):
        jax.block_until_ready(pour(tokens, placement))


def test_without_a_slot_the_loop_loses_the_tokens():
    """`ensure_legal` names the expert then."""
    assert REFERENCE(jnp.array([1, 2], jnp.int32), jnp.array([[0, -1]], jnp.int32)).tolist() == [[1], [0]]


def test_a_placement_without_slots_is_refused_when_traced():
    with pytest.raises(ValueError, match=r"placement \(2, 0\); expected \[E\] and \[R, S\], all at least 1"):
        quota(jnp.ones(2, jnp.int32), jnp.zeros((2, 0), jnp.int32))
