import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from jax_moe_lb import router_loss
from models import config as presets
from models.config import DataConfig, ParallelConfig
from models.data.corpus import Corpus
from models.data.marks import CONTEXT
from models.mesh import make_mesh, place_batch
from models.run_folder.checkpoints import Checkpoints
from models.run_folder.metrics import RunFolder, router_losses
from models.train import app
from models.training.loop import _finish, _validation, prepare
from models.training.optimizer import learning_rate, make_schedule
from tests.models.reference_loss import next_token_loss
from tests.models.small import CONFIG, CORPUS, filled, losses, programs

pytestmark = pytest.mark.slow


def last_state(folder):
    with Checkpoints(RunFolder(folder).checkpoints) as checkpoints:
        return checkpoints.newest_step, checkpoints.restore(checkpoints.newest_step, programs(CONFIG).state_shapes)


def test_loss_decreases(trained_run):
    train, summary = losses(trained_run), json.loads(RunFolder(trained_run).summary.read_text())
    assert np.mean(train[-2:]) < np.mean(train[:2]) - 1
    assert summary["validation_loss_nats"] < np.log(256) - 1


def test_what_a_step_records(trained_run):
    rows = RunFolder(trained_run).rows("step")
    assert [row["step"] for row in rows] == list(range(1, CONFIG.steps + 1))
    for row in rows:
        assert 1 <= row["imbalance_after_mean"] <= row["imbalance_after_max"] <= row["imbalance_before_max"]
        assert row["overload_factor_mean"] == row["imbalance_after_mean"]
        assert 0 <= row["max_violation_mean"] <= row["max_violation_max"] < CONFIG.model.num_experts
        assert 0 <= row["straggler_after"] <= row["straggler_before"]
        assert row["rounds_max"] >= 1
        assert row["rows_moved"] > 0
        assert row["tokens_per_s"] == pytest.approx(CONFIG.tokens_per_step / row["step_time_s"])
    assert [row["step"] for row in RunFolder(trained_run).rows("validation")] == [4, 8]


def test_a_step_records_gradient_rate_and_place_in_the_data(trained_run):
    rows = RunFolder(trained_run).rows("step")
    config, length = CONFIG, CONFIG.batch.sequence_length
    # No array has the rates of all steps.
    assert learning_rate(dataclasses.replace(config, steps=10**10))(1) > 0
    schedule = make_schedule(config)
    for step, row in enumerate(rows, 1):
        assert row["learning_rate"] == pytest.approx(float(schedule(step - 1)))
        assert row["tokens_seen"] == step * config.batch.size * length
        # A part of the text is held out.
        assert row["epoch"] == pytest.approx(row["tokens_seen"] / length / CORPUS.num_sequences(length))
        assert 0 < row["gradient_norm"] < 100
        assert row["router_loss"] == row["aux_loss"] == row["z_loss"] == 0
    assert CORPUS.num_sequences(length) == (CORPUS.length(held_out=False) - 1) // length


def test_the_recorded_norm_is_that_of_the_gradients():
    parallel = ParallelConfig(1, 2, "plain", headroom=2.0, max_rounds=1)
    model = dataclasses.replace(CONFIG.model, num_layers=1, aux_loss=0.1, z_loss=0.01)
    config = dataclasses.replace(CONFIG, model=model, parallel=parallel)
    made = programs(config)
    state = filled(made.state_shapes)
    batch = CORPUS.batch(0, 1, config.batch.size, config.batch.sequence_length)
    # Two documents begin in each row; their first tokens are not predicted.
    batch[:, [3, 9]] = ~batch[:, [3, 9]]
    tokens = place_batch(batch, make_mesh(parallel))

    @jax.jit
    def gradients(state):
        def loss(model):
            loss, (_, stats) = next_token_loss(model, tokens)
            return loss + router_loss(stats), loss

        return nnx.grad(loss, has_aux=True)(made.model(state))

    found, plain_loss = gradients(state)
    squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(found)]
    _, loss, norm, stats = made.step(state, tokens)
    # The reported loss has no router losses.
    assert float(loss) == pytest.approx(float(plain_loss), rel=1e-6)
    np.testing.assert_allclose(norm, np.sqrt(sum(squares)), rtol=1e-5)
    row = router_losses(stats)
    assert row["router_loss"] == pytest.approx(float(router_loss(stats)))
    assert row["aux_loss"] + row["z_loss"] == pytest.approx(row["router_loss"])
    # If experts are used evenly, the loss is its coefficient.
    assert 0.09 < row["aux_loss"] < 0.15
    assert row["z_loss"] == float(np.asarray(stats.z_loss).mean()) > 0.05


def test_validation_weighs_batches_by_their_predicted_tokens():
    batches = [np.array([[1, 2, 3]] * 8, np.int32), np.array([[1, 2 + CONTEXT, 3]] * 8, np.int32)]
    corpus = SimpleNamespace(validation_batches=lambda *sizes: batches)
    made = SimpleNamespace(evaluate=lambda losses, batch: next(losses))
    given = SimpleNamespace(config=CONFIG, corpus=corpus, programs=made, mesh=make_mesh(ParallelConfig()))
    assert _validation(given)(iter([1.0, 4.0])) == pytest.approx(2.0)


def test_epochs_give_the_steps(command_line, monkeypatch):
    made = []
    monkeypatch.setattr("models.train.prepare", lambda config, *_, **__: made.append(config.steps) or refuse())
    sequences = CORPUS.num_sequences(CONFIG.batch.sequence_length)
    for epochs in (0.001, 1, 2.5):
        command_line("--epochs", str(epochs))
    assert made == [math.ceil(epochs * sequences / CONFIG.batch.size) for epochs in (0.001, 1, 2.5)]
    assert "epochs is 2.0 and steps is 3; expected one" in command_line("--epochs", "2", "--steps", "3").output
    assert "epochs is 0.0; expected a finite number above 0" in command_line("--epochs", "0").output


def test_a_finished_run_without_metrics_has_no_summary(tmp_path):
    lines = []
    assert _finish(SimpleNamespace(folder=RunFolder(tmp_path)), {}, lines.append) == {}
    assert lines == ["the run folder has no metrics of steps; summary.json and report.html are not written"]


def refuse():
    raise ValueError("prepared")


def test_counts(trained_run):
    with np.load(RunFolder(trained_run).counts) as arrays:
        model, counts = CONFIG.model, arrays["counts"]
        assert counts.dtype == np.int32
        assert counts.shape == (CONFIG.steps, model.num_layers, CONFIG.parallel.expert_parallel, model.num_experts)
        np.testing.assert_array_equal(arrays["steps"], np.arange(1, CONFIG.steps + 1))
        assert (counts.sum((2, 3)) == CONFIG.tokens_per_step * model.experts_per_token).all()
        home = counts.sum(2).reshape(*counts.shape[:3], -1).sum(3)
        np.testing.assert_array_equal(arrays["load_before"], home)
        np.testing.assert_array_equal(arrays["load_after"].sum(2), home.sum(2))
        np.testing.assert_array_equal(arrays["load_after"], arrays["quota"].sum(2))
        np.testing.assert_array_equal(arrays["quota"].sum(3), counts.sum(2))


def test_resumed_run_equals_straight_one(trained_run, tmp_path, monkeypatch):
    """A run killed some steps after its first checkpoint continues from the checkpoint."""
    killed = tmp_path / "killed"
    shutil.copytree(trained_run, killed)
    shutil.rmtree(RunFolder(killed).checkpoints / str(CONFIG.steps))
    monkeypatch.setitem(presets.PRESETS, "tiny", CONFIG)
    monkeypatch.setattr("models.train.default_corpus", lambda max_bytes: CORPUS)
    result = CliRunner().invoke(app, ["tiny", "--resume", "--run-dir", str(killed)])
    assert result.exit_code == 0, result.output
    assert "byte-unigram entropy of the validation text" in result.output
    np.testing.assert_allclose(losses(killed), losses(trained_run), rtol=1e-6)
    (step, state), (_, want) = last_state(killed), last_state(trained_run)
    assert step == CONFIG.steps
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state, want)
    with np.load(RunFolder(killed).counts) as got, np.load(RunFolder(trained_run).counts) as expected:
        np.testing.assert_array_equal(got["counts"], expected["counts"])


def test_checkpoint_holds_no_replica(trained_run):
    """Each expert weight exists once, for the parameter and for each of Adam's moments."""
    _, state = last_state(trained_run)
    model = CONFIG.model
    experts = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    assert len(experts) == 3 * 3
    assert {leaf.shape for leaf in experts} == {(model.num_layers, model.num_experts, model.embed_dim, model.mlp_dim)}
    assert all(leaf.sharding.spec[1] == ("expert", "data") for leaf in experts)


def test_resume_refuses_what_would_not_continue(trained_run):
    for change, message in [
        ({"batch": dataclasses.replace(CONFIG.batch, size=24)}, "batch.size is 24; expected 16"),
        ({"model": dataclasses.replace(CONFIG.model, mlp_dim=32)}, "model.mlp_dim is 32; expected 16"),
        ({"data": DataConfig(within_documents=False)}, "data.within_documents is False; expected True"),
        ({"steps": 7}, "steps is 7; expected at least 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(dataclasses.replace(CONFIG, **change), CORPUS, trained_run, resume=True)
    with pytest.raises(ValueError, match="data is '"):
        prepare(CONFIG, Corpus.of_text(b"another text " * 200, ""), trained_run, resume=True)
