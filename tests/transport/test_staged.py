"""Two waves over one plan give the numbers of one wave, and no way leads from planner and copies to the first."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.workloads import WORKLOADS
from jax_moe_lb import (
    FEPLB,
    Chain,
    Direct,
    Experts,
    Gather,
    Greedy,
    PeerCopy,
    Staged,
    System,
    TopK,
    Topology,
    _custom_calls,
    check_plan,
    moe,
    plain_plan,
)
from jax_moe_lb.legality import ensure_legal
from tests.dependencies import of_compiled, of_lowered
from tests.layer import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients

pytestmark = pytest.mark.slow

CASE, MESH, SPEC = Case(), make_mesh((8,), ("expert",)), PartitionSpec("expert")
TOPOLOGY = Topology.from_mesh(MESH, ranks_per_domain=4)
STAGED = System(FEPLB(num_dynamic=1, skip=True), PeerCopy(), Staged(0.4), replica_slots=2)
DIRECT = dataclasses.replace(STAGED, dispatch=Direct(0.4))
HEAVY = r"moe_lb_(grouped|ragged_exchange).*/"
"""A custom call that computes or exchanges rows, in the scope that is appended."""
RAGGED = r"(ragged_dot|ragged_all_to_all).*"
"""The same where it is lowered for a GPU."""


def arguments(workload):
    x, mask = CASE.tokens(workload, 8, jnp.float32)
    target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)
    return x, mask, *CASE.params(jnp.float32), target


@functools.cache
def compiled(system):
    """The layer with its gradients."""
    return with_gradients(sharded_moe(MESH, TOPOLOGY, system)).lower(*arguments(WORKLOADS[0])).compile()


@functools.cache
def compiled_forward(system):
    return jax.jit(sharded_moe(MESH, TOPOLOGY, system)).lower(*arguments(WORKLOADS[0])[:4]).compile()


@functools.cache
def dense():
    return dense_with_gradients(TopK(2))


# ---- values -------------------------------------------------------------------------


def test_one_plan_through_one_wave_and_through_two():
    """On skewed, empty, masked and one-expert loads, in several rounds of each wave; and the same bits again."""
    moved = []
    for workload in WORKLOADS:
        args = arguments(workload)
        (y, stats), gradients = compiled(STAGED)(*args)
        want, of_direct = compiled_forward(DIRECT)(*args[:4])
        np.testing.assert_array_equal(y, want)
        for name in ("counts", "quota", "load_after", "rows_moved", "weight_bytes_moved"):
            np.testing.assert_array_equal(getattr(stats, name), getattr(of_direct, name))
        assert_close(gradients, dense()(*args)[1], 1e-5)
        jax.tree.map(np.testing.assert_array_equal, compiled(STAGED)(*args), ((y, stats), gradients))
        moved.append(float(stats.weight_bytes_moved[0]))
    assert min(moved) == 0 < max(moved)


def test_rounds_of_both_waves_are_counted():
    """As many as the highest load of each wave needs."""
    (_, stats), _ = compiled(STAGED)(*arguments(next(w for w in WORKLOADS if w.name == "hot_rank")))
    tokens = np.asarray(stats.counts[0]).sum(0)
    dynamic = np.zeros((8, 2), bool)
    dynamic[np.arange(8), tokens.reshape(8, 2).argmax(1)] = True
    quota, capacity = np.asarray(stats.quota[0]), STAGED.dispatch.capacity(CASE.num_tokens * 2)
    waves = (np.where(which.reshape(-1, 1), quota, 0).sum(0).max() for which in (dynamic, ~dynamic))
    assert int(stats.rounds[0]) == sum(-(-int(load) // capacity) for load in waves) > 2


def test_all_experts_dynamic_and_weights_by_collectives():
    """A first wave without rows, a balancer that is more than a planner, and copies that no custom call starts."""
    system = System(Chain((FEPLB(), Greedy())), Gather(), Staged(), replica_slots=2)
    for workload in WORKLOADS[1:4]:
        args = arguments(workload)
        (y, stats), gradients = compiled(system)(*args)
        (want, _), want_gradients = dense()(*args)
        assert_close((y, gradients), (want, want_gradients), 1e-5)
        capacity = system.dispatch.capacity(CASE.num_tokens * 2)
        assert int(stats.rounds[0]) == -(-int(stats.load_after.max()) // capacity)


# ---- what waits for what ------------------------------------------------------------


def check_first_wave(graph, wave, plans, copies, second):
    """The first wave needs neither planner nor copies; what begins them needs nothing of it; the second needs both."""
    assert all((wave, plans, copies, second))
    begins = graph.holding("moe_lb_copy_post")
    assert begins
    assert not graph.needs(wave) & (plans | copies)
    assert not graph.needs(begins) & wave
    # Launched after the wave, so that it plans and copies beside it.
    assert wave <= graph.needs(plans)
    assert begins <= graph.needs(wave)
    assert plans | copies <= graph.needs(second)


def test_the_first_wave_needs_neither_plan_nor_copies():
    graph = of_compiled(compiled(STAGED).as_text())
    plans, starts = graph.holding("moe_lb_plan_feplb_and_copy"), graph.holding("moe_lb_copy_start")
    copies = {join for join in graph.holding("moe_lb_copy_join") if not starts & graph.needs([join])}
    first = graph.holding(HEAVY + "static_wave") & graph.needs(plans)
    check_first_wave(graph, first, plans, copies, graph.holding(HEAVY + "dynamic_wave"))


def test_one_wave_needs_plan_and_copies():
    """By the same walk: it does find what there is."""
    graph = of_compiled(compiled_forward(DIRECT).as_text())
    wave = graph.holding("moe_lb_grouped")
    assert graph.holding("moe_lb_plan_feplb") <= graph.needs(wave)
    assert graph.holding("moe_lb_copy_join") <= graph.needs(wave)


def test_in_the_backward_pass_copies_are_made_again_beside_the_first_wave():
    graph = of_compiled(compiled(STAGED).as_text())
    starts, posts = graph.holding("moe_lb_copy_start"), graph.holding("moe_lb_copy_post")
    assert len(starts) == len(posts) == 1
    check_backward(graph, starts, HEAVY)
    (sums,) = graph.holding("moe_lb_copy_sum")
    assert graph.holding("moe_lb_grouped_outer.*/dynamic_wave/") <= graph.needs([sums])


def check_backward(graph, starts, heavy):
    joins = {join for join in graph.holding("moe_lb_copy_join") if starts <= graph.needs([join])}
    wave = {one for one in graph.holding(heavy + "static_wave") if graph.needs(joins) >= {one}} - forward(graph)
    assert starts
    assert joins
    assert wave
    assert not graph.needs(wave) & (starts | joins)
    assert not graph.needs(starts) & wave


def forward(graph):
    return graph.needs(graph.holding("moe_lb_plan_feplb_and_copy"))


def test_the_same_where_it_is_lowered_for_a_gpu():
    """Without callbacks to the host, which can only be lowered for a backend that is there."""
    traced = with_gradients(sharded_moe(MESH, TOPOLOGY, STAGED, checks="deferred")).trace(*arguments(WORKLOADS[0]))
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    if not _custom_calls.is_built("cuda"):
        assert "moe_lb_" not in text
        return
    graph = of_lowered(text, "@moe_lb_copy_post")
    plans, copies = graph.holding("@moe_lb_plan_feplb_and_copy"), graph.holding("@moe_lb_copy_join")
    first, second = (graph.holding(f"{RAGGED}{wave}_wave") for wave in ("static", "dynamic"))
    check_first_wave(graph, first, plans, copies, second)
    graph = of_lowered(text, "@moe_lb_copy_start")
    # The sum of the gradients of replicas is copies too, there and back.
    check_backward(graph, graph.holding("@moe_lb_copy_start") - graph.holding("@moe_lb_copy_join"), RAGGED)


# ---- memory -------------------------------------------------------------------------


def test_all_layers_of_a_stack_share_the_slots():
    """Four layers and one slot more take one expert more, not one for each layer."""
    mlp_dim = 4096
    expert = CASE.width * mlp_dim * 2 * 4

    def temporaries(layers, replica_slots):
        system = dataclasses.replace(STAGED, replica_slots=replica_slots)

        def one_rank(x, kernel, experts):
            def layer(x, experts):
                return x + moe(x, kernel, experts, TopK(2), system, TOPOLOGY)[0], None

            return jax.lax.scan(layer, x, experts)[0]

        def arguments():
            up, down = jnp.zeros((layers, 16, CASE.width, mlp_dim)), jnp.zeros((layers, 16, mlp_dim, CASE.width))
            return jnp.zeros((8 * CASE.num_tokens, CASE.width)), jnp.zeros((CASE.width, 16)), Experts(up, down)

        specs = SPEC, PartitionSpec(), PartitionSpec(None, "expert")
        run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=specs, out_specs=SPEC))
        return run.lower(*jax.eval_shape(arguments)).compile().memory_analysis().temp_size_in_bytes

    assert 0.99 * expert < temporaries(6, 3) - temporaries(2, 2) < 1.01 * expert


# ---- refusals -----------------------------------------------------------------------


def test_a_plan_that_takes_a_static_expert_from_home_is_refused():
    counts = np.full((8, 16), 3, np.int32)
    plan = plain_plan(counts, TOPOLOGY, 3)
    dynamic = np.asarray(STAGED.balancer.dynamic(plan))
    assert dynamic.tolist() == [True, False] * 8
    for expert in (0, 1):
        placement, quota = plan.placement.copy(), plan.quota.copy()
        placement[2, 2], quota[expert, 0], quota[expert, 2] = expert, 0, 24
        moved = dataclasses.replace(plan, placement=placement, quota=quota)
        check_plan(moved, counts)
        if dynamic[expert]:
            check_plan(moved, counts, dynamic)
    message = "quota of expert 1, rank 2 is 24; expected 0: the expert is static, served by its home, rank 0, alone"
    with pytest.raises(ValueError, match=message):
        check_plan(moved, counts, dynamic)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(ensure_legal)(moved, jnp.asarray(counts), jnp.asarray(dynamic)))


@pytest.mark.parametrize("headroom", [0.0, float("inf")])
def test_bad_headroom_is_refused(headroom):
    with pytest.raises(ValueError, match=rf"headroom is {headroom}; expected a finite number above 0"):
        Staged(headroom)
