"""`_planning`: the planners on NumPy arrays, with leading layer dimensions."""

import subprocess
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest

from jax_moe_lb import _planning
from tests.planners.planner_cases import PLANNERS, as_tuple, assert_same, draw_placement, draw_tokens

EACH_PLANNER = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
RNG = np.random.default_rng


def test_it_knows_no_jax():
    path = find_spec("jax_moe_lb._planning").origin
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_planning", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import numpy
placement, quota = module.eplb_plus(numpy.array([3, 1], numpy.int32), numpy.array([[0, -1], [1, -1]], numpy.int32), 2)
assert (placement.tolist(), quota.tolist()) == ([[0, -1], [1, 0]], [[2, 1], [0, 1]])
assert not any(name.startswith("jax") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@EACH_PLANNER
def test_layers_are_planned_each_for_itself(planner):
    rng = RNG(0)
    cases = [planner.draw(rng) for _ in range(6)]
    stacked = tuple(np.stack(arrays).reshape(2, 3, *arrays[0].shape) for arrays in zip(*cases, strict=True))
    got = as_tuple(planner.module(*stacked))
    for layer, case in enumerate(cases):
        assert_same(tuple(result[divmod(layer, 3)] for result in got), planner.module(*case))


@EACH_PLANNER
def test_no_layers_are_no_plans(planner):
    empty = tuple(np.stack([array])[:0] for array in planner.draw(RNG(0)))
    assert all(result.shape[0] == 0 for result in as_tuple(planner.module(*empty)))


def test_leading_dimensions_broadcast():
    rng = RNG(1)
    tokens = draw_tokens(rng, (3, 1, 12))
    placement = np.stack([draw_placement(rng, 6, 2, 4, 3) for _ in range(2)])
    got = _planning.eplb_plus(tokens, placement, 3)
    assert [result.shape for result in got] == [(3, 2, 6, 4), (3, 2, 12, 6)]
    for i in range(3):
        for j in range(2):
            assert_same(tuple(result[i, j] for result in got), _planning.eplb_plus(tokens[i, 0], placement[j], 3))


def test_any_memory_layout_is_read():
    tokens, placement = draw_tokens(RNG(2), (12, 5)).T, draw_placement(RNG(2), 6, 2, 4, 3)
    assert_same(
        _planning.eplb_plus(tokens[::2], np.asfortranarray(placement), 3),
        _planning.eplb_plus(np.ascontiguousarray(tokens)[::2].copy(), placement, 3),
    )


@EACH_PLANNER
def test_operands_are_left_alone(planner):
    case = planner.draw(RNG(3))
    before = [array.copy() for array in case]
    for array in case:
        array.flags.writeable = False
    planner.module(*case)
    assert_same(case, tuple(before))


@EACH_PLANNER
def test_threads_plan_at_the_same_time(planner):
    """Planners release the GIL: threads planning many layers give the results of one thread."""
    layers = tuple(np.stack([array] * 500) for array in planner.draw(RNG(4)))
    want, got = planner.module(*layers), [None] * 4

    def plan(i):
        got[i] = planner.module(*layers)

    threads = [threading.Thread(target=plan, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in got:
        assert_same(result, want)


INT32 = np.int32
ONES = np.ones((2, 2), INT32)
HOMES = np.array([[0, -1], [1, -1]], INT32)


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint32", "bool", ">i4"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"tokens has dtype {dtype}; expected int32"):
        _planning.eplb_plus(np.ones(2).astype(dtype), ONES, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: _planning.eplb_plus(np.array(3, INT32), ONES, 1), r"tokens has shape \[\]; expected \[\.\.\., E\]"),
        (lambda: _planning.eplb_plus(ONES, ONES[0], 1), r"placement has shape \[2\]; expected \[\.\.\., R, S\]"),
        (lambda: _planning.greedy(ONES, ONES[0], 1), r"quota has shape \[2\]; expected \[\.\.\., E, R\]"),
        (
            lambda: _planning.eplb_plus(np.ones((3, 2), INT32), np.ones((4, 2, 2), INT32), 2),
            r"\[3\] and \[4\] do not broadcast",
        ),
        (lambda: _planning.greedy(ONES, np.ones((2, 3), INT32), 1), r"quota has shape \[2, 3\]; expected \[2, 2\]"),
        (lambda: _planning.greedy(ONES, ONES, 3), r"domain is 3; expected a divisor of the 2 ranks"),
        (lambda: _planning.relay(ONES[:1], 3), r"^num_home is 3; expected 1 to the 2 slots of a rank"),
        (
            lambda: _planning.eplb_plus(np.array([[1, 2], [3, -4]], INT32), HOMES, 2),
            r"^layer 1: tokens of expert 1 is -4; expected",
        ),
        (
            lambda: _planning.eplb_plus(-np.ones((2, 3, 2), INT32), HOMES, 2),
            r"^layer \[0, 0\]: tokens of expert 0 is -1; expected",
        ),
    ],
)
def test_bad_arguments_are_named(plan, message):
    with pytest.raises(ValueError, match=message):
        plan()
