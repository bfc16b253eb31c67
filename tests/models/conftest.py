import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from models import config as presets
from models.train import app
from models.training.loop import execute, prepare
from tests.models.small import CONFIG, CORPUS


@pytest.fixture(scope="package", autouse=True)
def all_devices():
    """Before a command line asks for fewer of them."""
    assert jax.device_count() == 8


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory, all_devices):
    """The folder of a finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    execute(prepare(CONFIG, CORPUS, folder), Console(quiet=True))
    return folder


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """Calls `models.train` in an empty folder, where the preset `tiny` is that of the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(presets.PRESETS, "tiny", CONFIG)
    monkeypatch.setattr("models.train.default_corpus", lambda max_bytes: CORPUS)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
