"""Tables of training on four ranks, from small measurements."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.network.gains import CASES, GAINS, RATES, ROUTINGS, break_even, counts_of, crossing, gain_rows, records
from benchmarks.network.replayed import by_counts
from benchmarks.network.testbed import CONFIG
from benchmarks.network.training import compared, slowest
from benchmarks.network.training_runs import (
    BASE,
    BATCH_TOKENS,
    RUNS,
    SMALL,
    TEXT,
    USUAL,
    WHOLE,
    WORKLOADS,
    Curve,
    Key,
    imbalance,
    load_curve,
    save_curve,
    seeds_of,
    timed_counts,
    with_dropped,
)
from benchmarks.network.training_speed import COMPARED, elapsed_s, over_headroom, speeds, workloads
from benchmarks.network.whole_runs import BLOCK
from benchmarks.network.whole_runs import table as whole_runs
from benchmarks.papers.codec import train_from
from benchmarks.render.results import Table, Value
from benchmarks.training.curves import balances, losses
from jax_moe_lb.routing.capacity import within_capacity
from models.config import ParallelConfig
from models.data.marks import CONTEXT
from models.mesh import make_mesh

PREDICTED = Table(
    {"Mbit/s": "", "routing": "", "system": "", "imbalance before": "", "after": "", "predicted ms": ""},
    [[1000.0, "zipf", "plain", 2.0, 2.0, 3000.0], [1000.0, "zipf", "exact", 2.0, 1.0, 2200.0]],
)


def point(system: str, *seconds: float, **more: object) -> dict[str, object]:
    return {"rate": 1e9, "routing": "zipf", "system": system, "seconds": list(seconds), **more}


def test_a_prediction_stands_beside_the_slowest_rank_and_its_error():
    ranks = [[point("plain", 1.0, 4.0), point("exact", 2.0, 2.0)], [point("plain", 2.0, 3.0), point("exact", 1.0, 1.0)]]
    found = compared(PREDICTED, slowest(ranks))
    assert found["compared"].rows[0][3:] == [3000.0, [3000.0] * 3, 0.0, 1.0, 1.0]
    assert found["compared"].rows[1][3:] == [2200.0, [2000.0] * 3, pytest.approx(10.0), 3000 / 2200, 1.5]
    assert found["summary"].rows == [["all", 2, pytest.approx(5.0), pytest.approx(10.0)]]


def curve(loss: np.ndarray, dropped: int = 0, validation: float = 2.0) -> Curve:
    steps = len(loss)
    balance = np.full(steps, dropped), np.full(steps, 2.0), np.full(steps, 1.25), np.full(steps, 1)
    counts = np.full((steps, CONFIG.model.num_layers, 4, CONFIG.model.num_experts), 64, np.int32)
    return Curve(loss, *balance, counts, np.float64(validation))


def test_speeds_are_ratios_inside_a_pass_and_a_faster_run_has_more_steps_in_the_same_time():
    seconds = {BASE: np.array([[2.0], [6.0]]), "plain": np.array([[4.0], [8.0]]), "exact": np.array([[1.0], [4.0]])}
    loss = 1000.0 - np.arange(100)
    curves, memory = dict.fromkeys(seconds, curve(loss, 4096)), dict.fromkeys(seconds, 2_000_000)
    after = dict.fromkeys(seconds, 1.25)
    rows = speeds(seconds, curves, after, memory).rows
    assert rows[2][:3] == ["exact", [1.75, 1.5, 2.0], [3.0, 2.0, 4.0]]
    # In the 250 s of `exact`, `BASE` takes 50 steps of 2 s and 25 of 6 s.
    assert [row[5] for row in rows] == [75, 56, 100]
    assert rows[0][6] == np.mean(loss[:75])
    assert rows[2][6] == rows[2][4] == np.mean(loss)
    assert rows[2][7:] == [100.0, 2.0, 1.25, 2.0]


def test_elapsed_time_is_in_the_order_of_the_steps():
    assert elapsed_s(np.array([[1.0, 3.0], [2.0, 4.0]]), 200)[49::50].tolist() == [50, 150, 300, 500]


def test_whole_runs_have_all_their_steps_and_the_middle_half_of_their_blocks():
    balance = {"loss": [2.0] * 2 * BLOCK, "before": [1.5], "after": [1.0]}
    blocks = {BASE: {"seconds": [30.0, 50.0], **balance}, "exact": {"seconds": [20.0, 20.0], **balance}}
    rows = whole_runs(blocks).rows
    assert rows[0][1:3] == [2 * BLOCK, [1.0, 1.0, 1.0]]
    # Ratios of blocks are 1.5 and 2.5; the middle half of them is from 1.75 to 2.25.
    assert rows[1][2:] == [[2.0, 1.75, 2.25], SMALL.tokens_per_step * 2 * BLOCK / 40, 40.0, 2.0, 1.5, 1.0]


def test_a_workload_without_a_measurement_has_its_prediction_alone():
    points = [(TEXT, COMPARED[0]), (TEXT, COMPARED[2]), (USUAL, COMPARED[0])]
    predicted = Table({"workload": "", "system": "", "over plain, predicted": ".2f"}, [[*key, 1.5] for key in points])
    times = dict(zip(WHOLE, (3.0, 2.5, 2.0, 1.5, 1.0), strict=True))
    found = workloads({(TEXT, name): np.full((1, 2), time) for name, time in times.items()}, predicted).rows
    gains = [[1.5] * 3, [1.25] * 3], [[3.0] * 3, [2.5] * 3], [None, None]
    assert found == [[*key, 1.5, *of] for key, of in zip(points, gains, strict=True)]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_counts_have_the_given_imbalance_up_to_rounding(routing: str):
    counts, (table, numbers) = counts_of(routing), records()
    assert (table[np.array(numbers[routing], int)] == counts).all()
    assert np.issubdtype(counts.dtype, np.integer)
    assert counts.min() >= 0
    assert (counts.sum(-1) == 4096 * CONFIG.model.experts_per_token).all()
    assert np.abs(imbalance(counts) - ROUTINGS[routing]).max() < 0.025


def test_gains_are_ratios_inside_a_pass_beside_their_predictions():
    routings, columns = list(ROUTINGS), ("Mbit/s", "routing", "system", "predicted ms", "exchanges %")
    points = [(rate / 1e6, routing, name) for rate in RATES for routing in routings for name in CASES]
    rows = [[*point, 10.0 + routings.index(point[1]) if point[2] == "plain" else 12.0, 40.0] for point in points]
    times = {point: np.array([20.0, 30.0]) if point[2] == "plain" else np.array([10.0, 30.0]) for point in points}
    found = Table(GAINS, gain_rows(Table(dict.fromkeys(columns, ""), rows), times))
    assert len(found.rows) == len(points) / 2
    assert found.rows[4] == ["exact", "plain", 1000.0, 2.0, 40.0, 14 / 12, [1.5, 1.0, 2.0]]
    assert break_even(found).rows[0] == ["exact", "plain", 1000.0, 1.25, [1.0, 1.0, 1.0]]


def test_given_imbalances_are_gains_over_plain_with_headroom():
    of_systems = [(COMPARED[0], 0.8, 0.9, 1.0, 1.2), (COMPARED[2], 1.1, 1.2, 1.3, 1.4)]
    rows: list[list[Value]] = [[TEXT, COMPARED[0], 1.1, 0.0, 0.0, 0.0, None, None]]
    rows += [["popular ranks, 1.1", name, 1.1, 40.0, 0.5, low, None, [even] * 3] for name, low, even, *_ in of_systems]
    rows += [["popular ranks, 2.0", name, 2.0, 30.0, 1.5, high, None, [one] * 3] for name, *_, high, one in of_systems]
    over = over_headroom(Table(dict.fromkeys("abcdefgh", ""), rows))
    assert [row[0] for row in over] == [COMPARED[0]] * 2 + [COMPARED[2]] * 2
    assert [row[3:] for row in over[:2]] == [[1.1, 40.0, 0.8, [0.9] * 3], [2.0, 30.0, 1.0, [1.2] * 3]]
    found = break_even(Table(GAINS, over)).rows
    assert found[0] == [COMPARED[0], "plain, headroom 1.5", 2000.0, 2.0, [pytest.approx(1.4)] * 3]
    assert found[1][3:] == [1.1, [1.1] * 3]


@pytest.mark.parametrize(
    ("of_levels", "expected"),
    [([0.8, 1.2, 1.5], 1.5), ([1.0, 1.1, 1.2], 1.0), ([1.1, 0.9, 1.1], 2.5), ([2.0, 1.0, 0.9], None)],
)
def test_the_break_even_is_linear_between_points(of_levels: list[float], expected: float | None):
    assert crossing([1.0, 2.0, 3.0], of_levels) == (None if expected is None else pytest.approx(expected))


def test_every_kept_copy_of_a_run_with_capacity_is_timed_again():
    limit, num_tokens, per_token = 3, 8, 2
    kept = np.array([3, 3, 1, 0])
    counts = with_dropped(kept, limit, num_tokens, per_token)
    assert counts.sum() == num_tokens * per_token
    assert counts.max() <= num_tokens
    experts = by_counts(counts, num_tokens, per_token)
    found = np.ravel(within_capacity(experts, 4, limit))
    assert (np.bincount(found[found >= 0], minlength=4) == kept).all()


@pytest.mark.parametrize("run", RUNS)
def test_the_timed_steps_of_all_runs_can_be_replayed(run: str):
    counts = timed_counts(RUNS[run], curve(np.zeros(1000)), 10)
    assert counts.shape == (10, CONFIG.model.num_layers, 4, CONFIG.model.num_experts)
    assert (counts.sum(-1) == 4096 * CONFIG.model.experts_per_token).all()


def test_timed_steps_are_in_the_middle_of_equal_intervals():
    of = curve(np.zeros(100))
    numbers = of._replace(counts=of.counts + np.arange(100)[:, None, None, None])
    assert (timed_counts(RUNS["plain"], numbers, 10)[:, 0, 0, 0] // 16 - 64).tolist() == list(range(5, 100, 10))


def test_curves_of_all_seeds_are_read_as_they_were_written(tmp_path):
    saved = curve(np.arange(3.0))
    save_curve(saved, Key("exact", seed=2).path(tmp_path))
    (found,) = seeds_of(tmp_path, "exact")
    assert all((read == wrote).all() for read, wrote in zip(found, saved, strict=True))
    assert load_curve(Key("exact", seed=2).path(tmp_path)).validation == 2.0
    assert [path.suffixes for path in tmp_path.iterdir()] == [[".npz"]]


def test_a_run_changes_its_text_in_the_middle():
    texts = [WORKLOADS[TEXT].corpus(step).source for step in (0, 299, 300)]
    assert texts[0] == texts[1] != texts[2]
    assert WORKLOADS[USUAL].config.tokens_per_step == 4 * BATCH_TOKENS


def test_losses_are_means_of_seeds_with_their_range():
    plain = [curve(np.full(200, loss), validation=loss) for loss in (2.0, 3.0)]
    rows = losses({"plain": plain, "exact": plain[:1]}).rows
    assert rows[0][:4] == ["plain", 2, [2.5, 2.0, 3.0], 2.5]
    assert rows[1][:4] == ["exact", 1, [2.0, 2.0, 2.0], 2.0]


def test_the_balance_of_a_workload_is_that_of_its_second_half():
    of = curve(np.zeros(4))
    of.counts[2:, :, :, :2] = 128
    of.counts[2:, 0, :, 2:] = 0
    assert balances({(TEXT, "plain"): of}).rows == [[TEXT, "plain", 2.8, 4.0, 4.0]]


def test_the_validation_loss_of_a_codec_weighs_batches_by_their_predicted_tokens():
    batches = [np.array([[1, 2, 3]] * 8, np.int32), np.array([[1, 2 + CONTEXT, 3]] * 8, np.int32)]
    corpus = SimpleNamespace(validation_batches=lambda *sizes: batches)
    programs = SimpleNamespace(evaluate=lambda losses, batch: next(losses))
    sizes = {"validation": SimpleNamespace(batches=2), "batch": SimpleNamespace(size=8, sequence_length=2)}
    config = SimpleNamespace(steps=0, **sizes)
    found = train_from(iter([1.0, 4.0]), programs, config, make_mesh(ParallelConfig()), corpus)
    assert found == ([], pytest.approx(2.0))
