"""Planners refuse bad arguments before they are traced, and bad entries stop a program; plans on the host need none."""

from functools import partial

import jax
import numpy as np
import pytest

from jax_moe_lb import _planning
from tests.marks import parametrize
from tests.planners.planner_cases import FORMS, STOPPED, assert_same

PLACEMENT, ONES = np.array([[0, -1], [1, -1]], np.int32), np.ones((2, 2), np.int32)
TOKENS, SIX = np.ones(2, np.int32), np.ones((6, 2), np.int32)
TOO_MANY = np.array([[2**31 - 1, 0], [0, 1]], np.int32)
"""One token more than planners take."""

EDITS = {
    "greedy": {"domain": 2, "min_tokens": 1},
    "ultraep": {"domain": 2, "eps": 0.01, "min_tokens": 1},
    "feplb": {"domain": 2, "num_dynamic": 4, "max_num_dyn": 8, "tau": 1, "skip": False},
}
"""Options of planners of a placement and a quota."""

OPTIONS = EDITS | {"eplb_plus": {"domain": 2}, "fastermoe": {"domain": 2, "min_saved": 1}}
OPERANDS = dict.fromkeys(EDITS, (PLACEMENT, ONES))
OPERANDS |= {"eplb_plus": (TOKENS, PLACEMENT), "fastermoe": (PLACEMENT, ONES, ONES)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"domain": 3}, "domain is 3; expected a divisor of the 2 ranks") for name in OPTIONS),
        *((name, {"min_tokens": 0}, "min_tokens is 0; expected at least 1") for name in ("greedy", "ultraep")),
        ("ultraep", {"eps": -0.1}, "eps is -0.1; expected 0 to 1"),
        ("ultraep", {"eps": float("nan")}, "eps is nan; expected 0 to 1"),
        ("feplb", {"num_dynamic": 0}, "num_dynamic is 0; expected at least 1"),
        ("feplb", {"max_num_dyn": 0}, "max_num_dyn is 0; expected at least 1"),
        ("feplb", {"tau": 0}, "tau is 0; expected 1 to 2147483647"),
        ("feplb", {"tau": 2**31}, "tau is 2147483648; expected 1 to 2147483647"),
        ("fastermoe", {"min_saved": 0}, "min_saved is 0; expected 1 to 2147483647"),
        ("fastermoe", {"min_saved": 2**31}, "min_saved is 2147483648; expected 1 to 2147483647"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        FORMS[name][0](*OPERANDS[name], **OPTIONS[name] | options)


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        *((name, (PLACEMENT, np.ones((3, 2), np.int32)), "quota has 3 experts; expected a positive") for name in EDITS),
        ("greedy", (PLACEMENT[:, :0], ONES), r"placement has shape \(2, 0\); expected \[2, S\] with S at least 1"),
        *((name, (PLACEMENT, SIX), "expected .2, S. with S >= 3") for name in ("ultraep", "feplb")),
        ("eplb_plus", (np.ones(3, np.int32), PLACEMENT), "tokens has 3 experts; expected a positive multiple of the 2"),
        ("eplb_plus", (TOKENS, PLACEMENT[:, :0]), r"placement has shape \(2, 0\); expected \[R, S\], both at least 1"),
    ],
)
def test_bad_shapes_are_refused(name, operands, message):
    with pytest.raises(ValueError, match=message):
        FORMS[name][0](*operands, **OPTIONS[name])


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("greedy", (np.add(PLACEMENT, [[0], [1]]), ONES), "rank 1, slot 0 is 2; expected an expert below 2, or -1"),
        ("greedy", (np.subtract(PLACEMENT, [[3], [0]]), ONES), "slot 0 is -3; expected an expert below 2, or -1"),
        *(
            (name, (PLACEMENT[::-1], ONES), "placement of rank 0, slot 0 is 1; expected its home expert 0")
            for name in ("ultraep", "feplb")
        ),
        *((name, (PLACEMENT, -ONES), "quota of expert 0, rank 0 is -1; expected at least 0") for name in EDITS),
        *(
            (name, (PLACEMENT, TOO_MANY), "quota sums to 2147483648 tokens; expected at most 2147483647")
            for name in EDITS
        ),
        ("eplb_plus", (-TOKENS, PLACEMENT), "tokens of expert 0 is -1; expected at least 0"),
        ("eplb_plus", (TOKENS << 30, PLACEMENT), "tokens sum to 2147483648; expected at most 2147483647"),
        ("eplb_plus", (TOKENS, PLACEMENT * 0), "tokens of expert 1 is 1; expected 0: no slot holds it"),
        ("eplb_plus", (TOKENS, PLACEMENT + 2), "placement of rank 0, slot 0 is 2; expected an expert below 2"),
        ("fastermoe", (PLACEMENT, ONES, -ONES), "counts of rank 0, expert 0 is -1; expected at least 0"),
        ("fastermoe", (PLACEMENT, ONES, TOO_MANY), "counts sum to 2147483648 tokens; expected at most 2147483647"),
    ],
)
def test_bad_entries_stop_the_program(name, operands, message):
    operands = [np.asarray(operand, np.int32) for operand in operands]
    with pytest.raises(STOPPED, match=message):
        jax.block_until_ready(jax.jit(partial(FORMS[name][0], **OPTIONS[name]))(*operands))
    with pytest.raises(ValueError, match=message):
        getattr(_planning, name)(*operands, **OPTIONS[name])


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("greedy", "min_tokens"),
        ("ultraep", "min_tokens"),
        ("feplb", "num_dynamic"),
        ("relay", "min_replicas"),
        ("relay", "min_gain"),
    ],
)
def test_thresholds_beyond_int32_give_the_plan_of_the_host(name, option):
    homes = np.array([[0, 1, -1], [2, 3, -1], [4, 5, -1]], np.int32)
    if name == "relay":
        options = {"num_home": 2, "min_replicas": 2, "max_relays": 1, "min_gain": 1}
        operands = [np.where(homes < 0, [[2], [0], [0]], homes).astype(np.int32)]
    else:
        operands = [homes, np.diag([9, 1, 1]).repeat(2, 0).astype(np.int32)]
        options = OPTIONS[name] | {"domain": 3}
    planner = partial(FORMS[name][0], **options | {option: 2**40})
    assert_same(jax.jit(planner)(*operands), planner(*operands))


@pytest.mark.slow
@parametrize("name", ["greedy"], EDITS)
def test_numpy_arrays_are_planned_without_a_jax_program(name):
    (op, reference), options = FORMS[name], EDITS[name]
    placement, quota = np.array([[0, 1, -1], [2, 3, -1]]), np.array([[80, 0], [40, 0], [0, 10], [0, 10]])
    planned = op(placement, quota, **options)
    assert all(isinstance(array, np.ndarray) for array in planned)
    assert_same(planned, reference(placement.astype(np.int32), quota.astype(np.int32), **options))
    with pytest.raises(ValueError, match="quota of expert 0, rank 0 is -80; expected at least 0"):
        op(placement, -quota, **options)
