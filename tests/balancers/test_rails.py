"""RailS distributes a node's rows over its rails in chunks; these tests check the effect on receivers."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.layer.workloads import WORKLOADS
from jax_moe_lb import Chain, Topology
from jax_moe_lb.balancers import EPLB, Exact, Greedy, RailS
from jax_moe_lb.balancers.rails import best_chunks, ticks_of
from jax_moe_lb.core import check_plan, plain_plan
from jax_moe_lb.core.plan import rows_between
from jax_moe_lb.planners.spray import spray
from tests.planners.planner_cases import STOPPED

EQUAL = np.ones(4, np.int32)


def topology(num_ranks, members, num_rails):
    return replace(Topology.flat(num_ranks, members), rails_per_node=num_rails)


def draw(seed, num_ranks=16, scale=400, sparsity=0.5):
    """Return skewed rows between ranks, with many empty pairs."""
    rng = np.random.default_rng(seed)
    rows = scale * rng.gamma(0.5, size=(num_ranks, num_ranks)) * (rng.random((num_ranks, num_ranks)) > sparsity)
    return rows.astype(np.int32)


def between_nodes(rails, members):
    """Return rows between nodes on each rail, `[G, G, N]`; 0 inside a node."""
    num_nodes = rails.shape[0] // members
    total = rails.reshape(num_nodes, members, num_nodes, members, -1).sum((1, 3))
    return total * ~np.eye(num_nodes, dtype=bool)[:, :, None]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_whole_rows_come_within_a_chunk_of_an_even_share(seed, chunks):
    """Graham's bound, for each pair of nodes, and therefore for sends and receives of every NIC."""
    rows = draw(seed)
    rails = spray(rows, EQUAL, 4, chunks)
    pairs = between_nodes(rails, 4)
    total = pairs.sum(2)
    chunk = np.maximum(total // 4 // chunks, 1)
    assert (pairs <= (total / 4 + 3 / 4 * chunk)[:, :, None]).all()
    for axis in (0, 1):
        share = total.sum(axis) / 4
        assert (pairs.sum(axis) <= (share * (1 + 1 / chunks) + 4)[:, None]).all()
    np.testing.assert_array_equal(rails.sum(2), rows)


def test_a_node_is_planned_from_its_own_rows():
    rows, others = draw(2), draw(3)
    others[4:8] = rows[4:8]
    np.testing.assert_array_equal(spray(rows, EQUAL, 4, 16)[4:8], spray(others, EQUAL, 4, 16)[4:8])


def test_slow_and_dead_rails_carry_what_they_can():
    rows = draw(4, scale=4000)
    ticks = np.array(ticks_of((4, 4, 1, 0)), np.int32)
    assert ticks.tolist() == [1, 1, 4, 0]
    pairs = between_nodes(spray(rows, ticks, 4, 64), 4)
    assert (pairs[:, :, 3] == 0).all()
    done, ideal = (pairs * ticks).max(2), pairs.sum(2) / (1 + 1 + 1 / 4)
    assert (done <= 1.1 * ideal + 4).all()


def test_rests_of_small_flows_do_not_gather_on_one_rail():
    """One row between each pair of nodes: the first rail in turn differs."""
    rows = np.zeros((16, 16), np.int32)
    rows[::4, ::4] = 1
    pairs = between_nodes(spray(rows, EQUAL, 4, 16), 4)
    assert (pairs.sum(0) <= 1).all()
    assert (pairs.sum(1) <= 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("members", "num_rails"), [(4, 4), (4, 2)])
def test_plans_are_legal_and_the_same_on_a_host_and_in_a_program(members, num_rails):
    hardware = topology(8, members, num_rails)

    @jax.jit
    def rebalance(counts):
        return RailS().rebalance(counts, plain_plan(counts, hardware), hardware, ())[0]

    for workload in WORKLOADS:
        counts = workload.counts(0, 8, 50, 16, 2)
        plan = RailS().rebalance(counts, plain_plan(counts, hardware), hardware, ())[0]
        check_plan(plan, counts)
        assert isinstance(plan.rails, np.ndarray)
        np.testing.assert_array_equal(rebalance(counts).rails, plan.rails)
        np.testing.assert_array_equal(plan.rails.sum(2), rows_between(counts, plan))


def test_chunks_where_every_chunk_is_a_message():
    """Any other number takes longer."""
    share, rate, message_s = 16e6, 50e9, 1.25e-6
    assert best_chunks(share, rate, message_s) == 16
    cost = {chunks: share / rate / chunks + chunks * message_s for chunks in range(1, 100)}
    assert min(cost, key=cost.__getitem__) == 16
    assert best_chunks(1.0, 50e9, 1e-6) == 1


def test_topologies_that_do_not_fit_are_named():
    counts = np.ones((8, 8), np.int32)
    for hardware, balancer, message in (
        (topology(8, 4, 3), RailS(), r"rails_per_node is 3; expected a divisor of the 4 ranks of a node"),
        (topology(8, 4, 4), RailS(speeds=(1, 1)), r"speeds has 2 rails; expected the 4 of Topology.rails_per_node"),
    ):
        with pytest.raises(ValueError, match=message):
            balancer.rebalance(counts, plain_plan(counts, hardware), hardware, ())
    for rows, ticks, options, message in (
        (np.ones((6, 6), np.int32), EQUAL, (4, 1), r"ranks_per_node is 4; expected a divisor .* shape \(6, 6\)"),
        (np.ones((8, 8), np.int32), EQUAL[:3], (4, 1), r"ticks has 3 rails; expected a divisor of the 4 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            spray(rows, ticks, *options)


def test_bad_values_stop_the_program():
    rows = np.zeros((8, 8), np.int32)
    rows[1, 6] = -5
    with pytest.raises(STOPPED, match=r"rows from rank 1 to 6 is -5; expected at least 0"):
        jax.block_until_ready(jax.jit(lambda r, t: spray(r, t, 4, 16))(rows, EQUAL))
    with pytest.raises(STOPPED, match=r"ticks is 0 for all 4 rails; expected one that is not dead"):
        jax.block_until_ready(jax.jit(lambda r, t: spray(r, t, 4, 16))(rows * 0, EQUAL * 0))


def test_a_chain_of_balancers_without_state_takes_the_empty_state():
    two, counts = Topology.flat(4, 2), np.ones((4, 8), np.int32)
    plan = plain_plan(counts, two, 3)
    found, state = Chain((Greedy(), Exact())).rebalance(counts, plan, two, ())
    assert state == ((), ())
    np.testing.assert_array_equal(found.quota.sum(1), counts.sum(0))
    with pytest.raises(ValueError, match=r"state is \(\); expected the result of init"):
        Chain((Greedy(), EPLB())).rebalance(counts, plan, two, ())
