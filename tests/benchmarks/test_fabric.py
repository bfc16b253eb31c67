"""Invariants of the flow simulation over a rail fabric, and cases with known results."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers.flows import Flows, max_min_rates, simulate
from benchmarks.papers.paths import Fabric, rail_paths, spine_paths
from benchmarks.papers.policies import MinRtt, Recycle, Rehash, hashed_flows, planned_flows
from jax_moe_lb.balancers import RailS
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.plan import rows_between

ROW_BYTES = 8192
ROUND_S = 4e-6
FABRIC = Fabric.non_blocking(num_nodes=4, gpus_per_node=4, nic_bytes_per_s=50e9, gpu_bytes_per_s=450e9)
POLICIES = [(None, 1), (Rehash(2), 1), (MinRtt(), 3), (Recycle(), 3)]


def draw(seed, sparsity=0.5, num_gpus=16):
    rng = np.random.default_rng(seed)
    rows = 200 * rng.gamma(0.5, size=(num_gpus, num_gpus)) * (rng.random((num_gpus, num_gpus)) > sparsity)
    return rows.astype(np.int32)


def railed(counts, fabric=FABRIC, chunks=16):
    plan = plain_plan(counts, fabric.topology)
    return RailS(chunks).rebalance(counts, plan, fabric.topology, ())[0]


def ways(counts, fabric=FABRIC, seed=0):
    """Return all route selections for these counts."""
    plan = plain_plan(counts, fabric.topology)
    rows = rows_between(counts, plan)
    yield planned_flows(counts, railed(counts, fabric), fabric, ROW_BYTES), None
    yield planned_flows(counts, plan, fabric, ROW_BYTES), None
    for paths in (spine_paths, rail_paths):
        for policy, lanes in POLICIES:
            yield hashed_flows(rows, fabric, ROW_BYTES, paths, lanes, seed), policy


def rows_abroad(counts, members=4):
    """Return token copies to other nodes, `[R, R]`."""
    node = np.arange(len(counts)) // members
    return np.where(node[:, None] == node, 0, counts)


def bound_s(counts, fabric=FABRIC):
    """Return theorem 3's bound: the busiest node in either direction, evenly over its rails."""
    members = fabric.gpus_per_node
    pairs = rows_abroad(counts, members).reshape(-1, members, len(counts) // members, members).sum((1, 3))
    return max(pairs.sum(0).max(), pairs.sum(1).max()) * ROW_BYTES / members / fabric.nic_bytes_per_s


# ---- rates ------------------------------------------------------------------------------


def test_rates_of_a_textbook_case():
    """One lane over both links, one over each; the second link is twice as fast."""
    links = np.array([[0, 1], [0, 2], [1, 2]])
    rates = max_min_rates(links, np.array([10.0, 20.0, np.inf]), np.full(3, np.inf))
    np.testing.assert_allclose(rates, [5, 5, 15])
    rates = max_min_rates(links, np.array([10.0, 20.0, np.inf]), np.array([2.0, np.inf, 11.0]))
    np.testing.assert_allclose(rates, [2, 8, 11])


@pytest.mark.parametrize("seed", range(20))
def test_no_rate_can_rise_but_at_the_expense_of_one_not_higher(seed):
    """A lane has its maximum, or is a fastest lane on a full link: max-min fairness."""
    rng = np.random.default_rng(seed)
    num_links = 12
    bytes_per_s = np.append(rng.choice([1.0, 1.0, 2.5], num_links), np.inf)
    links = np.stack([rng.permutation(num_links)[:3] for _ in range(40)])
    links[:, 2] = np.where(rng.random(40) < 0.5, links[:, 2], num_links)
    most = np.where(rng.random(40) < 0.3, rng.random(40) / 5, np.inf)
    rates = max_min_rates(links, bytes_per_s, most)
    used = np.bincount(links.ravel(), np.repeat(rates, 3), num_links + 1)
    assert (used <= bytes_per_s * (1 + 1e-9)).all()
    assert (rates <= most).all()
    fastest = np.zeros(num_links + 1)
    np.maximum.at(fastest, links.ravel(), np.repeat(rates, 3))
    bound_there = (used >= bytes_per_s * (1 - 1e-9))[links] & (rates[:, None] >= fastest[links] * (1 - 1e-9))
    assert (bound_there.any(1) | (rates == most)).all()


# ---- invariants ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_all_bytes_arrive_no_link_is_above_its_rate_and_no_way_is_faster_than_it_allows(seed):
    counts = draw(seed)
    wanted = counts * (1.0 - np.eye(16)) * ROW_BYTES
    for flows, policy in ways(counts, seed=seed):
        outcome = simulate(flows, FABRIC, policy, ROUND_S, seed)
        np.testing.assert_allclose(outcome.sent_bytes, flows.num_bytes)
        np.testing.assert_allclose(flows.num_bytes.sum(), wanted.sum())
        assert outcome.busiest.max() <= 1 + 1e-9
        assert outcome.end_s.max() == outcome.seconds
        # The bytes out of all NICs equal the bytes into all NICs.
        out, into = outcome.link_bytes[32:48], outcome.link_bytes[48:64]
        np.testing.assert_allclose(out.sum(), rows_abroad(counts).sum() * ROW_BYTES)
        np.testing.assert_allclose(into.sum(), out.sum())
        assert (outcome.link_bytes / FABRIC.bytes_per_s() <= outcome.seconds * (1 + 1e-9)).all()
        assert outcome.seconds >= bound_s(counts) * (1 - 1e-9)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_to_the_bit():
    counts = draw(7)
    for (flows, policy), (again, _) in zip(ways(counts), ways(counts), strict=True):
        first, second = (simulate(f, FABRIC, policy, ROUND_S, 3) for f in (flows, again))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)
    rows = rows_between(counts, plain_plan(counts, FABRIC.topology))
    flows, other = (hashed_flows(rows, FABRIC, ROW_BYTES, rail_paths, 1, seed) for seed in (0, 1))
    assert (flows.path != other.path).any()
    ends = [simulate(flows, FABRIC, Rehash(1), ROUND_S, seed).seconds for seed in (0, 1)]
    assert ends[0] != ends[1]


@pytest.mark.slow
def test_steps_of_a_round_come_close_to_a_step_for_every_end():
    counts = draw(1)
    for flows, policy in ways(counts):
        if policy is None:
            exact = simulate(flows, FABRIC, policy, 0.0, 0)
            rounds = simulate(flows, FABRIC, policy, ROUND_S, 0)
            assert exact.steps <= len(flows.num_bytes)
            np.testing.assert_allclose(rounds.seconds, exact.seconds, rtol=0.01)


# ---- known results ----------------------------------------------------------------------


@pytest.mark.parametrize("round_s", [0.0, ROUND_S])
def test_uniform_traffic_takes_its_closed_form(round_s):
    """Every NIC sends and receives the rows of 12 remote GPUs without collisions, as all flows have equal rates."""
    counts = np.full((16, 16), 64, np.int32)
    expected = 12 * 64 * ROW_BYTES / 50e9
    for plan in (plain_plan(counts, FABRIC.topology), railed(counts)):
        outcome = simulate(planned_flows(counts, plan, FABRIC, ROW_BYTES), FABRIC, None, round_s, 0)
        np.testing.assert_allclose(outcome.seconds, expected, rtol=1e-9)
        np.testing.assert_allclose(outcome.link_bytes[32:64], 12 * 64 * ROW_BYTES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("chunks", [4, 16])
def test_rails_comes_within_a_chunk_of_theorem_3(seed, chunks):
    """An even share plus one chunk of each pair of nodes, or one row if chunks are smaller."""
    counts = draw(seed, sparsity=0.8)
    flows = planned_flows(counts, railed(counts, chunks=chunks), FABRIC, ROW_BYTES)
    best = bound_s(counts)
    row_s = ROW_BYTES / 50e9
    seconds = simulate(flows, FABRIC, None, ROUND_S, 0).seconds
    assert best <= seconds <= best * (1 + 1 / chunks) + 3 * row_s
    direct = planned_flows(counts, plain_plan(counts, FABRIC.topology), FABRIC, ROW_BYTES)
    assert simulate(direct, FABRIC, None, ROUND_S, 0).seconds > 1.2 * seconds


def test_links_hold_what_the_plan_says():
    counts = draw(2)
    plan = railed(counts)
    outcome = simulate(planned_flows(counts, plan, FABRIC, ROW_BYTES), FABRIC, None, ROUND_S, 0)
    pairs = plan.rails.reshape(4, 4, 4, 4, 4).sum((1, 3)) * ~np.eye(4, dtype=bool)[:, :, None]
    np.testing.assert_allclose(outcome.link_bytes[32:48], pairs.sum(1).ravel() * ROW_BYTES)
    np.testing.assert_allclose(outcome.link_bytes[48:64], pairs.sum(0).ravel() * ROW_BYTES)
    # Into a GPU's port: its rows that did not arrive by its own NIC, and rows that it forwards in its node.
    rails = np.where(np.eye(16, dtype=bool)[:, :, None], 0, plan.rails)
    far = rails * (rows_abroad(np.ones((16, 16), int)) > 0)[:, :, None]
    for gpu in range(16):
        here, own = slice(gpu // 4 * 4, gpu // 4 * 4 + 4), gpu % 4
        to_gpu = rails[:, gpu].sum() - far[:, gpu, own].sum()
        passed_on = far[here, :, own].sum() - far[gpu, :, own].sum()
        np.testing.assert_allclose(outcome.link_bytes[16 + gpu], (to_gpu + passed_on) * ROW_BYTES)


@pytest.mark.slow
def test_slow_hops_inside_a_domain_keep_rails_from_its_bound():
    """With equal rates inside and between nodes, rail ranks are the bottleneck: theorem 1 requires more."""
    counts = np.where(rows_abroad(np.ones((16, 16), int)) > 0, draw(5, sparsity=0.0), 0).astype(np.int32)
    slow = replace(FABRIC, gpu_bytes_per_s=50e9)
    flows = planned_flows(counts, railed(counts), slow, ROW_BYTES)
    outcome = simulate(flows, slow, None, ROUND_S, 0)
    assert (outcome.link_bytes / slow.bytes_per_s()).argmax() < 32
    assert outcome.seconds > 1.2 * simulate(flows, FABRIC, None, ROUND_S, 0).seconds


# ---- transports -------------------------------------------------------------------------


def collision(lanes):
    """Two flows between the same leaves, of different NICs, all on one of four spines."""
    source, target = np.array([0, 8]), np.array([5, 13])
    choices = spine_paths(FABRIC, source, target)
    return Flows(np.full(2, 50e9 * 50 * ROUND_S), choices, np.zeros((2, lanes), np.intp))


@pytest.mark.slow
def test_transports_that_react_leave_a_spine_they_share():
    """On one spine they take twice as long as on two; each flow fills a NIC for 50 rounds."""
    alone_s = 50 * ROUND_S
    stuck = simulate(collision(1), FABRIC, None, ROUND_S, 0)
    np.testing.assert_allclose(stuck.seconds, 2 * alone_s)
    assert stuck.moves == 0
    for policy, lanes in POLICIES[1:]:
        for seed in range(3):
            outcome = simulate(collision(lanes), FABRIC, policy, ROUND_S, seed)
            assert outcome.moves > 0
            assert alone_s * (1 - 1e-9) <= outcome.seconds <= 1.3 * alone_s


def test_a_flow_is_hashed_anew_only_after_enough_marked_rounds():
    outcome = simulate(collision(1), FABRIC, Rehash(200), ROUND_S, 0)
    assert outcome.moves == 0
    np.testing.assert_allclose(outcome.seconds, 100 * ROUND_S)


def test_neighbours_on_a_rail_use_no_spine_and_those_in_a_domain_no_nic():
    source, target = np.array([0, 0]), np.array([4, 1])
    for paths in (spine_paths, rail_paths):
        near = paths(FABRIC, source, target)[1]
        np.testing.assert_array_equal(np.unique(near), [0, 16 + 1, FABRIC.no_link])
    same_rail = spine_paths(FABRIC, source, target)[0]
    np.testing.assert_array_equal(np.unique(same_rail), [32, 48 + 4, FABRIC.no_link])


def test_nothing_to_send_takes_no_time():
    counts = np.diag(np.full(16, 9)).astype(np.int32)
    for flows, policy in ways(counts):
        assert simulate(flows, FABRIC, policy, ROUND_S, 0).seconds == 0
