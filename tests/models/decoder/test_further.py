"""Multi-token prediction: compared with plain NumPy, saved exactly, and fine-tuned."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from scipy.special import log_softmax
from typer.testing import CliRunner

from jax_moe_lb import System
from models import train
from models.architectures.config_json import read_fields
from models.architectures.registry import configured
from models.config import ParallelConfig, TrainConfig
from models.data.marks import num_predicted
from models.decoder.model import Decoder
from models.mesh import make_mesh
from models.pretrained.loading import by_path, from_pretrained, load_state
from models.pretrained.saving import save_pretrained
from models.tiny_checkpoint import byte_tokenizer, write_tiny
from tests.models.further_reference import ahead
from tests.models.small import are_equal, programs_of, sets, tensors_in, tiny_decoder

LAYER = "model.layers.2"
COPIES = {f"{LAYER}.embed_tokens.weight", f"{LAYER}.shared_head.head.weight"}


def mesh():
    return make_mesh(ParallelConfig(2, 4))


@pytest.fixture(scope="module", params=["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.thorough)])
def checkpoint(request, tmp_path_factory):
    """Return a checkpoint with random norms and biases."""
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    config = tiny_decoder(request.param, predict_further=True, num_nextn_predict_layers=1)
    model = Decoder(config, mesh=make_mesh(ParallelConfig(1, 1)), system=System(), rngs=nnx.Rngs(0))
    save_pretrained(model, folder)
    tensors, rng = tensors_in(folder), np.random.default_rng(0)
    for name, value in tensors.items():
        if "norm" in name or "bias" in name:
            value[...] = rng.uniform(0.5, 1.5, value.shape) if "norm" in name else rng.uniform(-0.2, 0.2, value.shape)
        elif name not in COPIES:
            value *= 3
    for name, source in zip(sorted(COPIES), ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        tensors[name] = tensors[source]
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return folder


@pytest.mark.slow
def test_a_round_trip_keeps_every_bit(checkpoint, tmp_path):
    save_pretrained(from_pretrained(checkpoint, mesh(), predict_further=True), tmp_path / "out")
    before = tensors_in(checkpoint)
    assert are_equal(before, tensors_in(tmp_path / "out"))
    assert before.keys() >= COPIES | {f"{LAYER}.eh_proj.weight", f"{LAYER}.mlp.experts.15.down_proj.weight"}
    without = from_pretrained(checkpoint, mesh())
    assert not any("further" in path for path in by_path(nnx.state(without)))


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["glm4_moe"], indirect=True)
def test_logits_and_loss_are_those_of_plain_numpy(checkpoint):
    tensors = {name: value.astype(np.float64) for name, value in tensors_in(checkpoint).items()}
    tokens = np.random.default_rng(1).integers(0, 256, (8, 13)).astype(np.int32)
    config = configured(read_fields(checkpoint), predict_further=True)
    programs = programs_of(TrainConfig(parallel=ParallelConfig(2, 4)), config)
    places = programs.model(programs.state_shapes).places
    state = load_state(checkpoint, config, programs.init, programs.state_shapes, mesh(), stacks=places)

    @jax.jit
    def run(state, tokens):
        return programs.model(state).loss(tokens, num_predicted(tokens, 1), 0.3)

    total, (loss, stats) = run(state, jnp.asarray(tokens))
    assert stats.counts.shape[:1] == (2,), "of a layer with experts, and of the one that predicts further"
    expected = [ahead(tensors, read_fields(checkpoint).raw, line[:-1], line[1:]) for line in tokens]
    losses = []
    for k, logits in enumerate(zip(*expected, strict=True)):
        assert np.abs(logits).max() > 1
        shares = log_softmax(np.stack(logits)[:, : 12 - k], -1)
        losses.append(-np.take_along_axis(shares, tokens[:, 1 + k :, None], -1).mean())
    assert float(loss) == pytest.approx(losses[0], abs=1e-4)
    assert float(total) == pytest.approx(losses[0] + 0.3 * losses[1], abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["deepseek_v3"], indirect=True)
def test_tuning_moves_what_predicts_further(checkpoint, tmp_path):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = [checkpoint, "--data", tmp_path / "text", "--run-dir", tmp_path / "run"]
    options += ["--steps", 2, "--system", "greedy"]
    options += sets("optimizer.learning_rate=1e-3", "batch.sequence_length=16")
    options += sets("model.further_weight=0.3", "model.bias_rate=0.01")
    result = CliRunner().invoke(train.app, [str(option) for option in options])
    assert result.exit_code == 0, result.output
    before, after = tensors_in(checkpoint), tensors_in(tmp_path / "run" / "model")
    assert not {name for name, value in before.items() if np.array_equal(value, after[name])}
    assert np.array_equal(after[f"{LAYER}.embed_tokens.weight"], after["model.embed_tokens.weight"])


def lacking(tensors):
    del tensors[f"{LAYER}.eh_proj.weight"]


def differing(tensors):
    tensors[f"{LAYER}.shared_head.head.weight"] = tensors["lm_head.weight"] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lacking, f"missing: {LAYER}.eh_proj.weight;"),
        (differing, f"{LAYER}.shared_head.head.weight is not lm_head.weight; expected a copy"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["glm4_moe"], indirect=True)
def test_tensors_that_do_not_fit_are_named(checkpoint, tmp_path, change, expected):
    tensors = tensors_in(checkpoint)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ValueError, match=re.escape(expected)):
        from_pretrained(tmp_path, mesh(), predict_further=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_checkpoint_without_such_layers_is_refused(name, tmp_path):
    write_tiny(name, tmp_path / "tiny")
    with pytest.raises(ValueError, match="predict_further is True; expected False"):
        from_pretrained(tmp_path / "tiny", mesh(), predict_further=True)
