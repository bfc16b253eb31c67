"""Tuning of checkpoints with the trainer of `models.train`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jax_moe_lb.core import FileLimits
from models import train
from models.architectures.registry import ARCHITECTURES
from models.config import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from models.data.marks import segments
from models.data.sources import corpus_from
from models.data.tokenizers import TokenizerFile
from models.mesh import make_mesh
from models.pretrained.loading import from_pretrained
from models.run_folder.metrics import RunFolder
from models.tiny_checkpoint import tiny_config, write_tiny
from models.training.source import source_of
from tests.models.processes import end, free_port, start
from tests.models.reference_loss import next_token_loss
from tests.models.small import ONE_ROUND, losses, sets

TEXT = "the quick brown fox jumps over the lazy dog. "
SMALL = ["--system", ONE_ROUND, *sets("batch.sequence_length=16", "validation.interval=2", "validation.batches=1")]
SMALL += sets("optimizer.learning_rate=1e-2", "optimizer.schedule=constant", "optimizer.warmup_steps=0")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Return a checkpoint with one layer, and text to tune it on."""
    for name, value in {"num_local_experts": 4, "num_hidden_layers": 1, "hidden_size": 32}.items():
        monkeypatch.setitem(ARCHITECTURES["mixtral"].tiny, name, value)
    write_tiny("mixtral", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 0}')
    (tmp_path / "text").write_text(TEXT * 100)
    (tmp_path / "held_out").write_text(TEXT * 10)
    return tmp_path / "base"


def tuned(checkpoint, name, *options):
    """Run the command line; return the run folder and its output."""
    folder = checkpoint.parent / name
    arguments = [checkpoint, "--data", checkpoint.parent / "text", "--run-dir", folder, *SMALL, *options]
    result = CliRunner().invoke(train.app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return RunFolder(folder), result.output


def held_out(checkpoint):
    return sets(f"data.validation={checkpoint.parent / 'held_out'}", "batch.accumulate=2")


@pytest.mark.slow
def test_a_run_writes_a_checkpoint(checkpoint):
    run, output = tuned(checkpoint, "run", "--mesh", "data=2,expert=2", "--steps", 6, *held_out(checkpoint))
    assert losses(run)[-1] < losses(run)[0] - 1
    assert "data: 4,501 + 451 tokens" in output
    before, after = load_file(checkpoint / "model.safetensors"), load_file(run.model / "model.safetensors")
    assert before.keys() == after.keys()
    assert not [name for name, value in before.items() if np.array_equal(value, after[name])]
    for file in ("tokenizer.json", "generation_config.json"):
        assert (run.model / file).read_bytes() == (checkpoint / file).read_bytes()
    assert json.loads((run.path / "config.json").read_text())["config"]["model"]["num_experts"] == 4


KINDS = {
    "qwen3_next": {"num_experts": 4, "num_hidden_layers": 2, "full_attention_interval": 2},
    "glm_moe_dsa": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2, "index_topk": 4},
}
"""Fields of tiny models with delta networks and with sparse attention."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_delta_networks_and_sparse_attention_are_trained(name, checkpoint, monkeypatch):
    """Every parameter moves, besides those of indexers, which have no gradient."""
    for field, value in ({"hidden_size": 32} | KINDS[name]).items():
        monkeypatch.setitem(ARCHITECTURES[name].tiny, field, value)
    base = checkpoint.parent / name
    write_tiny(name, base)
    run, _ = tuned(base, "run", "--mesh", "data=2,expert=2", "--steps", 6)
    assert losses(run)[-1] < losses(run)[0] - 1
    assert np.isfinite([row["gradient_norm"] for row in run.rows("step")]).all()
    before, after = load_file(base / "model.safetensors"), load_file(run.model / "model.safetensors")
    same = {tensor for tensor, value in before.items() if np.array_equal(value, after[tensor])}
    assert same == {tensor for tensor in before if ".indexer." in tensor or "e_score_correction_bias" in tensor}


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 2], ids=["all parameters", "adapters"])
def test_a_run_with_a_pipeline_goes_on_without_one(checkpoint, rank, monkeypatch):
    """With accumulation; the pipeline has two blocks a stage, so that its layers are stored in another order."""
    monkeypatch.setitem(ARCHITECTURES["mixtral"].tiny, "num_hidden_layers", 4)
    write_tiny("mixtral", checkpoint.parent / "four")
    four, options = checkpoint.parent / "four", [*held_out(checkpoint), "--set", f"lora.rank={rank}"]
    straight, _ = tuned(four, "straight", "--mesh", "data=2,expert=2", "--steps", 6, *options)
    stages = ["--mesh", "data=1,expert=2,stage=2", "--set", "parallel.repeats=2"]
    resumed, output = tuned(four, "resumed", *stages, "--steps", 3, *options)
    assert "plain on 1 x 2 x 2 cpu devices" in output
    assert np.load(resumed.counts)["counts"].shape == (12, 4, 2, 4)
    _, output = tuned(four, "resumed", "--mesh", "data=2,expert=2,stage=1", "--steps", 6, *options, "--resume")
    assert "resuming from step 3" in output
    np.testing.assert_allclose(losses(resumed), losses(straight), rtol=1e-4)


@pytest.mark.thorough
def test_adapters_alone_are_trained_and_merged(checkpoint):
    """The saved checkpoint has the validation loss of the last step."""
    options = ["--mesh", "data=2,expert=2", "--steps", 6, *held_out(checkpoint)]
    options += sets("lora.rank=2", "optimizer.state_dtype=bfloat16")
    folder, _ = tuned(checkpoint, "run", *options)
    assert losses(folder)[-1] < losses(folder)[0]
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, folder.model))
    changed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {name for name in before if "proj" in name or "experts" in name}
    for name in changed:
        assert np.linalg.matrix_rank(after[name] - before[name], tol=1e-4) <= 2, name
    corpus = corpus_from([checkpoint.parent / "held_out"], TokenizerFile(checkpoint / "tokenizer.json", end=0))
    (batch,) = corpus.validated_by(corpus).validation_batches(1, 8, 16)
    model = from_pretrained(folder.model, make_mesh(ParallelConfig(1, 4)))
    loss = jax.jit(lambda tokens: next_token_loss(model, tokens)[0])(jnp.asarray(batch))
    assert float(loss) == pytest.approx(folder.rows("validation")[-1]["loss"], abs=1e-4)


def test_the_given_tokenizer_reads_conversations(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = (checkpoint / "tokenizer.json").rename(checkpoint.parent / "other.json")
    config = TrainConfig(model=ModelConfig(checkpoint=str(checkpoint)), data=DataConfig(tokenizer=str(other)))
    words, chat = train._tokenizer(config, {}, FileLimits())
    assert chat.prompt([{"role": "user", "content": "abc"}]) == words.tokens(b"abc")[:3].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "model.num_layers=2"], "model.num_layers is 2; expected none with a checkpoint"),
        (["--set", "model.checkpoint=other"], "model.checkpoint is 'other'; expected none beside CONFIG '"),
        (["--set", "relocation.interval=2"], "relocation.interval is 2; expected none with a checkpoint"),
        (["--set", "model.bias_rate=0.1"], "model.bias_rate is 0.1; expected 0, as the model has no routing biases"),
        (["--set", "model.further_weight=0.1"], "predict_further is True; expected False"),
        (["--set", "data.now=noon"], "data.now is 'noon'; expected a time such as 2026-11-28T12:00:00"),
        (["--set", "model.param_dtype=int8"], "model.param_dtype is 'int8'; expected one of float32, bfloat16"),
        (["--set", "optimizer.name=lion"], "optimizer.name is 'lion'; expected one of adamw, muon, adafactor, sgd"),
        ([], "data is required: the tokens are not bytes"),
    ],
)
def test_bad_options_are_refused(checkpoint, options, message):
    result = CliRunner().invoke(train.app, [str(checkpoint), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}"), result.stderr


def test_sampled_routing_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(tiny_config("phimoe"))
    with pytest.raises(ValueError, match="model_type is 'phimoe'; expected another one, as its training samples"):
        source_of(ModelConfig(checkpoint=str(tmp_path)))


def test_dropout_of_a_checkpoint_is_named(tmp_path):
    fields = json.loads(tiny_config("granitemoe")) | {"attention_dropout": 0.1, "hidden_dropout": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    source = source_of(ModelConfig(checkpoint=str(tmp_path)))
    assert source.noise == ["config.json: attention_dropout is 0.1; training has none"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "model"], ids=["into", "over"])
def test_a_run_is_not_written_into_its_checkpoint(checkpoint, name):
    if name:
        (checkpoint.parent / "run").mkdir()
        checkpoint = checkpoint.rename(checkpoint.parent / "run" / name)
    run = checkpoint.parent if name else checkpoint
    arguments = [checkpoint, "--data", run.parent / "text", "--run-dir", run, "--overwrite", *SMALL]
    before = sorted(run.rglob("*"))
    result = CliRunner().invoke(train.app, [*map(str, arguments), "--mesh", "expert=4"])
    assert (result.exit_code, sorted(run.rglob("*"))) == (2, before)
    where = f"--run-dir is {run}; expected another path than CONFIG {checkpoint}"
    inside = f"run_dir is '{run}'; expected another folder than that of the checkpoint '{checkpoint}'"
    assert (inside if name else where) in result.stderr


@pytest.mark.thorough
def test_a_resumed_run_renders_the_time_of_its_start(checkpoint, monkeypatch):
    (checkpoint / "chat_template.jinja").write_text(
        "{{ strftime_now('%f %S') }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    talk = {"messages": [{"role": role, "content": "abcd"} for role in ("user", "assistant")]}
    (checkpoint.parent / "text.jsonl").write_text((json.dumps(talk) + "\n") * 400)
    options = ["--mesh", "data=2,expert=2", "--data", checkpoint.parent / "text.jsonl"]
    options += sets("batch.sequence_length=24")
    read = []
    monkeypatch.setattr(train, "corpus_from", lambda *given, **how: read.append(corpus_from(*given, **how)) or read[-1])
    begun, _ = tuned(checkpoint, "run", *options, "--steps", 1)
    now = begun.described()["config"]["data"]["now"]
    resumed, _ = tuned(checkpoint, "run", *options, "--steps", 2, "--resume")
    assert (len(losses(resumed)), resumed.described()["config"]["data"]["now"]) == (2, now)
    # Padding is not counted.
    batches = [read[-1].batch(0, step, 8, 24)[:, :-1] for step in (1, 2)]
    num_tokens = [int((np.asarray(segments(jnp.asarray(batch))) >= 0).sum()) for batch in batches]
    assert sum(num_tokens) < 2 * 8 * 24
    assert [row["tokens_seen"] for row in resumed.rows("step")] == np.cumsum(num_tokens).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "message"), [(0, "model.safetensors: "), (1, "missing: ")])
def test_a_bad_checkpoint_touches_nothing(checkpoint, missing, message):
    file, run = checkpoint / "model.safetensors", checkpoint.parent / "run"
    save_file(dict(list(load_file(file).items())[missing:]), file)
    if not missing:
        file.write_bytes(file.read_bytes()[:-1])
    run.mkdir()
    (run / "config.json").write_text("{}")
    before = sorted(checkpoint.parent.rglob("*"))
    arguments = [checkpoint, "--data", checkpoint.parent / "text", "--run-dir", run, "--overwrite", *SMALL]
    result = CliRunner().invoke(train.app, [*map(str, arguments), "--mesh", "expert=4"])
    assert (result.exit_code, sorted(checkpoint.parent.rglob("*"))) == (2, before)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.thorough
def test_two_processes_load_and_write_what_one_does(checkpoint):
    """Experts and widths are split over both: neither process has all of a matrix."""
    options = ["--mesh", "data=2,expert=2", "--steps", 2]
    alone, _ = tuned(checkpoint, "alone", *options)
    together, port = RunFolder(checkpoint.parent / "together"), free_port()
    arguments = [checkpoint, "--data", checkpoint.parent / "text", "--run-dir", together.path, *SMALL, *options]
    arguments += ["--distributed", "--set", f"multi_process.coordinator=127.0.0.1:{port}"]
    arguments += ["--set", "multi_process.num_processes=2"]
    each = [[*arguments, "--set", f"multi_process.process_id={number}"] for number in range(2)]
    ended = end([start("tests.models.tiny_process", *map(str, given)) for given in each], 600)
    assert [code for code, _, _ in ended] == [0, 0], [errors for _, _, errors in ended]
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    one, two = (load_file(folder.model / "model.safetensors") for folder in (alone, together))
    assert all(np.allclose(value, two[name], atol=1e-4) for name, value in one.items())
