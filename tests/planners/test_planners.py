"""All implementations of every planner agree, under all transformations and on all meshes."""

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
from tests.planners.planner_cases import PLANNERS, as_tuple, assert_same

EACH_PLANNER = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
ON_MESHES = pytest.mark.parametrize(
    "axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.thorough), AxisType.Explicit]
)
EACH_IN_JAX = pytest.mark.parametrize(
    ("planner", "plan"),
    [
        pytest.param(
            planner, plan, id=f"{name}-{implementation}", marks=() if implementation == "op" else pytest.mark.thorough
        )
        for name, planner in PLANNERS.items()
        for implementation, plan in (("op", planner.op), ("reference", planner.reference))
        if plan is not None
    ],
)


def each_in_jax_on_meshes(**axis_types):
    """Parametrize with implementations and axis types; those not given here for an implementation are thorough."""
    return pytest.mark.parametrize(
        ("planner", "plan", "axis_type"),
        [
            pytest.param(
                planner,
                plan,
                axis_type,
                id=f"{name}-{implementation}-{axis_type.name}",
                marks=() if axis_type in axis_types.get(implementation, ()) else pytest.mark.thorough,
            )
            for name, planner in PLANNERS.items()
            for implementation, plan in (("op", planner.op), ("reference", planner.reference))
            if plan is not None
            for axis_type in (AxisType.Auto, AxisType.Explicit)
        ],
    )


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
@EACH_IN_JAX
def test_vmap_scan_and_remat_plan_each_for_itself(planner, plan):
    cases, want = stacked(planner, 3)
    assert_same(jax.jit(jax.vmap(plan))(*cases), want)

    def step(carry, case):
        return carry, jax.checkpoint(plan)(*case)

    assert_same(jax.jit(lambda *cases: jax.lax.scan(step, 0, cases)[1])(*cases), want)


@pytest.mark.slow
@EACH_PLANNER
def test_vmap_over_one_operand_keeps_the_others(planner):
    cases, _ = stacked(planner, 3)
    rest = tuple(case[0] for case in cases[1:])
    got = jax.vmap(planner.op, in_axes=(0, *[None] * len(rest)))(cases[0], *rest)
    for i, first in enumerate(cases[0]):
        assert_same(tuple(result[i] for result in as_tuple(got)), planner.module(first, *rest))


@pytest.mark.slow
@each_in_jax_on_meshes(op=[AxisType.Explicit])
def test_shard_map_with_a_case_for_each_shard(planner, plan, axis_type):
    mesh, cases, want = make_mesh((8,), ("x",), axis_type), *stacked(planner, 8)

    def one_shard(*case):
        return tuple(result[None] for result in as_tuple(plan(*(array[0] for array in case))))

    with jax.set_mesh(mesh):
        cases = tuple(jax.device_put(case, jax.NamedSharding(mesh, PartitionSpec("x"))) for case in cases)
        got = jax.jit(jax.shard_map(one_shard, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")))(*cases)
    assert_same(got, want)


@pytest.mark.slow
@each_in_jax_on_meshes(op=[AxisType.Explicit])
def test_a_result_varies_over_the_axes_of_any_operand(planner, plan, axis_type):
    """The last operand differs between shards; the others are equal."""
    mesh = make_mesh((8,), ("x",), axis_type)
    cases, _ = stacked(planner, 8)
    rest, last = tuple(case[0] for case in cases[:-1]), cases[-1]
    specs = (*[PartitionSpec()] * len(rest), PartitionSpec("x"))

    def one_shard(*case):
        results = as_tuple(plan(*case[:-1], case[-1][0]))
        varying = jax.typeof(case[-1]).manual_axis_type
        assert all(jax.typeof(result).manual_axis_type == varying for result in results)
        return tuple(result[None] for result in results)

    with jax.set_mesh(mesh):
        args = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((*rest, last), specs, strict=True)]
        got = jax.jit(jax.shard_map(one_shard, in_specs=specs, out_specs=PartitionSpec("x")))(*args)
    for i, case in enumerate(last):
        assert_same(tuple(np.asarray(result)[i] for result in got), planner.module(*rest, case))


@pytest.mark.slow
@EACH_PLANNER
@ON_MESHES
def test_a_result_of_equal_operands_is_the_same_on_all_shards(planner, axis_type):
    """Its out-spec may be replicated, which is an error for varying values."""
    mesh, case = make_mesh((8,), ("x",), axis_type), planner.draw(np.random.default_rng(2))
    none = PartitionSpec()
    with jax.set_mesh(mesh):
        placed = tuple(jax.device_put(array, jax.NamedSharding(mesh, none)) for array in case)
        got = jax.jit(jax.shard_map(planner.op, in_specs=none, out_specs=none))(*placed)
    assert_same(got, planner.module(*case))


@pytest.mark.slow
@EACH_PLANNER
@ON_MESHES
def test_outside_shard_map_on_a_mesh(planner, axis_type):
    mesh, case = make_mesh((8,), ("x",), axis_type), planner.draw(np.random.default_rng(3))
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
