"""Fits recover the drift of samples, which determines the gain of systems with a history."""

import numpy as np
import pytest

from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, drawn_workloads
from jax_moe_lb.advise.search import Space
from jax_moe_lb.cli import main
from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Drift, Links, ModelShape, drifting_counts, fitted_drift, replay
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.drift import moments
from jax_moe_lb.sim.loads import LoadShape
from jax_moe_lb.sim.model import Step

MODEL = ModelShape(1, 256, 512, 64, 4, 1024)
CLUSTER = Cluster((Links("gpu", 8, 50e9),), planner_s=1e-5)


@pytest.mark.parametrize("drift", [Drift(0.6, 0.35, 12.0, 0.2, 0.8), Drift(0.3, 0.2, 6.0, 0.1, 0.5), Drift(spread=0.7)])
def test_a_fit_finds_the_drift_again(drift):
    trace = drifting_counts(MODEL, 8, range(128), 4, drift, seed=1)
    found = fitted_drift(trace, MODEL.per_token)
    assert found.spread == pytest.approx(drift.spread, rel=0.2)
    assert found.rank_std == pytest.approx(drift.rank_std, abs=0.02)
    assert found.steady == pytest.approx(drift.steady, abs=0.12)
    # Shares of the total depend on few layers; changes between steps do not.
    changing = [(1 - one.correlation(1)) * one.spread**2 for one in (found, drift)]
    assert changing[0] == pytest.approx(changing[1], rel=0.15, abs=0.002)
    correlations = moments(trace, MODEL.per_token, [1, 8, 32]).correlations
    np.testing.assert_allclose(correlations, [found.correlation(lag) for lag in (1, 8, 32)], atol=0.05)


@pytest.mark.parametrize("shape", list(LoadShape))
def test_the_last_step_has_the_imbalance_and_the_steps_before_drift_to_it(shape):
    drift = Drift(0.4, 0.6, 10.0)
    counts = drifting_counts(MODEL, 8, (-100, -50, -1, 0), 2, drift, 1.8, 3, shape)
    load = counts.sum(2).reshape(4, 2, 8, -1).sum(3)
    np.testing.assert_allclose(load[-1].max(1) / load[-1].mean(1), 1.8, rtol=0.06)
    assert (counts.sum(3) == 1024 * 4).all()
    assert counts.max() <= 1024
    changed = np.abs(load[:-1] - load[-1]).mean((1, 2))
    assert changed[2] < 0.7 * changed[:2].min()
    np.testing.assert_array_equal(counts, drifting_counts(MODEL, 8, (-100, -50, -1, 0), 2, drift, 1.8, 3, shape))


@pytest.mark.slow
def test_stale_plans_lose_by_drift():
    gains = {}
    for drift in (Drift(), Drift(0.3, 0.7, 2.0)):
        trace = drifting_counts(MODEL, 8, range(9), 1, drift, 2.0)
        reports = [list(replay(s, MODEL, CLUSTER, trace))[3:] for s in (systems.eplb(), systems.eplb_plus())]
        eplb, exact = (np.mean([r.imbalance_after for r in each]) for each in reports)
        gains[drift.steady] = eplb / exact
    assert gains[1] < 1.1 < gains[0.3]


def test_advice_knows_what_was_before():
    drift = Drift(0.9, 0.1, 10.0)
    (load,) = drawn_workloads(MODEL, 8, 2.0, 1, [LoadShape.LOGNORMAL], 1, 0, drift)
    judge = Evaluator(MODEL, CLUSTER, Step())
    # Its first three steps have a plan, so the evaluated one has replicas.
    assert judge.report(Choice("eplb", 2), load).imbalance_after < 1.6 < judge.report(Choice(), load).imbalance_after
    assert Choice("eplb", 2) in Space(CLUSTER, 2, with_history=True)
    assert Choice("eplb", 2) not in Space(CLUSTER, 2)
    assert Choice("lplb", 2, sprayed=True) not in Space(CLUSTER, 2, with_history=True)


def test_the_command_prints_what_a_file_reads(tmp_path, capsys):
    trace = drifting_counts(MODEL, 8, range(16), 1, Drift(0.6, 0.3, 4.0, 0.1, 0.7))
    np.save(tmp_path / "trace.npy", trace)
    assert main(["drift", str(tmp_path / "trace.npy"), "--per-token", "4", "--skip", "0"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "file.yaml").write_text("version: 1\n" + printed)
    found, expected = load_config("FILE", str(tmp_path / "file.yaml")).routing.drift, fitted_drift(trace, 4)
    assert found.steady == pytest.approx(expected.steady, rel=0.01)
    assert found.rank_std == pytest.approx(expected.rank_std, rel=0.01)
    assert main(["drift", str(tmp_path / "trace.npy"), "--per-token", "65"]) == 2
    assert "--per-token is 65; expected at most the 64 experts" in capsys.readouterr().err
    assert main(["drift", str(tmp_path / "trace.npy"), "--per-token", "2", "--skip", "9"]) == 2
    assert "--skip is '9'; expected an integer, from 0 to 8" in capsys.readouterr().err


def test_rounded_shares_are_at_most_one(tmp_path, capsys, monkeypatch):
    found = Drift(steady=0.0554, drifting=0.9446, spread=1.0)
    monkeypatch.setattr("jax_moe_lb.cli.convert.fitted_drift", lambda *_: found)
    np.save(tmp_path / "trace.npy", np.ones((8, 1, 2, 4), int))
    assert main(["drift", str(tmp_path / "trace.npy"), "--per-token", "2"]) == 0
    (tmp_path / "file.yaml").write_text("version: 1\n" + capsys.readouterr().out)
    assert load_config("FILE", str(tmp_path / "file.yaml")).routing.drift == found
