import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_moe_lb import _planning
from jax_moe_lb.ops.lpt import lpt, lpt_reference
from tests.ops.planner_cases import STOPPED, assert_same

RUN = jax.jit(lpt, static_argnums=(1, 2))
REFERENCE = jax.jit(lpt_reference, static_argnums=(1, 2))
SHAPES = [(0, 3, 0), (1, 1, 1), (8, 8, 1), (7, 3, 3), (16, 4, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_loop_custom_call_and_module_agree(shape, data):
    num_items, num_bins, capacity = shape
    weight = st.sampled_from([0, 1, 2, 3, 50, 2**31 // 17])
    weights = np.array(data.draw(st.lists(weight, min_size=num_items, max_size=num_items)), np.int32)
    want = REFERENCE(weights, num_bins, capacity)
    assert_same(RUN(weights, num_bins, capacity), want)
    assert_same(_planning.lpt(weights, num_bins, capacity), want)
    assert (np.bincount(want, minlength=num_bins) <= capacity).all()


def test_heaviest_first_into_the_lightest_bin():
    assert lpt(jnp.array([1, 5, 3, 4], jnp.int32), 2, 4).tolist() == [0, 0, 1, 1]


def test_ties_go_to_the_lower_item_and_bin():
    assert lpt(jnp.array([2, 2, 2, 2], jnp.int32), 2, 2).tolist() == [0, 1, 0, 1]


def test_too_little_room_is_refused_when_traced():
    weights = jnp.ones(5, jnp.int32)
    with pytest.raises(ValueError, match=r"capacity is 2; expected at least 3 for 5 items in 2 bins"):
        jax.jit(lambda w: lpt(w, 2, 2))(weights)
    with pytest.raises(ValueError, match=r"num_bins is 0; expected at least 1"):
        lpt(weights, 0, 2)


def test_bad_weights_stop_the_program():
    with pytest.raises(STOPPED, match=r"weights of item 1 is -4; expected at least 0"):
        jax.block_until_ready(lpt(jnp.array([1, -4], jnp.int32), 2, 1))
    with pytest.raises(STOPPED, match=r"weights sum to 2147483648; expected at most 2147483647"):
        jax.block_until_ready(lpt(jnp.array([2**31 - 1, 1], jnp.int32), 2, 1))
