"""Rows that pass their homes are served as by the plan, and nothing of it is in the way of the static wave."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.workloads import WORKLOADS
from jax_moe_lb import FEPLB, Chain, Greedy, PeerCopy, RailS, System, TopK, Topology, TwoPhase, check_plan, plain_plan
from jax_moe_lb.ops.moved_rows import moved_rows, served_quota
from jax_moe_lb.plan import load, rows_between
from tests.dependencies import of_compiled
from tests.layer import Case, assert_close, dense_with_gradients, make_mesh, sharded_moe, with_gradients

CASE, MESH = Case(), make_mesh((8,), ("expert",))
TOPOLOGY = Topology.from_mesh(MESH, ranks_per_domain=4)
SYSTEM = System(FEPLB(num_dynamic=1, skip=True), PeerCopy(), TwoPhase(0.4, moved_headroom=0.3), replica_slots=2)
HEAVY = r"moe_lb_(grouped|ragged_exchange).*/"
"""A custom call that computes or exchanges rows, in the scope that is appended."""


def arguments(workload):
    x, mask = CASE.tokens(workload, 8, jnp.float32)
    target = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), jnp.float32)
    return x, mask, *CASE.params(jnp.float32), target


@functools.cache
def compiled():
    """The layer with its gradients."""
    return with_gradients(sharded_moe(MESH, TOPOLOGY, SYSTEM)).lower(*arguments(WORKLOADS[0])).compile()


# ---- values -------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_to_dense_in_rounds_and_without_room_for_all():
    """On skewed, empty, masked and one-expert loads; what is said to be served is legal, and the same as planned on a
    host.
    """
    dense, moved, less = dense_with_gradients(TopK(2)), [], []
    capacity, room = (SYSTEM.dispatch.capacity(CASE.num_tokens * 2), SYSTEM.dispatch.room(CASE.num_tokens * 2))
    for workload in WORKLOADS:
        args = arguments(workload)
        (y, stats), gradients = compiled()(*args)
        (want, _), want_gradients = dense(*args)
        assert_close((y, gradients), (want, want_gradients), 1e-5)
        counts, quota = np.asarray(stats.counts[0]), np.asarray(stats.quota[0])
        np.testing.assert_array_equal(quota.sum(1), counts.sum(0))
        start = plain_plan(counts, TOPOLOGY, 4)
        plan = SYSTEM.balancer.rebalance(counts, start, TOPOLOGY, ())[0]
        # Home receives what it would without a balancer.
        assert int(stats.rounds[0]) == -(-int(load(start).max()) // capacity)
        away = quota - quota * (np.arange(16)[:, None] // 2 == np.arange(8))
        assert away.sum(0).max() <= room
        moved.append(int(away.sum()))
        less.append(int(np.asarray(plan.quota).sum() and (away < plan.quota * (away > 0)).sum()))
    assert min(moved) == 0 < max(moved)
    assert max(less)


def test_slots_take_rows_in_order_until_their_rank_is_full():
    """Against loops over experts and ranks."""
    rng = np.random.default_rng(0)
    num_ranks, num_home, num_slots, room = 4, 3, 3, 20
    for _ in range(20):
        placement = np.full((num_ranks, num_home + num_slots), -1)
        placement[:, :num_home] = np.arange(12).reshape(4, 3)
        quota = np.zeros((12, num_ranks), int)
        quota[np.arange(12), np.arange(12) // 3] = rng.integers(0, 9, 12)
        for rank in range(num_ranks):
            others = rng.permutation([e for e in range(12) if e // num_home != rank])[:num_slots]
            filled = rng.integers(0, 2, num_slots).astype(bool)
            placement[rank, num_home:] = np.where(filled, others, -1)
            quota[others[filled], rank] = rng.integers(0, 15, filled.sum())
        first = rng.integers(0, 100, 12)
        moved = moved_rows(*(jnp.asarray(a, jnp.int32) for a in (placement, quota, first)), room)
        gone, left = np.zeros(12, int), np.full(num_ranks, room)
        served = np.where(np.arange(12)[:, None] // num_home == np.arange(num_ranks), quota.sum(1, keepdims=True), 0)
        for rank, slot in itertools.product(range(num_ranks), range(num_slots)):
            expert, takes = placement[rank, num_home + slot], 0
            if expert >= 0:
                takes = min(left[rank], quota[expert, rank])
                assert moved.first[rank, slot] == first[expert] + gone[expert]
                assert moved.home[rank, slot] == expert // num_home
                left[rank] -= takes
                gone[expert] += takes
                served[expert, [rank, expert // num_home]] += takes, -takes
            assert moved.size[rank, slot] == takes
        np.testing.assert_array_equal(served_quota(jnp.asarray(quota, jnp.int32), moved), served)


def test_the_simulator_is_told_what_is_served():
    """All rows go home; those that go on come from there, and the waves together are the plan."""
    counts = next(w for w in WORKLOADS if w.name == "lognormal").counts(0, 8, 50, 16, 2)
    start = plain_plan(counts, TOPOLOGY, 4)
    plan, _ = SYSTEM.balancer.rebalance(counts, start, TOPOLOGY, ())
    dispatch = dataclasses.replace(SYSTEM.dispatch, moved_headroom=8.0)
    (first, home), (second, moving) = dispatch.waves(counts, start, plan, SYSTEM.balancer)
    np.testing.assert_array_equal(rows_between(first, home), rows_between(counts, start))
    check_plan(moving, second)
    onward = rows_between(second, moving)
    assert onward.sum() - np.trace(onward) == plan.quota.sum() - np.trace(plan.quota.reshape(8, 2, 8).sum(1))
    np.testing.assert_array_equal(load(home) - second.sum(1) + load(moving), load(plan))
    assert dispatch.passes_home


# ---- what waits for what ------------------------------------------------------------


@pytest.mark.slow
def test_the_static_wave_needs_neither_plan_nor_copies():
    graph = of_compiled(compiled().as_text())
    plans, posts = graph.holding("moe_lb_plan_feplb_and_copy"), graph.holding("moe_lb_copy_post")
    forward = graph.needs(plans)
    static, dynamic = graph.holding(HEAVY + "static_wave") & forward, graph.holding(HEAVY + "dynamic_wave")
    starts = graph.holding("moe_lb_copy_start")
    joins = {join for join in graph.holding("moe_lb_copy_join") if not starts & graph.needs([join])}
    assert all((plans, posts, static, dynamic, joins))
    assert not graph.needs(static) & (plans | joins)
    assert not graph.needs(posts) & static
    assert plans | joins <= graph.needs(dynamic)


@pytest.mark.slow
def test_in_the_backward_pass_copies_are_made_beside_what_stays_at_home():
    graph = of_compiled(compiled().as_text())
    (start,) = graph.holding("moe_lb_copy_start")
    (join,) = (one for one in graph.holding("moe_lb_copy_join") if start in graph.needs([one]))
    home, moved = (graph.holding(rf"moe_lb_grouped.*/{wave}_wave/") for wave in ("home", "moved"))
    assert home & graph.needs([join])
    assert not (home & graph.needs([join])) & {one for one in home if start in graph.needs([one])}
    assert not graph.needs([start]) & home
    assert moved
    assert all(join in graph.needs([one]) for one in moved)


# ---- refusals -----------------------------------------------------------------------


def test_a_plan_over_rails_and_no_room_are_refused():
    system = System(Chain((Greedy(), RailS())), dispatch=TwoPhase(), replica_slots=2)
    mesh = make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), rails_per_node=4)
    with pytest.raises(ValueError, match=r"plan\.rails is set; expected None, as TwoPhase does not spray"):
        jax.eval_shape(sharded_moe(mesh, topology, system), *arguments(WORKLOADS[0])[:4])
    with pytest.raises(ValueError, match=r"moved_headroom is 0.0; expected a finite number above 0"):
        TwoPhase(moved_headroom=0.0)
