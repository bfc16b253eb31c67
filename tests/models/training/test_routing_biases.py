"""Routing biases of published models move if their parameters are random, and not if they come from a checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from models import train
from models.architectures.published import PUBLISHED
from models.architectures.registry import ARCHITECTURES
from models.config import ModelConfig
from models.run_folder.metrics import RunFolder
from models.tiny_checkpoint import byte_tokenizer, tiny_config
from models.training.source import BIAS_RATE, PUBLISHED_NAMES, source_of, with_sizes
from tests.models.small import ONE_ROUND, sets

TEXT = "the quick brown fox jumps over the lazy dog. "
STEPS = 3


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_random_parameters_with_routing_biases_have_a_rate(name):
    source = source_of(ModelConfig(checkpoint=name))
    has_biases = source.config.router.selection_bias
    assert has_biases == (name in ("deepseek-v3", "glm-4.5", "glm-5"))
    assert with_sizes({}, source)["model"].get("bias_rate") == (BIAS_RATE if has_biases else None)
    assert with_sizes({"model": {"bias_rate": 0.0}}, source)["model"]["bias_rate"] == 0


def test_a_checkpoint_keeps_its_routing_biases(tmp_path):
    (tmp_path / "config.json").write_text(tiny_config("deepseek_v3"))
    source = source_of(ModelConfig(checkpoint=str(tmp_path)))
    assert source.config.router.selection_bias
    assert "bias_rate" not in with_sizes({}, source)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSeek-V3", pytest.param("GLM-4.5", marks=pytest.mark.thorough)])
def test_routing_biases_of_random_parameters_move(name, tmp_path, monkeypatch):
    """Each step moves a bias by the rate up, down or, at the mean load, not at all."""
    kind = PUBLISHED[name]["model_type"]
    for field, value in {"n_routed_experts": 8, "hidden_size": 32}.items():
        monkeypatch.setitem(ARCHITECTURES[kind].tiny, field, value)
    monkeypatch.setitem(PUBLISHED, name, json.loads(tiny_config(kind)))
    (tmp_path / "text").write_text(TEXT * 100)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    arguments = [name.lower(), "--data", tmp_path / "text", "--run-dir", tmp_path / "run", "--steps", STEPS]
    arguments += ["--mesh", "expert=2", "--system", ONE_ROUND]
    arguments += sets(f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    arguments += sets("batch.sequence_length=16", "validation.batches=1")
    result = CliRunner().invoke(train.app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    tensors = load_file(RunFolder(tmp_path / "run").model / "model.safetensors")
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    steps = np.round(bias / BIAS_RATE)
    np.testing.assert_allclose(bias, steps * BIAS_RATE, atol=1e-7)
    assert np.abs(steps).max() == STEPS
    assert steps.min() < 0 < steps.max()
