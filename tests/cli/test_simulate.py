"""`simulate`, `advise` and `calibrate` print and write what they promise, and refuse what they must."""

import json

import numpy as np
import pytest
import yaml

from jax_moe_lb.cli import main
from jax_moe_lb.cli.compose import compose
from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape, Step
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.systems import system_names

CONFIG = """
version: 1
cluster:
  levels:
    - {name: node, size: 2, rate: 1 GB/s, links: 2, latency: 10 us}
    - {name: gpu, size: 2, rate: 10 GB/s}
  gemm: {peak: 1 TFLOP/s, half_rows: 16}
  compute: 1 TFLOP/s
  planner: 20 us
model: {layers: 2, hidden: 64, inner: 128, experts: 8, per_token: 2, tokens: 512}
system: ultraep
routing: {imbalance: 1.5}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def output(capsys, *argv):
    assert main([str(argument) for argument in argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys, *argv):
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.slow
def test_simulate_prints_stages_that_add_up(capsys, config):
    found = json.loads(output(capsys, "simulate", config, "--json"))
    assert (found["system"], found["num_ranks"], found["layers"]) == ("ultraep", 4, 2)
    assert sum(stage["exposed_s"] for stage in found["stages"].values()) == pytest.approx(found["step_s"])
    assert found["imbalance_after"] < found["imbalance_before"]
    table = output(capsys, "simulate", config)
    assert all(name in table for name in found["stages"])
    assert f"{found['step_s'] * 1e3:.3f}" in table


@pytest.mark.slow
def test_simulate_writes_a_trace_and_a_picture(capsys, config, tmp_path):
    output(capsys, "simulate", config, "--timeline", tmp_path / "t.json", "--png", tmp_path / "t.png")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_takes_recorded_counts(capsys, config, tmp_path):
    counts = np.zeros((2, 2, 4, 8), np.int32)
    counts[..., 3] = 1024
    np.savez(tmp_path / "counts.npz", counts=counts, steps=np.array([1, 2]))
    argv = ("simulate", config, "--system", "plain", "--trace", tmp_path / "counts.npz", "--json")
    found = json.loads(output(capsys, *argv))
    assert (found["imbalance_after"], found["rounds"]) == (4, 4)
    # Twice the tokens make twice the bytes, and as many rounds.
    np.save(tmp_path / "counts.npy", 2 * counts)
    twice = json.loads(output(capsys, *argv[:5], tmp_path / "counts.npy", "--json"))
    assert twice["stages"]["dispatch"]["bytes"] == 2 * found["stages"]["dispatch"]["bytes"]
    assert twice["rounds"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybridep", "hybridep+greedy", "greedy+rails", "rails", "feplb"])
def test_systems_compose(capsys, config, name):
    found = json.loads(output(capsys, "simulate", config, "--system", name, "--json"))
    assert found["step_s"] > 0
    assert found["domain_sizes"] == [1, 1] or name.startswith("hybridep")


def test_domain_sizes_can_be_given(capsys, config):
    argv = ("simulate", config, "--system", "hybridep", "--domain-sizes", "1,2", "--json")
    found = json.loads(output(capsys, *argv))
    assert found["domain_sizes"] == [1, 2]
    assert found["stages"]["gather"]["bytes"] > 0


def test_every_system_can_be_composed():
    cluster = Cluster((Links("node", 2, 1e9), Links("gpu", 2, 1e10)))
    model = ModelShape(2, 64, 128, 8, 2, 512)
    for name in system_names():
        assert compose(name, model, cluster, Step()).system is not None
    chosen = compose("hybridep+exact", model, cluster, Step(), 1, Migration((2, 1)))
    assert (chosen.migration.domain_sizes, chosen.system.replica_slots) == ((2, 1), 1)


@pytest.mark.slow
def test_advise_ranks_by_the_step(capsys, config):
    found = json.loads(output(capsys, "advise", config, config, "--imbalance", "2.0", "--json"))
    times = [row["step_s"] for row in found["systems"]]
    assert times == sorted(times)
    assert found["systems"][0]["system"] == found["best"]
    assert {"plain", "ultraep", "greedy+rails"} & {row["system"] for row in found["systems"]} >= {"plain", "ultraep"}
    table = output(capsys, "advise", "mixtral_8x7b", "h100_node", "--imbalance", "1.0")
    assert "Leave balancing off" in table


@pytest.mark.slow
def test_calibrate_writes_what_simulate_reads(capsys, tmp_path, monkeypatch):
    # The shape of the file, not the machine: small sizes.
    from jax_moe_lb.cli import calibrate

    for name, value in {"HIDDEN": 16, "INNER": 32, "ROWS": (4, 16), "MANY_ROWS": 64, "REPEATS": 1}.items():
        monkeypatch.setattr(calibrate, name, value)
    found = json.loads(output(capsys, "calibrate", tmp_path / "machine.yaml", "--json"))
    assert found["ranks"] == 2
    config = load_config("CONFIG", str(tmp_path / "machine.yaml"))
    cluster = config.cluster.build()
    assert cluster.levels[0].bytes_per_s == pytest.approx(found["exchange_bytes_per_s"], rel=1e-3)
    assert cluster.gemm.rows == (4.0, 16.0)
    assert json.loads(output(capsys, "simulate", tmp_path / "machine.yaml", "--json"))["step_s"] > 0


REFUSED = {
    "unknown system": (("--system", "ultra"), "--system is 'ultra'; expected one of eplb"),
    "two systems": (("--system", "greedy+ultraep"), "--system is 'greedy+ultraep'"),
    "waves over rails": (("--system", "feplb+rails"), "tokens travel directly"),
    "slots of plain": (("--system", "plain", "--replica-slots", "2"), "expected none, as this system has no replicas"),
    "slots in words": (("--replica-slots", "two"), "--replica-slots is 'two'"),
    "domains of ultraep": (("--domain-sizes", "1,2"), "expected a system that starts with hybridep"),
    "too few domains": (("--system", "hybridep", "--domain-sizes", "2"), "domain_sizes is (2,)"),
    "no divisors": (("--system", "hybridep", "--domain-sizes", "3,1"), "domain_sizes is (3, 1)"),
    "no imbalance": (("--imbalance", "0.5"), "--imbalance is '0.5'; expected a number, at least 1"),
    "imbalance in words": (("--imbalance", "much"), "--imbalance is 'much'"),
    "impossible imbalance": (("--imbalance", "99"), "imbalance is 99.0; expected at most"),
    "no tokens": (("--tokens", "0"), "--tokens is '0'"),
    "missing trace": (("--trace", "none.npy"), "--trace is none.npy: No such file"),
    "no folder": (("--timeline", "no/such/t.json"), "--timeline is no/such/t.json: No such file or directory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_options(capsys, config, name):
    argv, message = REFUSED[name]
    assert message in refusal(capsys, "simulate", config, *argv)


def test_a_trace_of_another_model_is_refused(capsys, config, tmp_path):
    np.save(tmp_path / "counts.npy", np.ones((4, 16), int))
    error = refusal(capsys, "simulate", config, "--trace", tmp_path / "counts.npy")
    assert "has 4 ranks and 16 experts; expected the cluster's 4 ranks and the model's 8 experts" in error
    np.save(tmp_path / "counts.npy", np.ones(4, int))
    assert "counts has shape (4,)" in refusal(capsys, "advise", config, config, "--trace", tmp_path / "counts.npy")


def test_files_that_are_none(capsys, config, tmp_path):
    said = refusal(capsys, "simulate", "h100")
    assert "near ones are h100_node" in said
    assert "presets are cpu_2_cores, dc4_10gbit" in said
    assert "No such file" in refusal(capsys, "simulate", tmp_path / "none.yaml")
    assert "MODEL is 'zz'" in refusal(capsys, "advise", "zz", config)
    assert "CLUSTER mixtral_8x7b has no cluster" in refusal(capsys, "advise", "mixtral_8x7b", "mixtral_8x7b")
    data = yaml.safe_load(CONFIG)
    del data["model"]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(data))
    assert "has no model" in refusal(capsys, "simulate", tmp_path / "cluster.yaml")
    assert "OUT is" in refusal(capsys, "calibrate", tmp_path)
    assert "--ranks is 1" in refusal(capsys, "calibrate", tmp_path / "out.yaml", "--ranks", "1")
