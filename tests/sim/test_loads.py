"""Sampled counts have the requested imbalance, and are possible routing results."""

import numpy as np
import pytest

from jax_moe_lb.advise.evaluate import BEFORE, drawn_workloads, recorded_workloads
from jax_moe_lb.sim import ModelShape, skewed_counts
from jax_moe_lb.sim.loads import LoadShape


def shape(experts, per_token, tokens):
    return ModelShape(1, 8, 8, experts, per_token, tokens)


@pytest.mark.parametrize("case", [(64, 8, 8, 1.2), (64, 2, 16, 4.0), (16, 2, 2, 1.9), (8, 2, 8, 3.0)])
def test_ranks_have_the_wanted_imbalance(case):
    experts, per_token, ranks, imbalance = case
    counts = skewed_counts(shape(experts, per_token, 2048), ranks, imbalance, layers=3, seed=1)
    load = counts.sum(1).reshape(3, ranks, -1).sum(2)
    np.testing.assert_allclose(load.max(1) / load.mean(1), imbalance, rtol=0.05)
    assert (counts.sum(2) == 2048 * per_token).all()
    assert counts.min() >= 0
    assert counts.max() <= 2048
    assert (counts[0] != counts[1]).any()
    np.testing.assert_array_equal(counts, skewed_counts(shape(experts, per_token, 2048), ranks, imbalance, 3, 1))


def test_a_rank_that_samples_no_copy_routes_its_tokens_too():
    assert (skewed_counts(shape(3, 1, 1), 3, 1.5, 8).sum(2) == 1).all()
    assert (skewed_counts(shape(7, 1, 2), 7, 1.5, 8).sum(2) == 2).all()


def test_at_imbalance_one_all_experts_get_the_same():
    assert (skewed_counts(shape(16, 2, 128), 4, 1.0, 1) == 16).all()


def test_what_no_routing_has_is_refused():
    with pytest.raises(ValueError, match=r"imbalance is 3.0; expected at most 2.00, as a token chooses 2 different"):
        skewed_counts(shape(16, 2, 64), 2, 3.0, 1)
    with pytest.raises(ValueError, match="num_experts is 10; expected a positive multiple of the 4 ranks"):
        skewed_counts(shape(10, 2, 64), 4, 1.0, 1)


@pytest.mark.parametrize("kind", list(LoadShape))
def test_shapes_have_the_same_imbalance_and_differ(kind):
    counts = skewed_counts(shape(64, 4, 1024), 8, 1.7, 2, 3, kind)
    load = counts.sum(1).reshape(2, 8, -1).sum(2)
    np.testing.assert_allclose(load.max(1) / load.mean(1), 1.7, rtol=0.05)
    assert (counts.sum(2) == 1024 * 4).all()
    # The share of the hottest expert in its rank distinguishes the shapes.
    hottest = counts.sum(1).reshape(2, 8, 8).max(2) / load
    assert (hottest.mean() > 0.6) == (kind is LoadShape.HOT)


def test_loads_come_shape_by_shape_and_with_what_was_before():
    model, shapes = shape(16, 2, 512), [LoadShape.RANKS, LoadShape.ZIPF]
    loads = drawn_workloads(model, 4, 1.5, 2, shapes, draws=2, seed=0)
    names = [f"{one}, draw {draw}" for draw in (1, 2) for one in ("popular ranks", "zipf")]
    assert [load.name for load in loads] == names
    for load in loads:
        totals = load.counts.sum(1)
        assert (load.earlier != 3 * totals).any()
        # Without drift, all three steps are samples of the same popularity.
        np.testing.assert_allclose(load.earlier, 3 * totals, atol=12 * np.sqrt(totals.max()))
        np.testing.assert_allclose(load.before.sum((0, 2)), BEFORE * totals, atol=16 * np.sqrt(totals.max()))
    assert [load.name for load in drawn_workloads(model, 4, 1.0, 2, shapes, 2, 0)] == ["even"]


@pytest.mark.slow
def test_shapes_that_cannot_be_so_skewed_are_left_out():
    # Four experts of one rank would have to be the hottest four of 32.
    model = shape(32, 4, 512)
    loads = drawn_workloads(model, 8, 7.5, 1, list(LoadShape), 1, 0)
    assert [load.name for load in loads] == ["popular ranks, draw 1", "one hot expert per rank, draw 1"]
    with pytest.raises(ValueError, match="imbalance is 9"):
        drawn_workloads(model, 8, 9.0, 1, list(LoadShape), 1, 0)


def test_a_trace_is_judged_on_its_second_half():
    trace = np.arange(10 * 6 * 2 * 4).reshape(10, 6, 2, 4)
    loads = recorded_workloads(list(range(100, 1100, 100)), trace, most_steps=3, most_layers=2)
    # The numbers of the trace.
    assert [load.name for load in loads] == ["step 600", "step 800", "step 1000"]
    np.testing.assert_array_equal(loads[1].counts, trace[7][[0, 5]])
    np.testing.assert_array_equal(loads[1].earlier, trace[:5, [0, 5]].sum((0, 2)))
    np.testing.assert_array_equal(loads[1].before, trace[3:7, [0, 5]])
    np.testing.assert_array_equal(loads[1].first_layer().before, trace[3:7, :1])
    assert recorded_workloads([0], trace[:1], 3, 2)[0].earlier is None
    assert recorded_workloads(list(range(7)), trace[:7], 3, 2)[0].before is None
