"""The layer on every kind of mesh, under every transformation, and with invalid input."""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import (
    Balancer,
    Buffers,
    Experts,
    HostCallback,
    MoEParams,
    Plan,
    System,
    TopK,
    Topology,
    exact,
    feplb,
    greedy,
    plain,
    rails,
    raise_on_fault,
)
from jax_moe_lb.core.stats import NO_FAULT, PLAN
from jax_moe_lb.layer.moe import moe
from jax_moe_lb.routing import ForceBalanced
from tests.layer_cases import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients

BY_NAME = {workload.name: workload for workload in WORKLOADS}
LAYOUTS = {
    "expert axis": ((8,), ("expert",), "expert", {"ranks_per_domain": 4}),
    "tuple of axes": ((2, 2, 2), ("dc", "node", "gpu"), ("dc", "node", "gpu"), {}),
    "data x expert": ((2, 4), ("data", "expert"), "expert", {}),
    "expert x data": ((4, 2), ("expert", "data"), "expert", {}),
    "axes of one device": ((1, 2, 1, 4), ("stage", "data", "tensor", "expert"), "expert", {}),
    "tuple with an axis of one device": ((1, 2, 4), ("dc", "node", "gpu"), ("dc", "node", "gpu"), {}),
    "an axis of copies": ((2, 2, 2), ("data", "copy", "expert"), "expert", {"data_axes": "data"}),
    "one device": ((1,), ("expert",), "expert", {}),
}


EVERYDAY = ("tuple of axes", "data x expert")
"""Layouts tested by default; others are thorough cases, of which two run by default with their own settings."""


def arguments(case, workload, shards, dtype="float32"):
    x, mask = case.tokens(workload, shards, dtype)
    target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), "float32")
    return x, mask, *case.params(dtype), target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "check_vma"),
    [
        ("tuple of axes", True),
        pytest.param("data x expert", True, marks=pytest.mark.thorough),
        *(pytest.param(layout, True, marks=pytest.mark.thorough) for layout in LAYOUTS if layout not in EVERYDAY),
        pytest.param("data x expert", False, marks=pytest.mark.thorough),
    ],
)
def test_every_layout_equals_dense(layout, check_vma):
    sizes, names, axis, options = LAYOUTS[layout]
    case, mesh = Case(), make_mesh(sizes, names)
    topology = Topology.from_mesh(mesh, axis, **options)
    # Headroom below 1, so that parallel groups need different numbers of rounds.
    layer = with_gradients(sharded_moe(mesh, topology, greedy(1, Buffers(headroom=0.3)), check_vma=check_vma))
    dense = dense_with_gradients(TopK(2))
    groups = math.prod(mesh.shape[name] for name in topology.data_axes)
    for name in ("zipf", "hot_rank", "empty_rank"):
        args = arguments(case, BY_NAME[name], groups * topology.num_ranks)
        (y, stats), gradients = layer(*args)
        (want, _), want_gradients = dense(*args)
        assert_close((y, gradients), (want, want_gradients), 1e-5)
        assert stats.counts.shape == (groups, topology.num_ranks, case.num_experts)


@pytest.mark.slow
@pytest.mark.thorough
def test_exchanges_as_between_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    test_every_layout_equals_dense("an axis of copies", True)


@pytest.mark.slow
@pytest.mark.thorough
def test_axes_of_one_device_may_be_in_no_type(one_device_axes_removed):
    test_every_layout_equals_dense("axes of one device", True)


@pytest.fixture
def one_device_axes_removed():
    """Set the JAX option used by MaxText."""
    name = "jax_remove_size_one_mesh_axis_from_type"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.slow
def test_groups_side_by_side_need_different_rounds():
    """Two data shards, one idle: each runs the rounds of its own plan."""
    case, mesh = Case(), make_mesh((2, 4), ("data", "expert"))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom=0.5))))
    x, mask, *rest = arguments(case, BY_NAME["one_hot"], 8)
    mask = mask & (jnp.arange(mask.shape[0]) < mask.shape[0] // 2)
    (y, stats), gradients = layer(x, mask, *rest)
    (want, _), want_gradients = dense_with_gradients(TopK(2))(x, mask, *rest)
    assert_close((y, gradients), (want, want_gradients), 1e-5)
    assert stats.rounds[0] > 1
    assert stats.rounds[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "headroom", [0.1, 1.05, *(pytest.param(value, marks=pytest.mark.thorough) for value in (0.5, 8.0))]
)
def test_rounds_are_what_the_load_needs(headroom):
    case, mesh = Case(), make_mesh((8,), ("expert",))
    x, mask, kernel, experts, _ = arguments(case, BY_NAME["one_hot"], 8)
    _, stats = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom))))(x, mask, kernel, experts)
    capacity = int(np.ceil(headroom * case.num_tokens * case.per_tok))
    assert int(stats.rounds[0]) == -(-int(stats.load_after.max()) // capacity)


@pytest.mark.slow
def test_stats_say_what_happened():
    case, mesh = Case(), make_mesh((8,), ("expert",))
    workload = BY_NAME["lognormal"]
    x, mask, kernel, experts, _ = arguments(case, workload, 8)
    _, stats = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), greedy(2)))(x, mask, kernel, experts)
    counts = workload.counts(0, 8, case.num_tokens, case.num_experts, 2)
    before = counts.sum(0).reshape(8, 2).sum(1)
    np.testing.assert_array_equal(stats.counts[0], counts)
    np.testing.assert_array_equal(stats.load_before[0], before)
    assert stats.imbalance_before[0] == pytest.approx(before.max() / before.mean())
    assert stats.straggler_before[0] == pytest.approx(before.max() - before.mean())
    after = np.asarray(stats.load_after[0])
    assert after.sum() == before.sum()
    np.testing.assert_array_equal(stats.quota[0].sum(1), counts.sum(0))
    np.testing.assert_array_equal(stats.quota[0].sum(0), after)
    assert stats.imbalance_after[0] == pytest.approx(after.max() / after.mean())
    assert stats.imbalance_after[0] < 1.05 < stats.imbalance_before[0]
    expert_bytes = 3 * case.width * case.mlp_dim * 4
    assert stats.weight_bytes_moved[0] % expert_bytes == 0
    assert 1 <= stats.weight_bytes_moved[0] // expert_bytes <= 16
    assert 0 < stats.rows_moved[0] <= before.sum()


@pytest.mark.slow
@pytest.mark.thorough
def test_force_balanced_routing_needs_no_balancing():
    case, mesh = Case(), make_mesh((8,), ("expert",))
    router = ForceBalanced(TopK(2))
    args = arguments(case, BY_NAME["one_hot"], 8)
    (y, stats), gradients = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), plain(), router))(*args)
    (want, _), want_gradients = dense_with_gradients(router)(*args)
    assert_close((y, gradients), (want, want_gradients), 1e-5)
    assert stats.imbalance_before[0] == 1
    assert stats.rounds[0] == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_layer_runs_twice_to_the_same_bits():
    case, mesh = Case(), make_mesh((8,), ("expert",))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), greedy(2, Buffers(headroom=0.4))))
    args = arguments(case, BY_NAME["zipf"], 8)
    for a, b in zip(jax.tree.leaves(layer(*args)), jax.tree.leaves(layer(*args)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_of_one_hot_routing_is_near_the_mean():
    """Same program with two buffers: 1.05 x the mean in rounds, or the worst case in one round."""
    case, mesh = Case(num_tokens=512, features=48), make_mesh((8,), ("expert",))
    x, mask, kernel, experts, target = arguments(case, BY_NAME["one_hot"], 8)
    temporaries = {}
    for headroom in (1.05, 8.0):
        layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), plain(Buffers(headroom))))
        compiled = layer.lower(x, mask, kernel, experts, target).compile()
        temporaries[headroom] = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries[1.05] < 0.4 * temporaries[8.0]


# ---- invalid input -----------------------------------------------------------


@functools.cache
def layer_with_gradients(router):
    """Return the layer of eight ranks, compiled once for all tests with invalid values."""
    mesh = make_mesh((8,), ("expert",))
    return with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), greedy(), router))


def with_bad_experts(logits, bias, info):
    """Select expert 16 for tokens with large logits, and -5 for tokens with large negative ones."""
    experts = TopK(2)(logits).experts
    experts = jnp.where(logits.max(-1, keepdims=True) > 1e3, 16, experts)
    return TopK(2).with_experts(logits, jnp.where(logits.max(-1, keepdims=True) < -1e3, -5, experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("router", "rank", "value", "message"),
    [
        (TopK(2), None, np.nan, r"router logits of rank 0 give weights that are not finite; expected finite logits"),
        (TopK(2), None, np.inf, r"router logits of rank 0 give weights that are not finite; expected finite logits"),
        pytest.param(
            with_bad_experts,
            2,
            1e4,
            r"expert ids of rank 2 include 16 \(48 bad ones\); expected 0 to 15",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            with_bad_experts,
            1,
            -1e4,
            r"expert ids of rank 1 include -5 \(48 bad ones\); expected 0 to 15",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["nan", "infinite", "too high", "too low"],
)
def test_bad_values_are_refused_and_later_calls_work(router, rank, value, message):
    case = Case()
    x, mask, kernel, experts, target = arguments(case, BY_NAME["zipf"], 8)
    if rank is None:
        bad = (x, mask, kernel * value)
    else:
        rows = slice(rank * case.num_tokens, (rank + 1) * case.num_tokens)
        bad = (x.at[rows, case.features :].set(value), mask.at[rows].set(True), kernel)
    run = layer_with_gradients(router)
    with pytest.raises(ValueError, match=message):
        run(*bad, experts, target)
    run(x, mask, kernel, experts, target)


@dataclass(frozen=True)
class LosesOfExpertZero(Balancer):
    """Balancer whose plan lacks a token of expert 0 if it has at least `limit`."""

    limit: int

    def rebalance(self, counts, plan, topology, state):
        busy = counts[:, 0].sum(dtype=jnp.int32) >= self.limit
        return replace(plan, quota=plan.quota.at[0, 0].add(-busy.astype(jnp.int32))), state


@pytest.mark.slow
def test_an_illegal_plan_in_one_data_parallel_group_is_of_that_group():
    case, mesh = Case(), make_mesh((2, 4), ("data", "expert"))
    x, mask, kernel, experts, _ = arguments(case, BY_NAME["zipf"], 8)
    # All tokens of the second group prefer expert 0.
    x = x.at[4 * case.num_tokens :, case.features].set(100.0)
    system = System(LosesOfExpertZero(4 * case.num_tokens))
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    _, stats = layer(x, mask, kernel, experts)
    assert stats.fault.code.tolist() == [NO_FAULT, PLAN]
    with pytest.raises(ValueError, match=r"group 1 of 2: plan.quota of expert 0 sums to \d+ tokens"):
        raise_on_fault(stats)


@pytest.mark.slow
@pytest.mark.parametrize(
    "padding", [np.nan, *(pytest.param(sign * np.inf, marks=pytest.mark.thorough) for sign in (1, -1))]
)
def test_padding_may_hold_anything(padding):
    """Outputs and gradients equal those with zeros as padding."""
    x, mask, kernel, experts, target = arguments(Case(), BY_NAME["empty_rank"], 8)
    layer = layer_with_gradients(TopK(2))
    found, want = (layer(jnp.where(mask[:, None], x, value), mask, kernel, experts, target) for value in (padding, 0.0))
    assert not mask.all()
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_tokens_of_another_dtype_are_refused_by_name():
    case, mesh = Case(), make_mesh((8,), ("expert",))
    x, mask, kernel, experts, _ = arguments(case, BY_NAME["zipf"], 8)
    with pytest.raises(ValueError, match="x has dtype float16; expected bfloat16, float32 or float64"):
        jax.eval_shape(sharded_moe(mesh, Topology.from_mesh(mesh), plain()), x.astype("float16"), mask, kernel, experts)


def lose_a_token(counts, plan, topology):
    quota = plan.quota.copy()
    quota[np.unravel_index(quota.argmax(), quota.shape)] -= 1
    return Plan(plan.placement, quota, domain=plan.domain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (lose_a_token, r"plan.quota of expert \d+ sums to \d+ tokens; expected the \d+ of counts"),
        (lambda counts, plan, topology: plan.quota, r"planner returned ndarray; expected a Plan"),
        (
            lambda counts, plan, topology: Plan(plan.placement[:, :2], plan.quota, domain=plan.domain),
            r"planner returned an array of shape \(8, 2\); expected \(8, 3\), as in the input",
        ),
    ],
)
def test_a_bad_plan_of_a_host_callback_is_replaced(planner, message):
    case, mesh = Case(), make_mesh((8,), ("expert",))
    x, mask, kernel, experts, _ = arguments(case, BY_NAME["zipf"], 8)
    system = System(HostCallback(planner), replica_slots=1)
    layer = jax.jit(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    _, stats = layer(x, mask, kernel, experts)
    np.testing.assert_array_equal(stats.load_after, stats.load_before)
    with pytest.raises(ValueError, match=message):
        raise_on_fault(stats)


def test_bad_shapes_are_refused():
    mesh = make_mesh((8,), ("expert",))
    topology = Topology.from_mesh(mesh)
    x, kernel = jnp.zeros((4, 6)), jnp.zeros((6, 16))
    with pytest.raises(ValueError, match=r"experts holds 3 experts on each of 8 ranks; expected 16 in all"):
        moe(x, MoEParams(kernel, Experts(jnp.zeros((3, 6, 2)), jnp.zeros((3, 2, 6)))), TopK(2), plain(), topology)
    with pytest.raises(ValueError, match=r"x has width 6 and experts.up 5; expected 6, as in the router's kernel"):
        moe(x, MoEParams(kernel, Experts(jnp.zeros((2, 5, 2)), jnp.zeros((2, 2, 5)))), TopK(2), plain(), topology)
    params = MoEParams(kernel, Experts(jnp.zeros((2, 6, 2)), jnp.zeros((2, 2, 6))))
    with pytest.raises(ValueError, match=r"topology has no expert_axes; expected one made by Topology.from_mesh"):
        moe(x, params, TopK(2), plain(), Topology.flat(8))
    with pytest.raises(ValueError, match=r"replica_slots is -1; expected at least 0"):
        System(replica_slots=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [
        pytest.param(greedy(), marks=pytest.mark.thorough),
        feplb(),
        pytest.param(exact(), marks=pytest.mark.thorough),
        pytest.param(rails(), marks=pytest.mark.thorough),
    ],
    ids=["greedy", "feplb", "exact", "rails"],
)
def test_the_whole_layer_lowers_for_a_gpu(system):
    """Forward and backward, on a machine without a GPU: exact-size exchanges, no emulation, no dense expansion, and no
    host callback.
    """
    case, mesh = Case(), make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), ranks_per_domain=8, rails_per_node=4)
    layer = with_gradients(sharded_moe(mesh, topology, system))
    args = arguments(case, BY_NAME["zipf"], 8, "bfloat16")
    text = layer.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_all_to_all" in text
    for absent in ("ragged_dot", "collective_permute", "python"):
        assert absent not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "system", [greedy(), pytest.param(feplb(), marks=pytest.mark.thorough)], ids=["greedy", "feplb"]
)
def test_no_tokens_at_all(system):
    case, mesh = Case(), make_mesh((8,), ("expert",))
    layer = with_gradients(sharded_moe(mesh, Topology.from_mesh(mesh), system))
    x = jnp.zeros((0, case.width))
    (y, stats), gradients = layer(x, jnp.zeros((0,), bool), *case.params("float32"), x)
    assert y.shape == x.shape
    assert int(stats.rounds[0]) == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_derivatives_that_are_not_there_are_refused_in_one_line():
    mesh = make_mesh((2,), ("expert",))
    run = sharded_moe(mesh, Topology.from_mesh(mesh), greedy(1))
    case = Case(num_tokens=4, num_experts=4)
    kernel, experts = case.params(jnp.float32)
    x, mask = jnp.ones((8, case.width)), jnp.ones(8, bool)

    def total(x):
        return run(x, mask, kernel, experts)[0].sum()

    with pytest.raises(NotImplementedError, match="moe has no second derivatives"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(total)(x).sum()), x)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(lambda x: jax.jvp(total, (x,), (x,))).lower(x)
