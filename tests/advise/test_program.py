"""The printed program makes the simulated layer, and runs as pasted."""

import ast
import builtins
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

import jax_moe_lb
from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.program import WRITTEN, program
from jax_moe_lb.advise.search import Space
from jax_moe_lb.cli.app import app
from jax_moe_lb.nn import GradientResidual
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, Migration, ModelShape
from tests.marks import parametrize

MODEL = ModelShape(1, 256, 512, 8, 2, 2048, shared_inner=128)
LEVELS = Links("node", 2, 5e9, links=2, latency_s=1e-5), Links("gpu", 2, 50e9)
CLUSTER = Cluster(LEVELS, AnalyticGemm(1e12, 8.0, 0.0), planner_s=1e-5)
DENSE = replace(MODEL, experts=4, gated=False, shared_inner=0, itemsize=4)

CASES = {
    "exact": (Choice("exact", 2), MODEL, {}),
    "expert domains": (Choice("greedy", 1, domain_sizes=(2, 1)), MODEL, {"dispatch": "Once"}),
    "gathered again": (Choice(domain_sizes=(1, 2), ratio=2.0), MODEL, {"gather_again": True}),
    "all parts": (Choice("exact", 1, 0.05, True, True, True, headroom=1.25), MODEL, {}),
    "two tiers": (Choice("exact", 2, relayed=True, relocated=True), DENSE, {}),
    "history": (Choice("eplb", 1), DENSE, {"dispatch": "Forward"}),
}


def run(code, monkeypatch):
    """Run a program in this process, which has its devices already; return its variables."""
    monkeypatch.setattr(jax_moe_lb, "use_virtual_cpu_devices", lambda num_devices: None)
    found = {}
    exec(compile(code, "layer.py", "exec"), found)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the system cannot balance")
@parametrize("case", ["expert domains"], CASES)
def test_the_program_makes_the_layer_that_was_simulated(case, monkeypatch, capsys):
    choice, model, options = CASES[case]
    found = run(program(choice, model, CLUSTER, **options), monkeypatch)
    assert capsys.readouterr().out.startswith("imbalance [")
    layer, migration = found["layer"], Migration(choice.domain_sizes)
    topology = CLUSTER.topology(migration.group_sizes(CLUSTER))
    system = choice.build_system().by_rule(topology, model.experts, model.per_token)
    if "dispatch" in options:
        assert type(layer.system.dispatch).__name__ == options["dispatch"]
    else:
        assert replace(layer.system, migrate=None) == system
    for name in ("balancer", "replicate", "replica_slots", "relocates"):
        assert getattr(layer.system, name) == getattr(system, name)
    if choice.domain_sizes:
        assert layer.system.migrate.domains.domain_size == 2
        assert layer.system.migrate.codec.ratio == choice.ratio
    # The rates and domains of the machine, along the axes of the mesh.
    for name in ("levels", "ranks_per_domain", "rails_per_node", "flops_per_s"):
        assert getattr(found["topology"], name) == getattr(CLUSTER.topology(), name)
    assert (layer.up.shape[0], layer.gate is None) == (model.experts, not model.gated)
    assert (layer.shared_expert is None) == (model.shared_inner == 0)
    trained = nnx.DiffState(0, nnx.Any(nnx.Param, GradientResidual))
    loss = lambda layer: jnp.square(found["forward"](layer, found["x"])[0]).mean()  # noqa: E731
    gradients = nnx.grad(loss, argnums=trained)(layer)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradients))
    assert float(jnp.abs(gradients["up"].get_value()).max()) > 0


def undefined(code):
    """Return the names that a program reads and neither defines nor imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    known |= {name.arg for node in nodes if isinstance(node, ast.arguments) for name in node.args}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    imported = [name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in node.names]
    known |= {(name.asname or name.name).partition(".")[0] for name in imported}
    return {node.id for node in names} - known


@pytest.mark.slow
def test_every_program_defines_its_names_and_is_narrow():
    for choice in Space(CLUSTER, 2).every():
        for dispatch in ("Direct", "Once"):
            if dispatch == "Once" and choice.sprayed:
                continue
            code = program(choice, MODEL, CLUSTER, bool(choice.domain_sizes), dispatch)
            assert not undefined(code), choice.name
            assert code.startswith(f"{WRITTEN}: {choice.name} on 4 accelerators.\n")
            assert max(map(len, code.splitlines()[1:])) <= 110, choice.name


@pytest.mark.thorough
def test_a_program_runs_as_pasted(tmp_path):
    """As in `ci/advice.sh`: in an empty folder and a process with one CPU device."""
    code = program(Choice("exact", 2), MODEL, CLUSTER)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("imbalance [")


def advise(folder, *arguments):
    """Advise two ranks by workloads of one layer, which are few simulations."""
    cluster = folder / "cluster.yaml"
    cluster.write_text("version: 1\ncluster: cpu_2_cores\nrouting: {layers: 1, imbalance: 1.5}\n")
    argv = ["advise", "cpu_2_cores", str(cluster), "--replica-slots", "1", "--out", str(folder / "layer.py")]
    done = CliRunner().invoke(app, [*argv, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout, (folder / "layer.py").read_text()


@pytest.mark.slow
def test_advise_prints_one_program_and_writes_it(tmp_path):
    said, code = advise(tmp_path)
    assert not undefined(code)
    assert said.count(WRITTEN) == 1
    assert code in said
    lines = said.splitlines()
    assert "Best: exact(slots 1) + relocation + headroom 1.25." in lines
    reason = r"Not exact\(slots 2\), the default: one layer takes 1\.\d{3} x the time of exact\(slots 1\) .*"
    assert any(re.fullmatch(reason, line) for line in lines)


@pytest.mark.thorough
def test_the_program_is_the_same_in_json_and_replaces_an_earlier_one(tmp_path):
    (tmp_path / "layer.py").write_text(f"{WRITTEN}: plain on 8 accelerators.\n")
    said, code = advise(tmp_path, "--json")
    found = json.loads(said)
    programs = {row["system"]: row["usage"]["code"] for row in found["systems"]}
    assert code == programs["plain" if found["leave_off"] else found["best"]]
    assert all(not undefined(code) for code in programs.values())
