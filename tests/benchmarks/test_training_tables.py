"""Tables of training on four ranks, from small measurements."""

import numpy as np
import pytest

from benchmarks.bench_training_curves import BATCH, balance, losses
from benchmarks.network.stages import seconds_by_stage
from benchmarks.network.testbed import CONFIG
from benchmarks.network.training_tables import compared, memory, orders, slowest, trained
from benchmarks.results import Table

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
    assert found["summary"].rows == [["all", 2, pytest.approx(5.0), pytest.approx(10.0), 2, 2, 1, 1, 1, 1]]


def test_a_wrong_order_is_counted():
    found = compared(PREDICTED, [point("plain", 2.0), point("exact", 2.5)])
    assert found["summary"].rows[0][4:] == [0, 0, 0, 1, 0, 1]


def test_a_pair_whose_ranges_overlap_has_no_order():
    expected = {("link", "zipf", name): at for name, at in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    times = {key: np.array(of) for key, of in zip(expected, ([2.0, 2.4], [1.9, 2.2], [2.5, 2.6]), strict=True)}
    # The first two are swapped by their medians; only the last one is apart.
    assert orders(expected, times) == (1, 3, 2, 3, 2, 2)


def test_speeds_are_ratios_inside_a_run():
    balance = {"before": [2.0], "after": [1.0], "rounds": [1], "dropped": [5]}
    runs = [point(name, seconds, **balance) for seconds in (1.0, 3.0) for name in ("plain", "exact")]
    runs[1]["seconds"], runs[3]["seconds"] = [0.5], [2.0]
    rows = trained(runs, "zipf", tokens=100, copies=200, peaks={"plain": 1e6, "exact": 3e6}).rows
    assert rows[1][:2] == ["exact", [1.75, 1.5, 2.0]]
    assert rows[1][3:] == [2.0, 1.0, 1, 2.5, 3.0]


def test_compiled_and_measured_memory_stand_side_by_side():
    rows = memory({"plain": 100_000_000, "exact": 110_000_000}, {"plain": 2e8, "exact": 3e8}).rows
    assert rows[1] == ["exact", 110.0, 1.1, 300.0, 1.5]


def test_a_faster_run_has_more_steps_in_the_same_time_and_an_unmeasured_one_has_none():
    curves = {name: [[float(1000 - i), 0.0, 1.0] for i in range(240)] for name in ("plain", "exact", "two_tier")}
    curves["two_tier"][7][0] += 1
    rows = losses(curves, {"plain": 1.0, "exact": 1.5, "feplb": 3.0}).rows
    assert [row[2] for row in rows] == [240, 240, 7]
    assert rows[2][3] == pytest.approx(1 / 993)
    assert [row[4] for row in rows] == [160, 240, None]
    assert rows[0][5] - rows[1][5] == 80.0
    assert rows[2][5] is None


def test_balance_is_of_the_steps_that_all_runs_have():
    copies = BATCH.size * BATCH.sequence_length * CONFIG.model.experts_per_token * CONFIG.model.num_layers
    curves = {
        "plain": [[5.0, copies / 2, 2.0, 1.0, 1.0], [4.0, 0.0, 3.0, 1.5, 2.0], [3.0] * 5],
        "exact": [[1.0] * 5] * 2,
    }
    assert balance(curves).rows[0] == ["plain", 25.0, 2.5, 1.25, 2.0]


PROGRAM = """
  %while.1 = (f32[2]) while(%t), condition=%c, body=%b, metadata={op_name="jit(step)/experts/while"}
  %dot.2 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(step)/experts/while/body/dot"}
  ROOT %collective-permute.3 = f32[2]{0} collective-permute(%dot.2), metadata={op_name="jit(step)/dispatch/ppermute"}
"""


def test_operations_are_summed_by_scope_and_loops_are_not_counted_twice():
    seconds = {"while.1": 5.0, "dot.2": 4.0, "collective-permute.3": 1.0, "unknown": 9.0}
    assert seconds_by_stage(seconds, PROGRAM) == {"experts": 4.0, "dispatch: exchange": 1.0}
