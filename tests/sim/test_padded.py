"""Exchanges between processes on CPUs send whole steps, and all home experts."""

from dataclasses import replace

import numpy as np
import pytest

from jax_moe_lb import plain, ultraep
from jax_moe_lb.sim import AnalyticGemm, Cluster, Communication, Links, ModelShape, simulate, skewed_counts
from jax_moe_lb.sim.padded import padded_rows

MODEL = ModelShape(layers=1, hidden=64, inner=128, experts=8, per_token=2, tokens=1024, itemsize=4, pre_expert_s=0.0)
CLUSTER = Cluster((Links("gpu", 4, 1e8, latency_s=1e-3),), gemm=AnalyticGemm(launch_s=0.0))
PADDED = replace(CLUSTER, communication=Communication(padded=True))


def test_even_rows_have_no_padding():
    rows = np.full((4, 4), 512)
    padded, permutes = padded_rows(rows, capacity=2048, num_copies=2048)
    assert (padded == np.where(np.eye(4), 0, 512)).all()
    assert permutes == 4


@pytest.mark.parametrize("capacity", [2048, 3000])
def test_every_row_is_sent_and_a_pair_with_one_more_row_takes_another_step(capacity):
    rows = np.full((4, 4), 512)
    rows[2, 1] += 1
    padded, permutes = padded_rows(rows, capacity, num_copies=2048)
    assert (padded >= np.where(np.eye(4), 0, rows)).all()
    assert (padded % 512 == 0).all()
    # The row takes a step of its permute, or a round in which every pair takes a step.
    assert permutes == {2048: 8, 3000: 5}[capacity]
    assert padded[2, 1] > 512


def test_no_rows_take_no_permute():
    assert padded_rows(np.zeros((4, 4), np.int64), capacity=8, num_copies=8)[1] == 0


def test_replicas_cost_the_same_for_every_plan_and_nothing_overlaps():
    few, many = (simulate(ultraep(), MODEL, PADDED, skewed_counts(MODEL, 4, skew, 1)) for skew in (1.2, 2.5))
    assert few.stages["weights"].bytes == many.stages["weights"].bytes == 4 * 3 * 2 * MODEL.expert_bytes
    assert sum(stage.hidden_s for stage in many.stages.values()) == pytest.approx(0.0, abs=1e-12)


def test_padding_takes_time():
    counts = skewed_counts(MODEL, 4, 2.0, 1)
    assert simulate(plain(), MODEL, PADDED, counts).step_s > simulate(plain(), MODEL, CLUSTER, counts).step_s


def test_the_backward_pass_takes_its_factor():
    counts = skewed_counts(MODEL, 4, 1.0, 1)
    at = {factor: simulate(plain(), MODEL, replace(CLUSTER, backward_factor=factor), counts) for factor in (2.0, 4.0)}
    two, four = (report.stages["experts (backward)"].busy_s for report in at.values())
    assert four == pytest.approx(2 * two)
