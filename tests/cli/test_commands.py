"""Output and files of `plan` and `replay`."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_lb import Chain, Plan, Topology, balancers
from jax_moe_lb.balancers import Balancer, Exact, Greedy, RailS, UltraEP
from jax_moe_lb.cli import main
from jax_moe_lb.cli.planning import balancer_names, load_balancer
from jax_moe_lb.core import check_plan, plain_plan
from tests.cli.commands import output

ROOT = Path(__file__).parents[2]
HEAD = ["balancer", "num_ranks", "num_experts", "replica_slots"]
EFFECT = ["imbalance_before", "imbalance_after", "straggler_before", "straggler_after", "replicas"]
EFFECT += ["max_fan_out", "planner_us"]


@dataclass(frozen=True)
class LateStart(Balancer):
    """Balancer without effect until it has seen tokens."""

    def init(self, counts_shape):
        return jnp.zeros(counts_shape, jnp.int32)

    def rebalance(self, counts, plan, topology, state):
        balanced, _ = Greedy().rebalance(counts, plan, topology, ())
        return jax.tree.map(lambda a, b: jnp.where(state.any(), a, b), balanced, plan), counts


def skewed_counts(*leading, num_ranks=4, num_experts=8):
    counts = np.random.default_rng(0).integers(1, 10, (*leading, num_ranks, num_experts))
    counts[..., 3] += 40
    return counts


@pytest.fixture
def counts_file(tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, skewed_counts(3))
    return path


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, counts=skewed_counts(3, 2), steps=np.array([10, 20, 30]))
    return path


@pytest.fixture
def late_start(tmp_path, monkeypatch):
    """Export a balancer from the package for the duration of a test."""
    monkeypatch.setattr(balancers, "LateStart", LateStart, raising=False)
    monkeypatch.setattr(balancers, "__all__", [*balancers.__all__, "LateStart"])
    return "latestart"


def as_json(capsys, *argv):
    return json.loads(output(capsys, *argv, "--json"))


def test_plan_json(capsys, counts_file):
    argv = ("plan", counts_file, "--balancer", "greedy", "--ranks-per-domain", 2, "--replica-slots", 1)
    found = as_json(capsys, *argv, "--expert-bytes", 1000)
    assert list(found) == [*HEAD, "no_op_reason", "layers", "mean"]
    assert [found[key] for key in (*HEAD, "no_op_reason")] == ["greedy", 4, 8, 1, None]
    for row, counts in zip(found["layers"], skewed_counts(3), strict=True):
        load = counts.sum(0).reshape(4, 2).sum(1)
        assert list(row) == list(found["mean"]) == [*EFFECT, "weight_bytes"]
        assert row["imbalance_before"] == pytest.approx(load.max() / load.mean())
        assert row["straggler_before"] == pytest.approx(load.max() - load.mean())
        assert 1 <= row["imbalance_after"] < row["imbalance_before"]
        assert 0 <= row["straggler_after"] < row["straggler_before"]
        assert 1 <= row["max_fan_out"] <= row["replicas"]
        assert row["planner_us"] > 0
        assert row["weight_bytes"] == 1000 * row["replicas"]
    for key in EFFECT:
        assert found["mean"][key] == pytest.approx(np.mean([row[key] for row in found["layers"]]))


EDGES = {
    "domains of one rank": (skewed_counts(3), ("--ranks-per-domain", 1), {"replica_slots": 2, "replicas": 0}),
    "no tokens": (np.zeros((4, 8), int), (), {"imbalance_after": 1, "straggler_after": 0}),
    "one rank": (np.ones((1, 4), int), (), {"replica_slots": 0, "imbalance_after": 1}),
    "other integers": (skewed_counts().astype(np.uint64), (), {}),
}


@pytest.mark.parametrize("case", EDGES)
def test_counts_of_any_size(capsys, tmp_path, case):
    counts, argv, expected = EDGES[case]
    np.save(tmp_path / "counts.npy", counts)
    found = as_json(capsys, "plan", tmp_path / "counts.npy", "--balancer", "greedy", *argv)
    assert len(found["layers"]) == len(counts.reshape(-1, *counts.shape[-2:]))
    assert (found | found["mean"]).items() >= expected.items()


def test_plan_table(capsys, counts_file):
    argv = ("plan", counts_file, "--balancer", "greedy")
    lines = output(capsys, *argv).splitlines()
    rows = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("0", "1", "2", "mean")]
    assert rows == ["0", "1", "2", "mean"]
    assert "weights" not in "".join(lines)
    assert "kB" in output(capsys, *argv, "--expert-bytes", 1000)


@pytest.mark.parametrize(("name", "out"), [("greedy", "plan.npz"), ("ultraep", "plan"), ("rails", "plan.npz")])
def test_plan_load_reads_what_out_wrote(capsys, counts_file, tmp_path, name, out):
    """All plan contents of a balancer, including its own split and rails."""
    argv = ("--ranks-per-domain", 2, "--replica-slots", 1, "--out", tmp_path / out)
    output(capsys, "plan", counts_file, "--balancer", name, *argv)
    stacked = Plan.load(tmp_path / out)
    balancer, topology = load_balancer(name), Topology.flat(4, 2)
    for layer, counts in enumerate(skewed_counts(3).astype(np.int32)):
        expected, _ = balancer.rebalance(counts, plain_plan(counts, topology, 3), topology, balancer.init(counts.shape))
        got = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        check_plan(got, counts)


def test_out_of_one_layer_has_the_dimension_too(capsys, tmp_path):
    np.save(tmp_path / "counts.npy", skewed_counts())
    output(capsys, "plan", tmp_path / "counts.npy", "--balancer", "plain", "--out", tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as file:
        assert file["placement"].shape == (1, 4, 4)


def test_replay_json(capsys, trace_file):
    found = as_json(capsys, "replay", trace_file, "--balancer", "greedy")
    assert list(found) == [*HEAD, "no_op_reason", "steps", "mean"]
    assert found["no_op_reason"] is None
    assert [row["step"] for row in found["steps"]] == [10, 20, 30]
    assert list(found["mean"]) == EFFECT
    for row in found["steps"]:
        assert list(row) == ["step", *EFFECT]
        assert row["imbalance_after"] < row["imbalance_before"]


def test_replay_rows_are_means_over_layers(capsys, tmp_path):
    np.save(tmp_path / "trace.npy", skewed_counts(1, 3))
    np.save(tmp_path / "counts.npy", skewed_counts(1, 3)[0])
    (step,) = as_json(capsys, "replay", tmp_path / "trace.npy", "--balancer", "greedy")["steps"]
    mean = as_json(capsys, "plan", tmp_path / "counts.npy", "--balancer", "greedy")["mean"]
    assert step.pop("step") == 0
    assert {**step, "planner_us": None} == {**mean, "planner_us": None}


def test_replay_table_and_plans(capsys, trace_file, tmp_path):
    words = output(capsys, "replay", trace_file, "--balancer", "greedy", "--out", tmp_path / "plans.npz").split()
    assert {"10", "20", "30", "mean"} <= set(words)
    with np.load(tmp_path / "plans.npz") as file:
        assert (file["placement"].shape, file["quota"].shape) == ((3, 2, 4, 4), (3, 2, 8, 4))
        for index in np.ndindex(3, 2):
            check_plan(Plan(file["placement"][index], file["quota"][index], domain=4), skewed_counts(3, 2)[index])


def test_an_exported_balancer_appears_by_itself(late_start):
    assert {"plain", "greedy", late_start} <= set(balancer_names())
    assert not {"balancer", "chain", "hostcallback"} & set(balancer_names())


def test_replay_carries_state_per_layer(capsys, trace_file, late_start):
    first, *others = as_json(capsys, "replay", trace_file, "--balancer", late_start)["steps"]
    assert first["imbalance_after"] == first["imbalance_before"]
    for row in others:
        assert row["imbalance_after"] < row["imbalance_before"]


def test_plan_starts_every_layer_afresh(capsys, counts_file, late_start):
    assert as_json(capsys, "plan", counts_file, "--balancer", late_start)["mean"]["replicas"] == 0


def test_a_balancer_takes_options_and_others_behind_it():
    assert load_balancer("exact:eps=0.05,localize=false,max_fan_out=3") == Exact(0.05, 3, localize=False)
    assert load_balancer("ultraep:eps=0+rails:chunks=4") == Chain((UltraEP(eps=0.0), RailS(chunks=4)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact:epsilon=1", "--balancer exact has no option 'epsilon'; expected one of eps, max_fan_out"),
        ("exact:eps=much", "--balancer exact:eps is 'much'; expected a value like 0.01, the default"),
        ("exact:localize=1", "--balancer exact:localize is '1'; expected a value like True, the default"),
        ("exact:eps=-1", "eps is -1.0; expected"),
        ("hybridep+exact", "--balancer is 'hybridep+exact'; expected exact first"),
        ("exact+", "--balancer is ''; expected one of"),
    ],
)
def test_bad_options_of_a_balancer(capsys, trace_file, text, message):
    assert main(["replay", str(trace_file), "--balancer", text]) == 2
    assert message in capsys.readouterr().err


NO_OPS = {
    "plain": (("--balancer", "plain"), "Plain serves every expert on its home rank, for all counts"),
    "no replica slots": (("--balancer", "greedy", "--replica-slots", "0"), "replica_slots is 0"),
    "domains of one rank": (("--balancer", "greedy", "--ranks-per-domain", "1"), "domains have one rank each"),
    "level load": (("--balancer", "greedy"), "the load of the ranks is already equal"),
    "one node": (("--balancer", "rails"), "all ranks are in one node"),
    "history": (("--balancer", "eplb"), "EPLB plans from the counts of earlier steps, and the input has 0 of them"),
    "limits": (("--balancer", "greedy:min_tokens=100000"), "Greedy(min_tokens=100000) found no better plan"),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_plans_that_change_nothing_have_a_reason(capsys, tmp_path, name):
    argv, reason = NO_OPS[name]
    counts = np.full((1, 1, 4, 8), 5) if name == "level load" else skewed_counts(1, 1)
    np.save(tmp_path / "plan.npy", counts[0])
    np.save(tmp_path / "replay.npy", counts)
    for command in ("plan", "replay"):
        found = as_json(capsys, command, tmp_path / f"{command}.npy", *argv)
        assert reason in found["no_op_reason"]
        assert found["mean"]["imbalance_after"] == found["mean"]["imbalance_before"]
    table = " ".join(output(capsys, "plan", tmp_path / "plan.npy", *argv).split())
    assert f"no plan changes the load: {reason}" in table
