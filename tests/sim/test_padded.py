"""Exchanges between processes on CPUs send whole steps, and all home experts; all ranks wait after every round."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import Buffers, exact, plain, ultraep
from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.systems import feplb
from jax_moe_lb.sim import AnalyticGemm, Cluster, Communication, Links, Migration, ModelShape, simulate, skewed_counts
from jax_moe_lb.sim.network import busy_s, latency_s, level_seconds
from jax_moe_lb.sim.padded import (
    PaddedHop,
    padded_replicas,
    padded_rows,
    replicas_by_slot,
    rounds_by_share,
    rounds_of_copies,
)
from jax_moe_lb.sim.work import layer_work
from jax_moe_lb.transport import Direct, TwoPhase
from jax_moe_lb.transport.wave_rows import WaveRows

MODEL = ModelShape(layers=1, hidden=64, inner=128, experts=8, per_token=2, tokens=1024, itemsize=4, pre_expert_s=0.0)
CLUSTER = Cluster((Links("gpu", 4, 1e8, latency_s=1e-3),), gemm=AnalyticGemm(launch_s=0.0, half_rows=0.0))
PADDED = replace(CLUSTER, communication=Communication(padded=True))


def test_even_rows_have_no_padding():
    padded, permutes = padded_rows(np.full((1, 4, 4), 512), num_rows=2048)
    assert (padded == np.where(np.eye(4), 0, 512)).all()
    assert permutes == 4


@pytest.mark.parametrize("capacity", [2048, 3000])
def test_every_row_is_sent_and_a_pair_with_one_more_row_takes_another_step(capacity):
    rows = np.full((4, 4), 512)
    rows[2, 1] += 1
    padded, permutes = padded_rows(rounds_by_share(rows, capacity), num_rows=2048)
    assert (padded >= np.where(np.eye(4), 0, rows)).all()
    assert (padded % 512 == 0).all()
    # The row takes a step of its permute, or a round in which every pair takes a step.
    assert permutes == {2048: 8, 3000: 5}[capacity]
    assert padded[2, 1] > 512


def test_no_rows_take_no_permute():
    assert padded_rows(np.zeros((1, 4, 4), np.int64), num_rows=8)[1] == 0


def test_a_larger_buffer_takes_longer_and_fewer_steps_back():
    rows = np.full((1, 4, 4), 600)
    hop = PaddedHop.of(rows, rows_out=2048, rows_back=2400)
    assert (hop.permutes_out, hop.permutes_back) == (8, 4)
    assert (hop.out.max(), hop.back.max()) == (1024, 600)


def test_rounds_take_the_rows_of_a_receiver_in_the_order_of_its_slots():
    counts = np.array([[0, 4, 0, 0], [5, 1, 1, 1]], np.int32)
    wave = WaveRows(counts, plain_plan(counts, Topology.flat(2)), per_token=2)
    between, slots = rounds_of_copies(wave, capacity=6)
    # Rank 0 has five rows of its first expert, all of rank 1, and then rows of its second expert.
    assert between[:, :, 0].tolist() == [[1, 5], [3, 1]]
    assert slots[:, 0].tolist() == [[5, 1], [0, 4]]
    between, slots = rounds_of_copies(wave, capacity=6, last=np.array([True, False, False, False]))
    assert between[:, :, 0].tolist() == [[4, 2], [0, 4]]
    assert slots[:, 0].tolist() == [[1, 5], [4, 0]]


@pytest.mark.parametrize("system", [plain(), exact(), feplb()], ids=["plain", "exact", "feplb"])
def test_turns_serve_every_row_once(system):
    counts = skewed_counts(MODEL, 4, 2.5, 1)[0]
    work, _ = layer_work(system, MODEL, PADDED, counts)
    for wave in work.waves:
        assert wave.turns is not None
        assert (wave.turns.sum(0) == wave.rows).all()
    assert sum(wave.rows.sum() for wave in work.waves) == counts.sum()


def test_rows_that_move_wait_for_their_home():
    """With the same plan one wave takes as long as the busiest rank; in two phases takers follow the busiest home."""
    counts = np.zeros((4, 8), np.int32)
    # Rank 0 is home of 3 x 1024 rows, of which another rank takes half.
    counts[:, 0], counts[:, 1], counts[:, 2:] = 384, 384, [[128, 0, 128, 0, 64, 64]] * 4
    systems = (replace(feplb(), dispatch=dispatch) for dispatch in (TwoPhase(moved_headroom=2.0), Direct(Buffers(2.0))))
    phases, one_wave = (simulate(system, MODEL, PADDED, counts) for system in systems)
    assert phases.imbalance_after == one_wave.imbalance_after
    assert phases.stages["experts"].busy_s == pytest.approx(2 * one_wave.stages["experts"].busy_s)


def test_replicas_travel_in_padded_steps_and_nothing_overlaps():
    few, many = (simulate(ultraep(), MODEL, PADDED, skewed_counts(MODEL, 4, skew, 1)) for skew in (1.2, 2.5))
    assert 0 < few.stages["weights"].bytes <= many.stages["weights"].bytes
    assert sum(stage.hidden_s for stage in many.stages.values()) == pytest.approx(0.0, abs=1e-12)
    assert "weights" not in simulate(ultraep(), MODEL, PADDED, np.full((1, 4, 8), 64, np.int32)).stages


def test_a_replica_takes_the_permute_of_its_pair_and_its_step():
    placement = np.array([[0, 1, 6, -1], [2, 3, -1, -1], [4, 5, 0, 1], [6, 7, -1, -1]], np.int32)
    by_slot = replicas_by_slot(Plan(placement, np.zeros((8, 4), np.int32)))
    assert by_slot.tolist() == [
        [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    hop = padded_replicas(by_slot, 2, 4)
    # Both pairs are in one permute, whose steps have one expert. All of its pairs send in each of its steps.
    cycle = [[0, 0, 2, 0], [0, 0, 0, 2], [0, 2, 0, 0], [2, 0, 0, 0]]
    assert (hop.out.tolist(), hop.permutes_out) == (cycle, 2)
    assert (hop.back.T.tolist(), hop.permutes_back) == (cycle, 2)


def test_domains_exchange_replicas_in_the_same_permutes():
    placement = np.array([[0, 1, 2, -1], [2, 3, -1, -1], [4, 5, -1, -1], [6, 7, 4, 5]], np.int32)
    hop = padded_replicas(replicas_by_slot(Plan(placement, np.zeros((8, 4), np.int32), domain=2)), 2, 2)
    # The first slots of both domains take one step of each permute; the second one of rank 3 takes another step.
    assert (hop.out.tolist(), hop.permutes_out) == ([[0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 2], [0, 0, 1, 0]], 3)
    assert (hop.back.tolist(), hop.permutes_back) == ([[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 1], [0, 0, 2, 0]], 3)


def test_padding_takes_time():
    counts = skewed_counts(MODEL, 4, 2.0, 1)
    assert simulate(plain(), MODEL, PADDED, counts).step_s > simulate(plain(), MODEL, CLUSTER, counts).step_s


def test_the_backward_pass_takes_its_factor():
    counts = skewed_counts(MODEL, 4, 1.0, 1)
    at = {factor: simulate(plain(), MODEL, replace(CLUSTER, backward_factor=factor), counts) for factor in (2.0, 4.0)}
    two, four = (report.stages["experts (backward)"].busy_s for report in at.values())
    assert four == pytest.approx(2 * two)


def test_permutes_between_domains_and_inside_them_take_turns():
    levels = (Links("node", 2, 1e7, latency_s=1e-3), Links("gpu", 2, 1e8, latency_s=1e-3))
    work, _ = layer_work(plain(), MODEL, replace(PADDED, levels=levels), skewed_counts(MODEL, 4, 2.0, 1)[0])
    (out,) = work.waves[0].dispatch
    times = level_seconds(out, replace(PADDED, levels=levels))
    assert min(times) > 0
    assert busy_s(out, replace(PADDED, levels=levels)) == pytest.approx(sum(times))


def test_gathered_experts_cross_the_link_instead_of_rows():
    levels = (Links("node", 2, 1e7, latency_s=1e-3), Links("gpu", 2, 1e8, latency_s=1e-3))
    cluster, counts = replace(PADDED, levels=levels), skewed_counts(MODEL, 4, 2.0, 1)[0]
    work, _ = layer_work(plain(), MODEL, cluster, counts, Migration((2, 1)))
    assert [flow.most[0] for wave in work.waves for flow in wave.dispatch] == [0]
    gathered = work.gather[0]
    # Two ranks of a node receive two experts each over its link, in two permutes for each of three matrices.
    assert gathered.most[0] == 2 * 2 * MODEL.expert_bytes
    assert latency_s(gathered, cluster) == pytest.approx(1e-3 * (2 * 3 + 1) / (4 + 1))
