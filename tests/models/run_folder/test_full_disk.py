"""A full disk ends training with one line; complete files stay intact, and --resume continues from them."""

import errno
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from flax import nnx

from models.run_folder.checkpoints import Checkpoints, restore_newest, steps_in
from models.run_folder.files import RESUMING, in_words, write_whole
from models.run_folder.metrics import Recorder, RunFolder

ROOM = 4096


@contextmanager
def files_of_at_most(num_bytes):
    """Set a file size limit, which fails in the same calls as a full disk but needs no privileges."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_as_it_was_and_nothing_lies_beside_it(tmp_path):
    file = tmp_path / "summary.json"
    write_whole(file, b"before")
    with files_of_at_most(ROOM), pytest.raises(OSError, match="File too large") as refused:
        write_whole(file, bytes(2 * ROOM))
    assert refused.value.errno == errno.EFBIG
    assert refused.value.filename == str(file)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == b"before"


def test_the_beginning_of_a_line_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    recorder = Recorder(folder, 1, writes=True)

    def record():
        for step in range(1, 100):
            recorder.validation(step, 1.0)

    with files_of_at_most(ROOM), pytest.raises(OSError, match=r"File too large: '.*metrics.jsonl'"):
        record()
    whole = len(folder.metrics.read_bytes().splitlines()) - 1
    assert folder.metrics.stat().st_size == ROOM
    Recorder(folder, whole, writes=True).validation(whole, 2.0)
    rows = folder.rows("validation")
    assert [row["step"] for row in rows] == list(range(1, whole + 1))
    assert rows[-1]["loss"] == 2.0


def test_what_is_said():
    assert in_words(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/counts.npz")) == (
        f"'run/counts.npz' cannot be written: No space left on device; {RESUMING}"
    )


@pytest.mark.slow
def test_the_checkpoint_before_stays_whole(tmp_path, capfd):
    keys = jax.random.split(jax.random.key(0), 8)
    state = nnx.State({f"layer{i}": nnx.Param(jax.random.normal(key, (64, 64))) for i, key in enumerate(keys)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with files_of_at_most(ROOM):
            checkpoints.save(2, state)
            with pytest.raises(OSError, match="File too large") as refused:
                checkpoints.wait()
    assert refused.value.filename == str(tmp_path)
    assert restore_newest(tmp_path, jax.eval_shape(lambda: state), print)[0] == 1
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    # There is no TensorStore output, and no message about damage.
    assert capfd.readouterr() == ("", "")


FULL_AT_STEP_4 = f"""
import resource
from models.run_folder.checkpoints import Checkpoints
from tests.models import tiny_training

save = Checkpoints.save

def limited(self, step, *rest):
    self.wait()
    if step == 4:
        # Metrics fit, so that the checkpoint fails first.
        resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * ROOM}, {4 * ROOM}))
    save(self, step, *rest)

Checkpoints.save = limited
tiny_training.main()
"""


def train(run_dir, *arguments, program=("-m", "tests.models.tiny_training"), stdout=subprocess.DEVNULL):
    command = [sys.executable, *program, "--run-dir", str(run_dir), *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_finds_no_room_goes_on_later(tmp_path):
    run_dir = tmp_path / "run"
    stopped = train(run_dir, program=("-c", FULL_AT_STEP_4))
    assert stopped.returncode == 2
    assert stopped.stderr == (f"error: {str(run_dir / 'checkpoint')!r} cannot be written: File too large; {RESUMING}\n")
    assert steps_in(run_dir / "checkpoint") == [2]
    finished = train(run_dir, "--resume")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert [row["step"] for row in RunFolder(run_dir).rows("step")] == list(range(1, 9))
    assert json.loads((run_dir / "summary.json").read_bytes())["steps"] == 8
    assert not [path.name for path in run_dir.rglob("*") if "part" in path.name or "tmp" in path.name]


@pytest.mark.slow
@pytest.mark.thorough
def test_no_room_for_what_is_printed(tmp_path):
    with Path("/dev/full").open("w") as full:
        ended = train(tmp_path / "run", stdout=full)
    assert ended.returncode == 2
    assert ended.stderr == f"error: standard output cannot be written: No space left on device; {RESUMING}\n"
