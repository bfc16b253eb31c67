"""Rows passing their homes are served as planned, and products at home wait for no copies."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Buffers, Chain, Experts, MoEParams, System, TopK, Topology, moe
from jax_moe_lb.balancers import FEPLB, Greedy, RailS
from jax_moe_lb.collectives.peer_copy_rows import CopyWindow, moved_rows, served_quota
from jax_moe_lb.core import check_plan, custom_calls, plain_plan
from jax_moe_lb.core.plan import load, rows_between
from jax_moe_lb.core.validation import fallback_to_plain
from jax_moe_lb.transport import PeerCopy, TwoPhase
from jax_moe_lb.transport.direct import DirectReceipt
from jax_moe_lb.transport.two_phase import HomeRows, Phases, Streams, moved_on
from tests.dependencies import of_compiled, of_lowered
from tests.layer_cases import BY_NAME, Case, assert_equals_dense, make_mesh, sharded_moe, with_gradients

CASE, MESH = Case(), make_mesh((8,), ("expert",))
TOPOLOGY = Topology.from_mesh(MESH, ranks_per_domain=4)
SYSTEM = System(
    FEPLB(num_dynamic=1, skip=True), PeerCopy(), TwoPhase(Buffers(0.4), moved_headroom=0.3), replica_slots=2
)
BUSIEST_FIRST = dataclasses.replace(SYSTEM, balancer=FEPLB(num_dynamic=2))
"""Both home experts of a rank may move, the busier first: products read the rows that stay in place."""

HEAVY = r"moe_lb_(grouped|ragged_exchange).*/"
"""A custom call that computes or exchanges rows, in the appended scope."""


@functools.cache
def compiled(system=SYSTEM):
    """Return the compiled layer with its gradients."""
    return with_gradients(sharded_moe(MESH, TOPOLOGY, system)).lower(*CASE.arguments("balanced", 8)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("system", [SYSTEM, BUSIEST_FIRST], ids=["any order", "busiest first"])
def test_equal_to_dense_in_rounds_and_without_room_for_all(system):
    """Covers skewed, empty, masked and one-expert loads; the reported quota is legal and equals the host plan."""
    moved, less = [], []
    capacity, room = (system.dispatch.buffers.rows(CASE.num_tokens * 2), system.dispatch.room(CASE.num_tokens * 2))
    for workload in WORKLOADS:
        stats = assert_equals_dense(compiled(system), CASE.arguments(workload, 8), 1e-5)
        counts, quota = np.asarray(stats.counts[0]), np.asarray(stats.quota[0])
        np.testing.assert_array_equal(quota.sum(1), counts.sum(0))
        start = plain_plan(counts, TOPOLOGY, 4)
        plan = system.balancer.rebalance(counts, start, TOPOLOGY, ())[0]
        # Home receives the same rows as without a balancer.
        assert int(stats.rounds[0]) == -(-int(load(start).max()) // capacity)
        away = quota - quota * (np.arange(16)[:, None] // 2 == np.arange(8))
        assert away.sum(0).max() <= room
        moved.append(int(away.sum()))
        less.append(int(np.asarray(plan.quota).sum() and (away < plan.quota * (away > 0)).sum()))
    assert min(moved) == 0 < max(moved)
    assert max(less)


@pytest.mark.slow
def test_slots_take_rows_in_order_until_their_rank_is_full():
    """Compared with loops over experts and ranks."""
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


def streams_and_moves(plan, room, num_last):
    """Return the streams of a plan, and the rows of each home that move, in the order of its stream."""
    size = jnp.asarray(np.asarray(plan.quota).sum(1), jnp.int32)
    streams = Streams.of(size, plan.num_ranks, num_last)
    moved = moved_on(plan, streams, room, num_last)
    moves = [np.zeros(total, int) for total in np.asarray(size).reshape(plan.num_ranks, -1).sum(1)]
    for home, first, number in zip(*(np.asarray(table).ravel() for table in moved.tables), strict=True):
        if number:
            moves[home][first : first + number] += 1
    return streams, moved, moves


@pytest.mark.slow
def test_the_rows_that_stay_are_the_first_ones_if_the_busiest_move_first():
    """With room for all rows no move is left out; with less room all of a later expert move, or none of an earlier."""
    rng, topology = np.random.default_rng(0), Topology.flat(4)
    balancer, left_out = FEPLB(num_dynamic=3), 0
    for room in (10**6, 30):
        for _ in range(20):
            counts = rng.multinomial(100, rng.dirichlet(np.full(24, 0.5)), 4).astype(np.int32)
            plan = balancer.rebalance(counts, plain_plan(counts, topology, 9), topology, ())[0]
            streams, moved, moves = streams_and_moves(plan, room, balancer.busiest_moved(6))
            for rank, rows in enumerate(moves):
                order = np.asarray(streams.order[rank])
                assert sorted(order) == list(range(6))
                assert list(order[:3]) == sorted(order[:3])
                assert list(rows) == sorted(rows)
                assert rows.max(initial=0) <= 1
                loads = counts.sum(0).reshape(4, 6)[rank]
                assert list(loads[order[3:]]) == sorted(loads[order[3:]])
                assert loads[order[:3]].max() <= loads[order[3]]
            served = np.asarray(served_quota(jnp.asarray(plan.quota), moved))
            np.testing.assert_array_equal(served.sum(1), counts.sum(0))
            if room > 1000:
                np.testing.assert_array_equal(served, plan.quota)
            left_out += int((served != plan.quota).any())
    assert left_out


@pytest.mark.slow
@pytest.mark.parametrize("num_last", [None, 1, 4])
def test_groups_of_products_at_home_have_their_rows(num_last):
    """In windows of a stream, taken rows are those that stay, group by group; `put` writes them back."""
    rng, topology = np.random.default_rng(1), Topology.flat(2)
    counts = rng.integers(0, 9, (2, 8)).astype(np.int32)
    plan = FEPLB(num_dynamic=num_last or 4).rebalance(counts, plain_plan(counts, topology, 8), topology, ())[0]
    streams = Streams.of(jnp.asarray(counts.sum(0)), 2, num_last)
    # The addresses do not read the receipt.
    phases = Phases.of(object.__new__(DirectReceipt), streams, plan, 10**6, num_last)
    for rank in (0, 1):
        order = [int(expert) for expert in streams.order[rank]]
        size, stays = (np.asarray(one.size).reshape(2, 4)[rank] for one in (streams, phases.staying))
        # An expert moves as a whole here.
        stream = np.array([e if stays[e] else -1 for e in order for _ in range(size[e])])
        groups = list(range(4)) + ([] if num_last is None else order[4 - num_last :])
        for first in range(0, len(stream) + 1, 10):
            window = CopyWindow(jnp.int32(first), jnp.int32(first + 10))
            rows = HomeRows.of(phases, window, 10, num_last, jnp.int32(rank))
            here = np.full(10, -1)
            here[: len(stream[first : first + 10])] = stream[first : first + 10]
            taken = np.asarray(rows.take(jnp.asarray(here, jnp.float32)[:, None]))[:, 0]
            want = [group for group, number in zip(groups, np.asarray(rows.sizes), strict=True) for _ in range(number)]
            assert taken[: len(want)].tolist() == want
            assert len(want) == (here >= 0).sum()
            back = rows.put(jnp.asarray(taken)[:, None] + 100, jnp.asarray(here, jnp.float32)[:, None])[:, 0]
            assert np.asarray(back)[here >= 0].tolist() == (here[here >= 0] + 100).tolist()


@pytest.mark.slow
def test_the_simulator_is_told_what_is_served():
    """All rows go home; moved rows continue from there, and the waves together equal the plan."""
    counts = BY_NAME["lognormal"].counts(0, 8, 50, 16, 2)
    start = plain_plan(counts, TOPOLOGY, 4)
    plan, _ = SYSTEM.balancer.rebalance(counts, start, TOPOLOGY, ())
    dispatch = dataclasses.replace(SYSTEM.dispatch, moved_headroom=8.0)
    (first, home), (second, moving) = dispatch.cost().waves(counts, start, plan, SYSTEM.balancer)
    np.testing.assert_array_equal(rows_between(first, home), rows_between(counts, start))
    check_plan(moving, second)
    onward = rows_between(second, moving)
    assert onward.sum() - np.trace(onward) == plan.quota.sum() - np.trace(plan.quota.reshape(8, 2, 8).sum(1))
    np.testing.assert_array_equal(load(home) - second.sum(1) + load(moving), load(plan))
    assert dispatch.cost().passes_home


@pytest.mark.slow
def test_the_plan_is_posted_before_rows_go_home_and_copies_run_beside_products():
    graph = of_compiled(compiled().as_text())
    posts, plans = graph.holding("moe_lb_copy_post"), graph.holding("moe_lb_plan_feplb_and_copy")
    # Further rounds have the plan, and move rows by the exchange.
    others = graph.holding("further_rounds") | graph.holding("backward/")
    home, staying, moved = (graph.holding(HEAVY + scope) - others for scope in ("come_home", "home_wave", "moved_wave"))
    joins = graph.holding("moe_lb_copy_join")
    (onward,) = graph.holding("moe_lb_copy_rows.*jvp.*/rows_onward/") & graph.needs(staying)
    (back,) = graph.holding("moe_lb_copy_rows.*/moved_wave/rows_back/")
    assert all((posts, plans, home, staying, moved, joins))
    assert posts <= graph.needs(home)
    assert not graph.needs(home) & (plans | joins)
    # The plan is launched after the exchange, so that it is passed on once the exchange is launched; then rows move.
    assert home & graph.needs(plans)
    assert plans <= graph.needs([onward])
    assert not graph.needs(staying) & joins
    assert all(joins & graph.needs([one]) for one in moved)
    assert moved & graph.needs([back])


@pytest.mark.thorough
def test_the_same_where_it_is_lowered_for_a_gpu():
    """Without host callbacks, which can only be lowered for a backend that is present."""
    traced = with_gradients(sharded_moe(MESH, TOPOLOGY, SYSTEM)).trace(*CASE.arguments("balanced", 8))
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    if not custom_calls.is_built("cuda"):
        assert "moe_lb_" not in text
        return
    graph = of_lowered(text, "@moe_lb_copy_post")
    plans, posts = graph.holding("@moe_lb_plan_feplb_and_copy"), graph.holding("@moe_lb_copy_post")
    joins = graph.holding("@moe_lb_copy_join")
    staying = graph.holding("home_wave") - graph.holding("further_rounds")
    moved = graph.holding("moved_wave")
    assert all((staying, moved, plans, joins))
    assert not graph.needs(staying) & joins
    assert posts <= graph.needs(plans)
    assert staying & graph.needs(moved)
    assert joins & graph.needs(moved)
    # Otherwise XLA may start the copies after the work that they should run beside.
    backward = of_lowered(text, "@moe_lb_copy_start")
    starts = backward.holding("@moe_lb_copy_start.*replicate")
    home = backward.holding("home_wave") - backward.holding("further_rounds")
    assert starts & backward.needs(home), (starts, home)


@pytest.mark.slow
def test_in_the_backward_pass_copies_are_made_beside_what_stays_at_home():
    graph = of_compiled(compiled().as_text())
    (start,) = graph.holding("moe_lb_copy_start")
    (onward,) = graph.holding("moe_lb_copy_rows.*transpose.*/rows_onward/")
    joins = graph.holding("moe_lb_copy_join")
    backward = graph.holding("backward/")
    home, moved = (graph.holding(rf"moe_lb_grouped.*/{wave}_wave/") & backward for wave in ("home", "moved"))
    first = home - graph.holding("further_rounds")
    assert all((first, moved))
    assert onward in graph.needs(first)
    assert not graph.needs(first) & {join for join in joins if {start, onward} & graph.needs([join])}
    assert not graph.needs([start, onward]) & home
    assert all({start, onward} <= graph.needs([one]) for one in moved)


@pytest.mark.thorough
def test_all_layers_of_a_stack_share_the_slots():
    """Four layers with one more slot take one more expert, not one for each layer."""
    mlp_dim, spec = 4096, PartitionSpec("expert")
    expert = CASE.width * mlp_dim * 2 * 4

    def temporaries(layers, replica_slots):
        system = dataclasses.replace(SYSTEM, replica_slots=replica_slots)

        def one_rank(x, kernel, experts):
            def layer(x, experts):
                return x + moe(x, MoEParams(kernel, experts), TopK(2), system, TOPOLOGY)[0], None

            return jax.lax.scan(layer, x, experts)[0]

        def arguments():
            up, down = jnp.zeros((layers, 16, CASE.width, mlp_dim)), jnp.zeros((layers, 16, mlp_dim, CASE.width))
            return jnp.zeros((8 * CASE.num_tokens, CASE.width)), jnp.zeros((CASE.width, 16)), Experts(up, down)

        specs = spec, PartitionSpec(), PartitionSpec(None, "expert")
        run = jax.jit(jax.shard_map(one_rank, mesh=MESH, in_specs=specs, out_specs=spec))
        return run.lower(*jax.eval_shape(arguments)).compile().memory_analysis().temp_size_in_bytes

    assert 0.99 * expert < temporaries(6, 3) - temporaries(2, 2) < 1.01 * expert


def test_a_plan_that_takes_a_static_expert_from_home_is_refused():
    counts = np.full((8, 16), 3, np.int32)
    plan = plain_plan(counts, TOPOLOGY, 3)
    dynamic = np.asarray(SYSTEM.balancer.dynamic(plan))
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
    assert not jax.jit(fallback_to_plain)(moved, jnp.asarray(counts), jnp.asarray(dynamic))[1]


def test_a_plan_over_rails_is_refused():
    system = System(Chain((Greedy(), RailS())), dispatch=TwoPhase(), replica_slots=2)
    mesh = make_mesh((2, 4), ("node", "gpu"))
    topology = Topology.from_mesh(mesh, ("node", "gpu"), rails_per_node=4)
    with pytest.raises(ValueError, match=r"plan\.rails is set; expected None, as TwoPhase does not spray"):
        jax.eval_shape(sharded_moe(mesh, topology, system), *CASE.arguments("balanced", 8)[:4])
