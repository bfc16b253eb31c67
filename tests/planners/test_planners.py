"""All implementations of every planner agree, under all transformations and on all meshes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_moe_lb import Topology
from jax_moe_lb.core import check_plan, plain_plan
from jax_moe_lb.core.custom_calls import is_built
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.planners.base import illegal_if_failed
from jax_moe_lb.planners.greedy import greedy
from tests.layer_cases import make_mesh
from tests.marks import parametrize
from tests.planners.planner_cases import PLANNERS, as_tuple, assert_same

EACH_PLANNER = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
IN_JAX = {
    f"{name}-{form}": (planner, plan)
    for name, planner in PLANNERS.items()
    for form, plan in (("op", planner.op), ("reference", planner.reference))
    if plan is not None
}
"""Planners with their forms in JAX."""


def stacked(planner, number, seed=0):
    """Return several stacked cases, and the results of `_planning` for each."""
    rng = np.random.default_rng(seed)
    cases = [planner.draw(rng) for _ in range(number)]
    planned = [as_tuple(planner.module(*case)) for case in cases]
    return tuple(map(np.stack, zip(*cases, strict=True))), tuple(map(np.stack, zip(*planned, strict=True)))


def test_these_tests_run_the_custom_calls():
    assert is_built("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("planner", [PLANNERS["relay"], PLANNERS["spray"]], ids=["relay", "spray"])
def test_three_implementations_agree(planner):
    """`test_rules.py` compares those of the other planners."""
    rng = np.random.default_rng(1)
    both = jax.jit(lambda *case: (planner.op(*case), planner.reference(*case)))
    for _ in range(200):
        case = planner.draw(rng)
        native, want = both(*case)
        assert_same(native, want)
        assert_same(planner.module(*case), want)


@pytest.mark.slow
@parametrize("name", [name for name in IN_JAX if name.endswith("op")], IN_JAX)
def test_scan_vmap_and_remat_plan_each_for_itself(name):
    planner, plan = IN_JAX[name]
    cases, want = stacked(planner, 4)

    def step(carry, pair):
        return carry, as_tuple(jax.vmap(jax.checkpoint(plan))(*pair))

    pairs = tuple(case.reshape(2, 2, *case.shape[1:]) for case in cases)
    got = jax.jit(lambda *pairs: jax.lax.scan(step, 0, pairs)[1])(*pairs)
    assert_same(tuple(array.reshape(4, *array.shape[2:]) for array in got), want)


@pytest.mark.slow
@parametrize("name", ["fastermoe"], PLANNERS)
def test_vmap_over_one_operand_keeps_the_others(name):
    planner = PLANNERS[name]
    cases, _ = stacked(planner, 3)
    rest = tuple(case[0] for case in cases[1:])
    got = jax.vmap(planner.op, in_axes=(0, *[None] * len(rest)))(cases[0], *rest)
    for i, first in enumerate(cases[0]):
        assert_same(tuple(result[i] for result in as_tuple(got)), planner.module(first, *rest))


@pytest.mark.slow
@parametrize(
    "name, varying, kind",
    [
        *((name, "last", AxisType.Explicit) for name in IN_JAX if name.endswith("op")),
        *(("greedy-op", varying, AxisType.Explicit) for varying in ("all", "none")),
    ],
    itertools.product(IN_JAX, ("all", "last", "none"), (AxisType.Auto, AxisType.Explicit)),
)
def test_operands_that_differ_between_shards(name, varying, kind):
    """Results vary over the axes of any operand; if none varies, their out-spec may be replicated."""
    planner, plan = IN_JAX[name]
    mesh, (cases, _) = make_mesh((8,), ("x",), kind), stacked(planner, 8)
    first = {"all": 0, "last": len(cases) - 1, "none": len(cases)}[varying]
    operands = *(case[0] for case in cases[:first]), *cases[first:]
    by_shard, whole = PartitionSpec("x"), PartitionSpec()
    specs, out = (whole,) * first + (by_shard,) * (len(cases) - first), whole if varying == "none" else by_shard

    def one_shard(*operands):
        results = as_tuple(plan(*operands[:first], *(operand[0] for operand in operands[first:])))
        axes = jax.typeof(operands[-1]).manual_axis_type
        assert all(jax.typeof(result).manual_axis_type == axes for result in results)
        return results if varying == "none" else tuple(result[None] for result in results)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)]
        got = jax.jit(jax.shard_map(one_shard, in_specs=specs, out_specs=out))(*placed)
    for shard in range(8):
        want = planner.module(*operands[:first], *(operand[shard] for operand in operands[first:]))
        assert_same(tuple(result if varying == "none" else np.asarray(result)[shard] for result in got), want)


@pytest.mark.slow
@EACH_PLANNER
@parametrize("kind", [AxisType.Explicit], [AxisType.Auto])
def test_outside_shard_map_on_a_mesh(planner, kind):
    mesh, case = make_mesh((8,), ("x",), kind), planner.draw(np.random.default_rng(3))
    with jax.set_mesh(mesh):
        placed = tuple(jax.device_put(array, jax.NamedSharding(mesh, PartitionSpec())) for array in case)
        assert_same(jax.jit(planner.op)(*placed), planner.module(*case))


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.slow
def test_lowering_for_cuda_without_a_gpu(name):
    case = PLANNERS[name].draw(np.random.default_rng(4))
    traced = jax.jit(PLANNERS[name].op).trace(*case)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert (f"@moe_lb_plan_{name}" in text) == is_built("cuda")
    assert ("stablehlo.while" in text) != is_built("cuda")


def test_attributes_and_status_word_of_the_lowered_call():
    case = PLANNERS["greedy"].draw(np.random.default_rng(4))
    for platform in ("cpu", "cuda"):
        text = jax.jit(PLANNERS["greedy"].op).trace(*case).lower(lowering_platforms=(platform,)).as_text()
        if is_built(platform):
            call = next(line for line in text.splitlines() if "moe_lb_plan_greedy" in line)
            for name, value in PLANNERS["greedy"].op.keywords.items():
                assert f"{name} = {value} : i64" in call
            assert call.endswith("-> (tensor<6x4xi32>, tensor<12x6xi32>, tensor<1xi32>)")
            # Only if a failure raises no error does the program read the word.
            assert ("stablehlo.select" in text) == (platform == "cuda")


@pytest.mark.slow
def test_a_failed_plan_is_illegal():
    """The effect of a nonzero status word on a GPU."""
    counts = jnp.ones((4, 8), jnp.int32)
    start = plain_plan(counts, Topology.flat(4))

    @jax.jit
    def plan(status):
        placement, quota = illegal_if_failed(status, *greedy(start.placement, start.quota, 4, 1))
        return Plan(placement, quota, domain=4)

    check_plan(plan(jnp.array([0], jnp.int32)), counts)
    with pytest.raises(ValueError, match=r"plan.placement of rank 0, slot 0 is -1; expected its home"):
        check_plan(plan(jnp.array([1], jnp.int32)), counts)
