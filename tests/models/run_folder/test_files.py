"""Files of a run are complete, are never deleted, and belong to one training run at a time."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from models.config import RelocationConfig, TrainConfig
from models.pretrained.saving import is_exported, vacant
from models.run_folder.checkpoints import keep_quiet, steps_in, system_errors
from models.run_folder.files import free_sibling, lock_folder, make_way, part, write_whole
from models.run_folder.metrics import PER_STEP, Recorder, RunFolder
from models.settings import updated
from models.train import TrainArgs, _default_run_dir, app
from models.training.faults import StopRequest
from models.training.loop import _check_empty, _claim, _export
from models.training.resume import as_before
from tests.models.small import refusal


def test_a_killed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "counts.npz"
    write_whole(file, b"before")

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before"
    monkeypatch.undo()
    write_whole(file, b"after")
    assert file.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_of_the_user_beside_a_written_one_stays(tmp_path, monkeypatch, fails):
    file, token = tmp_path / "counts.npz", "0" * 16
    mine = [tmp_path / "counts.npz.part", tmp_path / f"counts.npz.part-{token}"]
    for path in mine:
        path.write_text("mine")
    if fails:
        # The same name again, as from another process.
        monkeypatch.setattr("secrets.token_hex", lambda num_bytes: token)
        with pytest.raises(FileExistsError):
            write_whole(file, b"counts")
    else:
        write_whole(file, b"counts")
    assert file.exists() != fails
    assert all(path.read_text() == "mine" for path in mine)


def test_a_run_names_what_a_killed_one_left_and_keeps_it(tmp_path, monkeypatch):
    folder, lines = RunFolder(tmp_path), []
    left = [part(folder.config), part(folder.model)]
    left[0].write_text("{")
    (left[1] / "weights").mkdir(parents=True)
    monkeypatch.setattr("models.training.loop._described", lambda config, corpus: {})
    run = types.SimpleNamespace(folder=folder, run_id="1", config=None, corpus=None, base_fingerprint="")
    _claim(run, resume=False, overwrite=False, restart=False, tell=lines.append)
    assert lines == [f"{str(path)!r} is incomplete, left by a killed run; it can be deleted" for path in left]
    assert all(path.exists() for path in left)


def test_names_with_other_numbers_are_a_users(tmp_path):
    """A run writes neither counts-02.npz nor a checkpoint 08."""
    folder = RunFolder(tmp_path)
    for name in ("counts.npz", "counts-2.npz", "counts-03.npz", "counts-².npz", "counts-1.npz"):
        (tmp_path / name).write_text("")
    assert folder.segments == [1, 2]
    for name in ("0", "8", "09", "²", "12.orbax-checkpoint-tmp"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert steps_in(folder.checkpoints) == [8, 0]
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny-01").mkdir()
    RunFolder(tmp_path / "tiny").config.write_text("{}")
    assert _default_run_dir(tmp_path / "tiny", None, last=False) == tmp_path / "tiny-2"


def test_a_resumed_run_may_end_its_relocation(tmp_path):
    folder, config = RunFolder(tmp_path), TrainConfig(relocation=RelocationConfig(interval=2, min_gain=0.1))
    folder.config.write_text(json.dumps({"config": dataclasses.asdict(config), "data": {"fingerprint": ""}}))
    (folder.checkpoints / "4").mkdir(parents=True)
    assert updated(TrainConfig(), as_before(folder, {})).relocation == config.relocation
    given = as_before(folder, {"relocation": {"interval": None}})
    assert updated(TrainConfig(), given).relocation == RelocationConfig()


def test_siblings_are_numbered(tmp_path):
    first = free_sibling(tmp_path / "run", "before")
    assert first == tmp_path / "run.before-1"
    first.mkdir()
    assert free_sibling(tmp_path / "run", "before") == tmp_path / "run.before-2"


def test_a_run_is_moved_aside_and_other_files_stay(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    (folder.checkpoints / "weights").write_text("weights")
    left, kept = part(folder.counts).name, {"notes.txt", "counts.npz.part", part(folder.path / "notes.txt").name}
    for name in ("config.json", left, *kept):
        (folder.path / name).write_text(name)
    assert folder.has_run
    aside = folder.move_aside()
    assert aside == tmp_path / "run.before-1"
    assert {path.name for path in aside.iterdir()} == {"config.json", left, "checkpoint"}
    assert (aside / "checkpoint" / "weights").read_text() == "weights"
    assert {path.name for path in folder.path.iterdir()} == kept
    assert not folder.has_run


def test_a_file_that_was_about_to_be_written_is_no_run(tmp_path):
    folder = RunFolder(tmp_path)
    part(folder.config).write_text("{")
    assert not folder.has_run


@pytest.mark.slow
def test_lock_goes_with_the_process(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from models.run_folder.files import lock_folder\n"
        "lock = lock_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError):
            lock_folder(tmp_path)
        other.kill()
    lock_folder(tmp_path).close()
    lock_folder(tmp_path).close()


def test_a_broken_last_line_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    rows = [{"kind": "step", "step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "step", "st')
    assert folder.rows("step") == rows
    folder.keep_until(2)
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == rows[:2]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", "wrong arrays", "lengths"])
def test_unreadable_counts_count_as_absent_and_a_line_says_so(tmp_path, content):
    folder, lines = RunFolder(tmp_path), []
    arrays = {name: np.zeros((3, 1)) for name in PER_STEP} | {"steps": np.arange(1, 4)}
    if isinstance(content, bytes):
        folder.counts.write_bytes(content)
    else:
        changed = {"steps": np.arange(1, 3)} if content == "lengths" else {}
        np.savez(folder.counts, **(arrays | changed if content == "lengths" else {"other": np.zeros(1)}))
    recorder = Recorder(folder, 3, writes=True, tell=lines.append)
    assert recorder.arrays["steps"] == []
    assert len(lines) == 1
    assert str(folder.counts) in lines[0]
    np.savez(folder.counts, **arrays)
    assert len(Recorder(folder, 3, writes=True, tell=lines.append).arrays["steps"]) == 2
    assert len(lines) == 1


def test_a_folder_is_replaced_without_deleting_others(tmp_path, monkeypatch):
    """Siblings with names of temporary folders may be a user's."""
    folder = RunFolder(tmp_path)
    siblings = [tmp_path / "model.new" / "mine", tmp_path / "model.part" / "mine", tmp_path / "model.new.part" / "mine"]
    for file in (folder.model / "model-00001-of-00002.safetensors", *siblings):
        file.parent.mkdir()
        file.write_text("text")

    def saved(model, to, **options):
        with vacant(to) as aside:
            (aside / "new").write_text("text")

    monkeypatch.setattr("models.training.loop.save_pretrained", saved)
    config = types.SimpleNamespace(data=types.SimpleNamespace(tokenizer=None))
    run = types.SimpleNamespace(folder=folder, config=config, programs=types.SimpleNamespace(model=lambda state: state))
    _export(run, types.SimpleNamespace(stored_dtype="float32", folder=None), None, pytest.fail)
    assert [file.name for file in folder.model.iterdir()] == ["new"]
    assert all(file.read_text() == "text" for file in siblings)
    with pytest.raises(KeyboardInterrupt), vacant(tmp_path / "other"):
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.new", "model.part", "model.new.part"}


@pytest.mark.parametrize("name", ["model.gguf", "vocab.json/mine"])
def test_a_folder_with_a_file_of_the_user_is_moved_aside(tmp_path, name):
    """`llama.cpp` converts a model inside of its folder."""
    folder, lines = tmp_path / "model", []
    for file in (folder / "config.json", folder / name):
        file.parent.mkdir(exist_ok=True)
        file.write_text("text")
    make_way(folder, is_exported, lines.append)
    aside = tmp_path / "model.before-1"
    assert lines == [f"moved {str(folder)!r} to {str(aside)!r}, as it contains {name.partition('/')[0]!r}"]
    assert [path.name for path in tmp_path.iterdir()] == [aside.name]
    assert (aside / name).read_text() == (aside / "config.json").read_text() == "text"
    make_way(folder, is_exported, pytest.fail)


def test_a_folder_of_something_else_is_not_taken_for_a_killed_run(tmp_path):
    """A model has a `config.json`, too."""
    folder = RunFolder(tmp_path)
    folder.config.write_text('{"model_type": "mixtral"}')
    with pytest.raises(ValueError, match="contains a run; expected --resume"):
        _check_empty(folder, restart=True)
    folder.config.write_text('{"config": {}, "environment": {}}')
    _check_empty(folder, restart=True)


def test_counts_of_a_long_run_are_in_segments_of_bounded_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("models.run_folder.metrics.router_losses", lambda stats: {})
    monkeypatch.setattr("models.run_folder.metrics.summarised", lambda stats: {})
    layout = {"system": "exact"}
    monkeypatch.setattr("models.run_folder.metrics.MAX_SEGMENT_BYTES", 3 * (4 + 16 * len(PER_STEP)))

    def record(recorder, steps):
        for step in steps:
            stats = types.SimpleNamespace(**{name: np.full((2, 1, 2), step, np.int32) for name in PER_STEP})
            recorder.step(step, 1.0, stats, 8, 0.1)
            if step % 2 == 0:
                recorder.flush()()
        return recorder

    folder = RunFolder(tmp_path)
    assert record(Recorder(folder, 1, layout, writes=True), range(1, 11)).arrays["steps"] == [9, 10]
    assert [arrays["steps"].tolist() for arrays in folder.all_counts()] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [row["segment"] for row in folder.rows("layout")] == [1, 2, 3]
    # Continue from an earlier checkpoint, at the end of the second segment.
    assert record(Recorder(folder, 9, layout, writes=True, tell=pytest.fail), range(9, 13)).segment == 3
    assert [arrays["steps"].tolist() for arrays in folder.all_counts()] == [[1, 2, 3, 4], [*range(5, 11)], [11, 12]]
    assert (folder.read_counts(2)["counts"][:, 0, 0] == range(5, 11)).all()


def test_a_process_that_writes_no_files_keeps_no_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("models.run_folder.metrics.router_losses", lambda stats: {})
    monkeypatch.setattr("models.run_folder.metrics.summarised", lambda stats: {})
    recorder = Recorder(RunFolder(tmp_path), 1, writes=False)
    recorder.step(1, 1.0, types.SimpleNamespace(**{name: np.zeros((2, 1, 2)) for name in PER_STEP}), 8, 0.1)
    assert recorder.arrays["counts"] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_first_signal_asks_for_an_end(number, code):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        until = time.monotonic() + 10
        while not stop.requested() and time.monotonic() < until:
            time.sleep(0.001)
        assert stop.name == number.name
        assert stop.exit_code == code
    assert signal.getsignal(number) is before
    assert StopRequest().exit_code == 0


@pytest.mark.slow
def test_second_signal_ends_at_once_whatever_the_main_thread_does():
    code = (
        "import hashlib\nfrom models.training.faults import StopRequest\n"
        "with StopRequest():\n"
        "    print('ready', flush=True)\n"
        # A minute in C, without Python signal handlers, as in a compilation.
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_a_failed_read_ends_resume_in_one_line(tmp_path, monkeypatch):
    def failing(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "run/checkpoint/2")

    monkeypatch.setattr(TrainArgs, "prepare", failing)
    line = "'run/checkpoint/2' cannot be read or written: Input/output error; after a fix, --resume continues"
    assert refusal(app, "tiny", "--run-dir", tmp_path, "--resume").startswith(line)


def test_an_error_of_a_library_contains_the_error_of_the_system():
    """Orbax wraps an error of TensorStore."""
    with pytest.raises(OSError, match="No space left on device") as found, system_errors():
        raise Exception("Encountered error while reading array index") from ValueError("[os_error_code='28']")
    assert found.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="other"), system_errors():
        raise ValueError("other")


def test_an_error_of_a_library_has_one_line():
    with pytest.raises(ValueError, match=r"\Achunk 3 is damaged\Z"), system_errors():
        raise Exception("Encountered error while reading TensorStore({\n  'base': {},\n})") from ValueError(
            "chunk 3 is damaged\nspec: {}"
        )
    with pytest.raises(ValueError, match=r"\Aone array differs\Z"), system_errors():
        raise RuntimeError("one array differs\n[spec='{}']")


def test_dropped_coroutines_print_nothing(monkeypatch):
    """Orbax drops the coroutines of other arrays after a failed one, and each of them raises again."""

    @types.coroutine
    def pending():
        yield

    async def read():
        try:
            await pending()
        except GeneratorExit:
            raise Exception("Encountered error while reading TensorStore({\n})") from None

    class Held:
        def __del__(self):
            raise Exception("reported")

    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: shown.append(str(unraisable.exc_value)))
    keep_quiet()
    dropped = read()
    dropped.send(None)
    del dropped
    assert shown == []
    held = Held()
    del held
    assert shown == ["reported"]
