"""Messages of a run, and reasons to end it: straggler hosts, and values that are not finite."""

import dataclasses
import importlib.util
import io
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from models.config import ValidationConfig
from models.console import UserError
from models.multi_process.stragglers import straggler_hosts
from models.run_folder.checkpoints import steps_in
from models.run_folder.metrics import RunFolder
from models.run_folder.trackers import MetricLogger, MetricLoggerConfig, StepLine, scalars
from models.training.faults import check_state, check_step
from models.training.loop import execute, prepare
from tests.models.small import CONFIG, CORPUS


def test_hosts_that_take_longer_than_the_median_are_slow():
    assert straggler_hosts(np.array([1.0, 1.1, 1.0, 2.0]), 0.1) == [3]
    assert straggler_hosts(np.array([1.0, 2.0]), 0.1) == [1]
    assert straggler_hosts(np.array([1.0, 2.0]), 1.5) == []
    assert straggler_hosts(np.array([1.0, 1.4, 1.2]), 0.0) == []


def test_numbers_of_lines_have_names():
    row = {"kind": "layers", "step": 3, "rounds": [1, 2], "planner_s": 0.5, "homes": [[0, 1]], "word": "x"}
    assert scalars(row) == {"layers/rounds/1": 1.0, "layers/rounds/2": 2.0, "layers/planner_s": 0.5}
    assert scalars({"kind": "hosts", "step": 3, "host_s": [0.25]}) == {"hosts/host_s/0": 0.25}


ROW = {"loss": 1.2345, "tokens_per_s": 123456, "imbalance_before_mean": 1.5, "imbalance_after_mean": 1.0}
ROW |= {"rounds_max": 1, "learning_rate": 1e-3, "gradient_norm": 0.5, "epoch": 0.25}


def shown(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80, color_system=None)
    with StepLine(console, 0, 100_000) as line:
        # Rich estimates the remaining time from two steps.
        for step in (12_339, 12_340, 12_341):
            line.show(ROW | {"step": step})
            line.progress.refresh()
    return console.file.getvalue().splitlines()


def test_a_progress_line_keeps_step_and_remaining_time_in_80_columns():
    lines = [line for line in shown(True) if "12341/100000" in line]
    assert lines
    # The control sequence clears the line before.
    assert all(len(line.removeprefix("\x1b[2K")) <= 80 for line in lines)
    assert re.search(r"step +12341/100000 .* \d+:\d\d:\d\d loss 1\.23", lines[-1])


def test_every_tenth_step_is_a_line_without_a_terminal():
    (line,) = shown(False)
    assert line.startswith("step 12340 of 100000  lr 1.0e-03  gradient norm 0.50  epoch 0.25  loss 1.23")


def test_what_is_not_installed_or_no_number_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="profile is -1; expected a number of steps, at least 0"):
        MetricLoggerConfig(profile=-1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"wandb is not installed; expected pip install '.\[wandb\]'"):
        MetricLoggerConfig(wandb="project")


def test_a_short_run_is_traced(tmp_path):
    cases = {(1, 2): [3, 4], (1, 99): [*range(1, 9)], (8, 1): [8], (9, 1): [], (1, 0): []}
    for (first_step, profile), traced in cases.items():
        options = MetricLoggerConfig(profile=profile)
        assert list(MetricLogger(RunFolder(tmp_path), options, first_step, CONFIG, writes=False).traced) == traced


def test_a_loss_that_is_not_finite_ends_the_run():
    fine = SimpleNamespace(fault=SimpleNamespace(code=np.zeros((2, 1), np.int32)))
    check_step(3, 1.0, fine, None)
    with pytest.raises(UserError, match=r"step 3: loss is nan, .*; --resume continues from the checkpoint of step 2"):
        check_step(3, float("nan"), fine, 2)


def test_no_checkpoint_is_made_of_what_is_not_finite():
    leaves = {"a": jnp.ones(3), "b": jnp.array([1.0, jnp.inf]), "n": jnp.arange(2)}
    state = nnx.State({name: nnx.Param(leaf) for name, leaf in leaves.items()})
    with pytest.raises(UserError, match=r"step 3: b is not finite, so no checkpoint is written; there is no"):
        check_state(3, state, None)


@pytest.mark.thorough
def test_a_run_is_watched_and_ends_with_a_nan(tmp_path, monkeypatch):
    """The loss of step 5 is finite, but its parameters are not, which the routers of step 6 detect."""
    folder = RunFolder(tmp_path)
    run = prepare(dataclasses.replace(CONFIG, validation=ValidationConfig(2, 1)), CORPUS, tmp_path)

    def nan(leaf):
        return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def broken(state, tokens):
        state, loss, norm, stats = program(state, tokens)
        steps.append(loss)
        return (jax.tree.map(nan, state) if len(steps) == 5 else state), loss, norm, stats

    steps, program = [], run.step.lower().compile()
    monkeypatch.setattr("models.training.loop._compiled", lambda run: (broken, 0.0))
    with pytest.raises(UserError) as refused:
        execute(run, Console(quiet=True), watching=MetricLoggerConfig(tensorboard=True, profile=1))
    assert re.match(
        r"step 6, layer 1: router logits of rank 0 give weights that are not finite; expected finite logits; "
        r"--resume continues from the checkpoint of step 4",
        str(refused.value),
    )
    assert steps_in(folder.checkpoints) == [4]
    assert [row["step"] for row in folder.rows("step")] == [1, 2, 3, 4, 5]

    layers = folder.rows("layers")
    assert [row["step"] for row in layers] == [2, 4]
    assert len(layers[0]["imbalance_before"]) == CONFIG.model.num_layers
    assert len(layers[0]["max_violation"]) == CONFIG.model.num_layers
    assert layers[0]["planner_s"] > 0
    assert list(folder.tensorboard.glob("events.out.tfevents.*"))
    traces = [path.name for path in folder.profile.rglob("*") if path.is_file()]
    assert "perfetto_trace.json.gz" in traces
    assert any(name.endswith(".xplane.pb") for name in traces)
    assert json.loads(folder.metrics.read_text().splitlines()[0])["kind"] == "layout"
