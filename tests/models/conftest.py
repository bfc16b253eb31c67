import functools

import jax
import pytest
from rich.console import Console
from typer.testing import CliRunner

from models import config as presets
from models.train import app
from models.training.loop import execute, prepare
from models.training.step import make_programs
from tests.models.small import CONFIG, CORPUS


@pytest.fixture(scope="package", autouse=True)
def all_devices():
    """Initialize all devices before a command line requests fewer."""
    assert jax.device_count() == 8


@pytest.fixture(scope="package", autouse=True)
def shared_programs():
    """Trace the programs of a configuration once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.training.loop.make_programs", functools.cache(make_programs))
        yield


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory, all_devices):
    """Return the read-only folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    execute(prepare(CONFIG, CORPUS, folder), Console(quiet=True))
    return folder


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """Return a function calling `models.train` in an empty folder, with the preset `tiny` of the tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(presets.PRESETS, "tiny", CONFIG)
    monkeypatch.setattr("models.train.default_corpus", lambda max_bytes: CORPUS)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
