"""A run from the command line on several kinds of data, interrupted and resumed."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from models import config as presets
from models.config import CheckpointConfig, ParallelConfig
from models.run_folder.metrics import RunFolder
from models.train import app
from tests.models.small import CONFIG

pytestmark = pytest.mark.slow

PRESET = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, num_layers=1),
    parallel=ParallelConfig(2, 2, "plain"),
    steps=4,
    checkpoints=CheckpointConfig(interval=2),
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Return command-line options for a custom tokenizer, JSON lines and an array."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(presets.PRESETS, "tiny", PRESET)
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)} | {"?": 30}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save("tokenizer.json")
    lines = [json.dumps({"body": "the quick brown fox"[i % 9 :]}) for i in range(60)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    np.save("array.npy", np.random.default_rng(0).integers(0, 31, 999, np.uint16))
    where = [
        "--data",
        "lines.jsonl:3",
        "--data",
        "array.npy:1",
        "--set",
        "data.text_field=body",
        "--set",
        "data.tokenizer=tokenizer.json",
    ]
    keys = ("batch.accumulate=2", "optimizer.schedule=wsd", "model.z_loss=1e-3")
    return [*where, *(word for key in keys for word in ("--set", key))]


def losses(folder):
    return [row["loss"] for row in RunFolder(folder).rows("step")]


@pytest.mark.thorough
def test_it_goes_on_with_the_next_sequence(data, tmp_path):
    result = CliRunner().invoke(app, [*data, "--run-dir", "whole"])
    assert result.exit_code == 0, result.output
    assert "tokens of 75% 1 file of lines.jsonl, 25% 1 file of array.npy" in result.output
    assert "nats/token" in result.output
    described = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert described["config"]["model"]["vocab_size"] == 31
    assert described["data"]["unit"] == "token"
    whole = RunFolder(tmp_path / "whole").read_counts()
    assert whole["steps"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    # Counts of the first group of each microbatch.
    copies = PRESET.tokens_per_step * PRESET.model.experts_per_token // 4
    assert (whole["counts"].sum((1, 2, 3)) == copies).all()

    shutil.copytree("whole", "killed")
    shutil.rmtree(RunFolder(tmp_path / "killed").checkpoints / "4")
    result = CliRunner().invoke(app, [*data, "--run-dir", "killed", "--resume"])
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    np.testing.assert_array_equal(RunFolder(tmp_path / "killed").read_counts()["counts"], whole["counts"])
    for change, message in [
        (["--set", "batch.accumulate=1"], "batch.accumulate is 1; expected 2"),
        (["--data", "array.npy:2"], "data is"),
    ]:
        result = CliRunner().invoke(app, [*data, *change, "--run-dir", "killed", "--resume"])
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
