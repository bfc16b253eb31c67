"""The kernels of planners for GPUs, run on the CPU by fibers, against the planners in C++.

`exact_block_test.cc` and `edit_block_test.cc` of `ffi/planning/device` also check their accesses to shared memory and
each of their barriers.
"""

from functools import partial

import jax
import numpy as np
import pytest

from jax_moe_lb import _planning
from jax_moe_lb.core.custom_calls import is_built
from jax_moe_lb.planners import base
from jax_moe_lb.planners.exact import UNBOUNDED, exact, exact_plans, fits_kernel
from tests.planners.planner_cases import PLANNERS, assert_same
from tests.planners.test_exact import draw_counts

OPTIONS = [(0.0, UNBOUNDED, True), (0.01, UNBOUNDED, True), (0.05, 2, False)]
# ranks, home experts, slots, ranks per domain
SHAPES = [(8, 16, 18, 8), (8, 4, 6, 4), (40, 2, 3, 20), (64, 4, 6, 64), (72, 4, 6, 72)]


EDITS = ("ultraep", "relay")


def has_kernels():
    """Return whether the custom calls were built with nvcc."""
    return fits_kernel((8, 16), 3, 8, 0.0, False)


def assert_kernel_plans_as_the_host(counts, slots, domain, options):
    placement, quota, times = _planning.exact_kernel(counts, slots, domain, *options)
    assert_same((placement, quota), _planning.exact(counts, slots, domain, *options))
    assert all(0 < overlapped <= cycles for cycles, overlapped, *_ in times)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_the_plan_of_the_host(shape):
    num_ranks, num_home, slots, domain = shape
    counts = draw_counts(np.random.default_rng(0), num_ranks, num_home, 1e6)
    for options in OPTIONS:
        assert_kernel_plans_as_the_host(counts, slots, domain, options)


@pytest.mark.thorough
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_many_counts_give_the_plan_of_the_host(options):
    rng = np.random.default_rng(1)
    for num_ranks, num_home, slots, domain in [(6, 3, 5, 6), (8, 2, 3, 8), (8, 4, 6, 4), (12, 2, 3, 12)]:
        counts = np.stack([draw_counts(rng, num_ranks, num_home, 10 ** rng.uniform(1, 6)) for _ in range(500)])
        assert_kernel_plans_as_the_host(counts, slots, domain, options)


def test_refused_arguments_are_named():
    with pytest.raises(ValueError, match="counts of rank 1, expert 0 is -1; expected at least 0"):
        _planning.exact_kernel(np.array([[1, 2], [-1, 3]], np.int32), 2, 2)
    with pytest.raises(ValueError, match="domain is 129 ranks; expected one that fits into the shared memory"):
        _planning.exact_kernel(np.ones((129, 129), np.int32), 2, 129)


def test_sizes_of_the_kernel():
    assert fits_kernel((64, 256), 6, 64, 0.01, True) == has_kernels()
    assert fits_kernel((128, 512), 6, 64, 0.01, True) == has_kernels()
    for num_ranks, num_experts in ((72, 288), (72, 576), (128, 256), (128, 512)):
        assert (
            fits_kernel((num_ranks, num_experts), num_experts // num_ranks + 2, num_ranks, 0.01, True) == has_kernels()
        )
    assert not fits_kernel((128, 1024), 10, 128, 0.01, True)
    assert not fits_kernel((256, 256), 3, 256, 0.01, True)
    assert not fits_kernel((64, 256), 64, 64, 0.01, True)


@pytest.mark.parametrize("num_ranks", [128, 129])
@pytest.mark.slow
def test_gpus_run_the_kernel_if_the_domain_fits(num_ranks):
    target = "moe_lb_plan_exact_kernel" if num_ranks == 128 and has_kernels() else "moe_lb_plan_exact"
    counts = jax.ShapeDtypeStruct((num_ranks, num_ranks), np.int32)
    traced = jax.jit(lambda counts: exact(counts, 2, num_ranks)).trace(counts)
    assert (f"@{target}(" in traced.lower(lowering_platforms=("cuda",)).as_text()) == is_built("cuda")
    if is_built("cpu"):
        assert "@moe_lb_plan_exact(" in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.slow
def test_plans_under_several_limits_are_one_launch():
    """On a CPU, each has a call of its own. Those under a limit that binds are brief."""
    # A whole search under the first limit gives another plan.
    counts, limits = draw_counts(np.random.default_rng(0), 8, 4, 1e4), (1, UNBOUNDED, 0)
    plan = jax.jit(lambda counts: exact_plans(limits, counts, 6, 8, 0.0, None, True, False))
    for limit, *planned in zip(limits, *plan(counts), strict=True):
        slots = 4 + min(2, limit)
        placement, quota = _planning.exact(counts, slots, 8, 0.0, limit, True, limit < 16)
        assert_same(tuple(planned), (np.pad(placement, ((0, 0), (0, 6 - slots)), constant_values=-1), quota))
    if has_kernels():
        lowered = plan.trace(counts).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("@moe_lb_plan_exact_kernel(") == 1


def in_kernel(name):
    """Return the function of a kernel with the options of its planner."""
    module = PLANNERS[name].module
    return partial(getattr(_planning, f"{name}_kernel"), **module.keywords)


@pytest.mark.parametrize("name", EDITS)
def test_other_kernels_give_the_plan_of_the_host(name):
    for seed in range(20):
        operands = PLANNERS[name].draw(np.random.default_rng(seed))
        *planned, times = in_kernel(name)(*operands)
        assert_same(tuple(planned), PLANNERS[name].module(*operands))
        assert all(0 < overlapped <= cycles for cycles, overlapped, *_ in times)


@pytest.mark.parametrize("name", EDITS)
def test_a_plan_that_the_planner_refuses_is_named(name):
    placement, *quota = PLANNERS[name].draw(np.random.default_rng(0))
    placement[0, 0] = 10**6
    with pytest.raises(ValueError, match="placement of rank 0, slot 0 is 1000000; expected"):
        in_kernel(name)(placement, *quota)


@pytest.mark.parametrize("num_ranks", [128, 129])
@pytest.mark.parametrize("name", EDITS)
def test_gpus_run_other_kernels_if_the_domain_fits(name, num_ranks):
    fits = base.fits_kernel(name, (num_ranks, 3), 2 * num_ranks, num_ranks)
    assert fits == (num_ranks == 128 and has_kernels())
    assert not base.fits_kernel("eplb_plus", (num_ranks, 3), 2 * num_ranks, num_ranks)
    op = PLANNERS[name].op
    size = {"num_home": 2} if name == "relay" else {"domain": num_ranks}
    placement = np.full((num_ranks, 3), -1, np.int32)
    quota = np.zeros((2 * num_ranks, num_ranks), np.int32)
    operands = (placement,) if name == "relay" else (placement, quota)
    traced = jax.jit(partial(op, **size)).trace(*map(jax.numpy.asarray, operands))
    target = f"@moe_lb_plan_{name}{'_kernel' if fits else ''}("
    assert (target in traced.lower(lowering_platforms=("cuda",)).as_text()) == is_built("cuda")
