import subprocess
import sys

import pytest
from typer.testing import CliRunner

from models.train import app

CASES = {
    "preset": (["--preset", "huge"], "preset is 'huge'; expected one of "),
    "system": (["--system", "foo"], "system is 'foo'; expected one of "),
    "headroom": (["--headroom", "0"], "headroom is 0.0; expected"),
    "negative headroom": (["--headroom", "-1"], "headroom is -1.0; expected"),
    "replica slots": (["--replica-slots", "-2"], "replica_slots is -2; expected"),
    "slots of plain": (["--system", "plain", "--replica-slots", "2"], "replica_slots is 2; expected none"),
    "batch": (["--batch-size", "12"], "batch_size is 12; expected a multiple of the 8 shards"),
    "steps": (["--steps", "0"], "steps is 0; expected at least 1"),
    "rate": (["--learning-rate", "nan"], "learning_rate is nan; expected"),
    "seed": (["--seed", "-1"], "seed is -1; expected"),
    "devices": (["--expert-parallel", "16"], "data_parallel x expert_parallel is 1 x 16; expected"),
    "experts": (["--expert-parallel", "5", "--batch-size", "30"], "num_experts is 16; expected"),
    "missing data": (["--data", "missing"], "data is 'missing', which does not exist; expected"),
    "data weight": (["--data", "short:0"], "data is 'short' with weight 0; expected a finite number above 0"),
    "tokenizer": (["--data", "short", "--tokenizer", "empty"], "empty is no tokenizer"),
    "tokenizer alone": (["--tokenizer", "tokens"], "tokens cannot be read"),
    "vocabulary": (["--data", "short", "--vocab-size", "100"], "vocab_size is 100; expected at least the 256"),
    "schedule": (["--schedule", "step"], "schedule is 'step'; expected one of cosine"),
    "accumulate": (["--accumulate", "3"], "batch_size is 32; expected a multiple of the 8 shards"),
    "rounds": (["--max-rounds", "0"], "max_rounds is 0; expected at least 1"),
    "fsdp": (["--fsdp"], "fsdp is set, but data_parallel is 1; expected"),
    "remat": (["--remat", "all"], "remat is 'all'; expected none, full, or"),
    "empty data": (["--data", "empty"], "data is 'empty', which holds no bytes; expected"),
    "short data": (["--data", "short"], "expected more than sequence_length 128"),
    "no checkpoint": (["--resume"], "resume is set, but 'run' has no checkpoint; expected"),
    "run folder": (["--run-dir", "short/run"], "run_dir is 'short/run'; expected a writable folder"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES)
def test_one_line_and_exit_code(folder, arguments, message):
    result = CliRunner().invoke(app, ["--run-dir", "run", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_from_a_shell():
    command = [sys.executable, "-m", "models.train", "--preset", "huge"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: preset is 'huge'; expected one of ")
    assert result.stderr.count("\n") == 1
