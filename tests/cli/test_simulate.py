"""Output and files of `simulate`, `advise` and `calibrate`, and errors for invalid input."""

import importlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from jax_moe_lb.cli import main
from jax_moe_lb.cli.compile import compose
from jax_moe_lb.cli.output import note
from jax_moe_lb.layer.systems import system_names
from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape, Step, skewed_counts
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.limits import forecast
from jax_moe_lb.sim.work import sample_of
from tests.cli.commands import output, refusal

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


@pytest.mark.slow
def test_simulate_prints_stages_that_add_up_and_writes_them(capsys, config, tmp_path):
    found = json.loads(output(capsys, "simulate", config, "--json"))
    assert (found["system"], found["num_ranks"], found["layers"]) == ("ultraep", 4, 2)
    assert sum(stage["exposed_s"] for stage in found["stages"].values()) == pytest.approx(found["step_s"])
    assert found["imbalance_after"] < found["imbalance_before"]
    table = output(capsys, "simulate", config, "--timeline", tmp_path / "t.json", "--png", tmp_path / "t.png")
    assert all(name in table for name in found["stages"])
    assert f"{found['step_s'] * 1e3:.3f}" in table
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_simulate_takes_recorded_counts(capsys, config, tmp_path):
    counts = np.zeros((2, 2, 4, 8), np.int32)
    counts[..., 3] = 1024
    np.savez(tmp_path / "counts.npz", counts=counts, steps=np.array([1, 2]))
    argv = ("simulate", config, "--system", "plain", "--trace", tmp_path / "counts.npz", "--json")
    found = json.loads(output(capsys, *argv))
    assert (found["imbalance_after"], found["rounds"]) == (4, 4)
    # Twice the tokens give twice the bytes, in the same number of rounds.
    np.save(tmp_path / "counts.npy", 2 * counts)
    twice = json.loads(output(capsys, *argv[:5], tmp_path / "counts.npy", "--json"))
    assert twice["stages"]["dispatch"]["bytes"] == 2 * found["stages"]["dispatch"]["bytes"]
    assert twice["rounds"] == 4


def test_compute_before_the_experts_grows_with_the_tokens(capsys, config):
    data = yaml.safe_load(CONFIG)
    data["model"]["pre_expert"] = "1 ms"
    Path(config).write_text(yaml.safe_dump(data))
    argv = ("simulate", config, "--system", "plain", "--json")
    once, twice = (json.loads(output(capsys, *argv, "--tokens", str(tokens))) for tokens in (512, 1024))
    assert twice["stages"]["attention"]["busy_s"] == pytest.approx(2 * once["stages"]["attention"]["busy_s"])


@pytest.mark.slow
def test_simulate_draws_what_was_before_for_systems_that_plan_from_it(capsys, config):
    found = json.loads(output(capsys, "simulate", config, "--system", "eplb", "--imbalance", "1.8", "--json"))
    assert found["imbalance_after"] < 0.85 * found["imbalance_before"]


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


OTHERS = {"plain": [1, 1], "exact:replica_slots=2": [1, 1], "hybridep": [1, 2], "hybridep+greedy": [1, 2], None: [1, 2]}


@pytest.mark.parametrize("name", OTHERS)
def test_another_system_takes_from_a_file_what_applies_to_it(capsys, config, name):
    own = CONFIG.replace("system: ultraep", "system: hybridep+ultraep")
    Path(config).write_text(own + "replica_slots: 1\nmigration: {domain_sizes: [1, 2]}\n")
    options = () if name is None else ("--system", name)
    assert json.loads(output(capsys, "simulate", config, *options, "--json"))["domain_sizes"] == OTHERS[name]


def test_the_file_of_the_page_can_be_simulated(capsys, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    # With fewer layers.
    file = page.partition("```yaml\n")[2].partition("```")[0].replace("layers: 58", "layers: 16")
    (tmp_path / "page.yaml").write_text(file.replace("layers: 4 ", "layers: 1 "))
    found = json.loads(output(capsys, "simulate", tmp_path / "page.yaml", "--json"))
    assert (found["num_ranks"], found["layers"], found["domain_sizes"]) == (128, 1, [4, 1])


SENT = {"exact": "Once", "exact+direct": "Direct", "exact:dispatch=forward": "Forward", "feplb": "TwoPhase"}
"""Dispatches of 8 experts per token on 4 ranks: the one of a layer, unless the name has another."""


def test_every_system_can_be_composed():
    cluster = Cluster((Links("node", 2, 1e9), Links("gpu", 2, 1e10)))
    model = ModelShape(2, 64, 128, 8, 2, 512)
    for name in system_names():
        assert compose(name, model, cluster, Step()).system is not None
    many = ModelShape(2, 64, 128, 32, 8, 512)
    ranks = Cluster((Links("gpu", 4, 1e10),))
    found = {name: type(compose(name, many, ranks, Step()).system.dispatch).__name__ for name in SENT}
    assert found == SENT
    chosen = compose("hybridep+exact", model, cluster, Step(), 1, Migration((2, 1)))
    assert (chosen.migration.domain_sizes, chosen.system.replica_slots) == ((2, 1), 1)


@pytest.fixture
def one_level(tmp_path):
    """A machine with few choices, and memory for some of them."""
    data = yaml.safe_load(CONFIG)
    data["cluster"] |= {"levels": [{"name": "gpu", "size": 4, "rate": "1 GB/s"}], "memory": "6.5 MB"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(data))
    return str(tmp_path / "small.yaml")


@pytest.mark.thorough
def test_advise_ranks_by_the_step(capsys, one_level, tmp_path):
    counts = skewed_counts(ModelShape(2, 64, 128, 8, 2, 512), 4, 2.0, 3)
    np.savez(tmp_path / "counts.npz", counts=counts[:, None], steps=[100, 200, 300])
    argv = ("advise", one_level, one_level, "--trace", tmp_path / "counts.npz", "--replica-slots", "1")
    found = json.loads(output(capsys, *argv, "--json"))
    assert found["workloads"] == ["step 200", "step 300"]
    ratios = [np.median(row["of_plain"]) for row in found["systems"]]
    assert ratios == sorted(ratios)
    best, plain = found["systems"][0], next(row for row in found["systems"] if row["system"] == "plain")
    assert best["system"] == found["best"]
    assert {row["choice"]["replica_slots"] for row in found["systems"]} == {0, 1}
    assert best["step_s"] == pytest.approx(np.median(best["times_s"]))
    assert best["of_plain"][1] == pytest.approx(best["times_s"][1] / plain["times_s"][1])
    text = output(capsys, *argv)
    assert f"Use {found['best']}: " in text
    assert best["usage"]["code"] in text
    assert "Workloads: step 200; step 300; layers of each: 1; imbalance without balancing " in text


@pytest.mark.thorough
def test_advise_lists_compressed_experts_apart_and_what_was_refused(capsys, one_level):
    argv = ("advise", one_level, one_level, "--imbalance", "1.0", "--replica-slots", "1", "--ratio", "4")
    found = json.loads(output(capsys, *argv, "--json"))
    assert found["fits"]
    assert {row["choice"]["ratio"] for row in found["systems"]} == {1}
    assert {row["choice"]["ratio"] for row in found["compressed"]} == {4}
    assert "gathered experts" in found["refused"]["hybridep(4) + headroom 1.25"]
    text = output(capsys, *argv)
    assert "with lossy compression of experts" in text
    assert "Refused: hybridep(4) + headroom 1.25 needs 0.0 GB of 0.0: weights" in text


def large(tmp_path, *levels):
    data = yaml.safe_load(CONFIG)
    data["cluster"]["levels"] = list(levels)
    data["model"]["experts"] = math.prod(level["size"] for level in levels)
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "large.yaml"


@pytest.mark.slow
def test_advise_takes_more_ranks_than_counts_can_have(capsys, tmp_path):
    path = large(tmp_path, {"name": "gpu", "size": 8000, "rate": "50 GB/s"})
    text = output(capsys, "advise", path, path)
    assert "Assumed: uniform routing, because 8000 ranks exceed 256" in text
    # No text of a system expresses the recommended expert domains.
    assert "Use hybridep(" in text
    assert "jax-moe-lb tune" not in text


@pytest.mark.thorough
def test_advise_plans_for_a_sample_of_many_datacenters(capsys, tmp_path, monkeypatch):
    levels = {"name": "dc", "size": 1000, "rate": "1 GB/s"}, {"name": "gpu", "size": 2, "rate": "50 GB/s"}
    path = large(tmp_path, *levels)
    # Few ranks, as runtime type checks are slow.
    module = importlib.import_module("jax_moe_lb.cli.advise")
    monkeypatch.setattr(module, "sample_of", lambda cluster: sample_of(cluster, 4))
    monkeypatch.setattr(module, "DRAWS", 1)
    text = output(capsys, "advise", path, path, "--replica-slots", "1")
    assert "Planned for a sample: 2 of the 1000 members of level dc" in text
    assert "Time of one layer over plain's, by system: " in text
    assert "exact" in text


def test_large_simulations_say_what_they_need(capsys):
    note(forecast(plans=1, layers=1, num_ranks=128, num_experts=256))
    assert capsys.readouterr().err == ""
    note(forecast(plans=8, layers=8, num_ranks=4096, num_experts=4096))
    needs = "8 plans take about 23 min, and counts and exchanges take 2.1 GB"
    assert capsys.readouterr().err == f"note: 4096 ranks and 4096 experts: {needs}\n"


@pytest.mark.slow
def test_calibrate_writes_what_simulate_reads(capsys, tmp_path, monkeypatch):
    # Small sizes, as the test checks the file format only.
    from jax_moe_lb.sim import machine_profile as measured
    from jax_moe_lb.sim import measure as calibrate

    for name, value in {"HIDDEN": 16, "INNER": 32, "ROWS": (4, 16), "MANY_ROWS": 64, "REPEATS": 1}.items():
        monkeypatch.setattr(calibrate, name, value)
    # A small measurement differs from every preset, which gives a warning.
    monkeypatch.setattr(measured, "warnings", lambda found: ["it is small"])
    assert main(["calibrate", str(tmp_path / "machine.yaml")]) == 0
    captured = capsys.readouterr()
    assert captured.err == "note: it is small\n"
    assert "# Warning: it is small." in captured.out
    monkeypatch.setattr(measured, "warnings", lambda found: [])
    found = json.loads(output(capsys, "calibrate", tmp_path / "machine.yaml", "--json"))
    assert found["ranks"] == 2
    assert [level["level"] for level in found["exchanges"]] == ["gpu"]
    config = load_config("CONFIG", str(tmp_path / "machine.yaml"))
    cluster = config.cluster.build()
    assert cluster.levels[0].bytes_per_s == pytest.approx(found["exchanges"][0]["bytes_per_s"], rel=1e-3)
    assert cluster.gemm.rows == (4.0, 16.0)
    assert json.loads(output(capsys, "simulate", tmp_path / "machine.yaml", "--json"))["step_s"] > 0


REFUSED = [
    (("--system", ""), "--system is ''; expected one of eplb"),
    (("--system", "ultra"), "--system is 'ultra'; expected one of eplb"),
    (("--system", "plain", "--replica-slots", "2"), "--replica-slots is 2; expected none, as plain"),
    (("--replica-slots", "two"), "--replica-slots is 'two'"),
    (("--replica-slots", "7"), "--replica-slots is 7; expected at most 6, the experts"),
    (("--domain-sizes", "1,2"), "--domain-sizes is (1, 2) for system 'ultraep'"),
    (("--system", "hybridep", "--domain-sizes", "2"), "--domain-sizes is (2,)"),
    (("--system", "hybridep", "--domain-sizes", "3,1"), "--domain-sizes is (3, 1)"),
    (("--imbalance", "0.5"), "--imbalance is '0.5'; expected a number, at least 1"),
    (("--imbalance", "99"), "--imbalance is 99.0; expected at most"),
    (("--trace", "none.npy", "--imbalance", "2"), "--imbalance is '2'; expected none beside --trace"),
    (("--trace", "none.npy", "--tokens", "9"), "--tokens is '9'; expected none beside --trace"),
    (("--png", "x.docx"), "--png is x.docx: Format 'docx' is not supported"),
    (("--trace", "none.npy"), "--trace is none.npy: No such file"),
    (("--timeline", "no/such/t.json"), "--timeline is no/such/t.json: No such file or directory"),
]


def test_a_picture_without_its_package_is_refused_before_the_simulation(capsys, monkeypatch):
    monkeypatch.setattr("jax_moe_lb.cli.simulate.find_spec", lambda name: None)
    message = "--png requires matplotlib; run pip install matplotlib"
    assert refusal(capsys, "simulate", "zz", "--png", "x.png") == f"error: {message}\n"


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_options(capsys, config, argv, message):
    assert message in refusal(capsys, "simulate", config, *argv)


def test_a_step_in_the_file_of_the_model_is_noted(capsys, config, tmp_path):
    model = tmp_path / "model.yaml"
    model.write_text(CONFIG + "step: {backward: false}\n")
    assert main(["advise", str(model), config, "--trace", "none.npy"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    expected = f"routing and step not used; advise reads routing and step of CLUSTER {config}"
    assert first == f"note: MODEL {model}: {expected}"
    assert last.startswith("error: --trace is none.npy")


BOTH = "advise config.yaml config.yaml"
FILES = {
    "simulate h100": "near ones are h100_node, ",
    "simulate none.yaml": "No such file",
    "simulate many.yaml": "replica_slots is 100; expected at most 6",
    "simulate cluster.yaml": "has no model",
    "simulate deepseek_v3": "deepseek_v3 has no cluster; expected a .yaml file with it, or one of the presets cpu",
    "simulate config.yaml --trace others.npy": "has 4 ranks and 16 experts; expected the cluster's 4 ranks and the "
    "model's 8 experts",
    f"{BOTH} --trace flat.npy": "counts has shape (4,)",
    f"{BOTH} --replica-slots 7": "--replica-slots is 7; expected at most 6, the experts without a home on the rank",
    f"{BOTH} --ratio 0.5": "--ratio is '0.5'; expected a number, at least 1",
    f"{BOTH} --trace flat.npy --tokens 9": "--tokens is '9'; expected none beside --trace",
    "advise zz config.yaml": "MODEL is 'zz'",
    # Before a search of minutes, or the first input.
    "advise zz zz --out no/layer.py": "--out is no/layer.py: No such file or directory; expected a",
    "simulate zz --png .": "--png is .: Is a directory; expected a writable file",
    "advise nvl72 mixtral_8x7b": "CLUSTER mixtral_8x7b has no cluster; expected a .yaml file with it, or one of",
    "calibrate .": "OUT is",
    "calibrate out.yaml --ranks 1": "--ranks is '1'; expected an integer, from 2 to 256",
}
JOINS = ("--coordinator h:1", "--processes 2", "--coordinator h:1 --processes 2 --process 3")
FILES |= {f"calibrate out.yaml {words}": "must be given together, with I at most N" for words in JOINS}


@pytest.mark.parametrize("words", FILES)
def test_bad_files(capsys, config, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.yaml").write_text(CONFIG + "replica_slots: 100\n")
    (tmp_path / "cluster.yaml").write_text(re.sub("(?m)^model: .*$", "", CONFIG))
    np.save(tmp_path / "others.npy", np.ones((4, 16), int))
    np.save(tmp_path / "flat.npy", np.ones(4, int))
    assert FILES[words] in refusal(capsys, *words.split())
