"""Tables of training on four ranks, from small measurements."""

import numpy as np
import pytest

from benchmarks.network.replayed import by_counts
from benchmarks.network.stages import seconds_by_stage
from benchmarks.network.testbed import CONFIG
from benchmarks.network.training import compared, orders, slowest
from benchmarks.network.training_runs import (
    DOMAINS,
    FLAT,
    INTERVAL,
    OWN,
    REPLAYED,
    RUNS,
    TIMED,
    Curve,
    load_curves,
    runs,
    save_curves,
    timed_counts,
    with_dropped,
)
from benchmarks.network.training_speed import elapsed_s, memory, speeds
from benchmarks.render.results import Table
from benchmarks.training.curves import table
from jax_moe_lb.routing.more_routers import within_capacity

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


def curve(loss: np.ndarray, dropped: int = 0) -> Curve:
    steps = len(loss)
    balance = np.full(steps, dropped), np.full(steps, 2.0), np.full(steps, 1.25), np.full(steps, 1)
    counts = np.full((steps, CONFIG.model.num_layers, 4, CONFIG.model.num_experts), 64, np.int32)
    return Curve(loss, *balance, counts)


def test_speeds_are_ratios_inside_a_pass_and_a_faster_run_has_more_steps_in_the_same_time():
    seconds = {(FLAT, "plain"): [2.0, 6.0], (FLAT, "exact"): [1.0, 4.0]}
    seconds |= {(DOMAINS, f"plain{DOMAINS}"): [4.0, 4.0], (DOMAINS, f"two_tier{DOMAINS}"): [4.0, 1.0]}
    points = [
        {"network": network, "run": name, "turn": turn, "seconds": [of[turn]]}
        for turn in range(2)
        for (network, name), of in seconds.items()
    ]
    loss = 1000.0 - np.arange(2 * INTERVAL)
    curves = {name: curve(loss, 4096) for name in ("plain", "exact", f"two_tier{DOMAINS}")}
    names = [name for _, name in seconds]
    rows = speeds(
        points, curves, dict.fromkeys(names, 2e6), {key: {"experts": 3.0, "rows: exchange": 1.0} for key in names}
    ).rows
    assert rows[1][:2] == ["exact", [1.75, 1.5, 2.0]]
    # In the 250 s of `exact`, `plain` takes 50 steps of 2 s and 25 of 6 s.
    assert [row[4] for row in rows] == [75, 100, 62, 100]
    assert rows[0][5] == np.mean(loss[:75])
    assert rows[1][5] == rows[1][3] == np.mean(loss)
    assert rows[1][6:] == [100.0, 2.0, 1.25, 2.0, 75.0, 25.0]


def test_elapsed_time_is_in_the_order_of_the_steps():
    assert elapsed_s(np.array([[1.0, 3.0], [2.0, 4.0]]))[INTERVAL - 1 :: INTERVAL].tolist() == [50, 150, 300, 500]


def test_every_kept_copy_of_a_run_with_capacity_is_timed_again():
    limit, num_tokens, per_token = 3, 8, 2
    kept = np.array([3, 3, 1, 0])
    counts = with_dropped(kept, limit, num_tokens, per_token)
    assert counts.sum() == num_tokens * per_token
    assert counts.max() <= num_tokens
    experts = by_counts(counts, num_tokens, per_token)
    found = np.ravel(within_capacity(experts, 4, limit))
    assert (np.bincount(found[found >= 0], minlength=4) == kept).all()


@pytest.mark.parametrize(("routing", "network"), [(OWN, FLAT), (OWN, DOMAINS), (REPLAYED, FLAT), (REPLAYED, DOMAINS)])
def test_the_timed_steps_of_all_runs_can_be_replayed(routing: str, network: str):
    curves = {name: curve(np.zeros(1000)) for of in RUNS.values() for name in of}
    for name in runs(routing, network):
        counts = timed_counts(name, network, curves, 4096)
        assert counts.shape == (len(TIMED), CONFIG.model.num_layers, 4, CONFIG.model.num_experts)
        assert (counts.sum(-1) == 4096 * CONFIG.model.experts_per_token).all()


def test_curves_are_read_as_they_were_written(tmp_path):
    saved = {"exact, two domains": curve(np.arange(3.0))}
    assert load_curves(tmp_path / "own.npz") == {}
    save_curves(saved, tmp_path / "own.npz")
    found = load_curves(tmp_path / "own.npz")
    assert list(found) == list(saved)
    for read, wrote in zip(found["exact, two domains"], saved["exact, two domains"], strict=True):
        assert (read == wrote).all()


def test_compiled_and_measured_memory_stand_side_by_side():
    rows = memory({"plain": 100_000_000, "exact": 110_000_000}, {"plain": 2e8, "exact": 3e8}).rows
    assert rows[1] == ["exact", 110.0, 1.1, 300.0, 1.5]


def test_the_first_step_that_differs_from_plain_is_counted():
    plain = curve(1000.0 - np.arange(240))
    other = plain._replace(loss=plain.loss + (np.arange(240) == 7))
    rows = table({"plain": plain, "exact": plain, "two_tier": other}).rows
    assert [row[2] for row in rows] == [240, 240, 7]
    assert rows[2][3] == pytest.approx(1 / 993)
    assert rows[0][1] == np.mean(plain.loss[-100:])


PROGRAM = """
  %while.1 = (f32[2]) while(%t), condition=%c, body=%b, metadata={op_name="jit(step)/experts/while"}
  %dot.2 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(step)/experts/while/body/dot"}
  ROOT %collective-permute.3 = f32[2]{0} collective-permute(%dot.2), metadata={op_name="jit(step)/dispatch/ppermute"}
"""


def test_operations_are_summed_by_scope_and_loops_are_not_counted_twice():
    seconds = {"while.1": 5.0, "dot.2": 4.0, "collective-permute.3": 1.0, "unknown": 9.0}
    assert seconds_by_stage(seconds, PROGRAM) == {"experts": 4.0, "dispatch: exchange": 1.0}
