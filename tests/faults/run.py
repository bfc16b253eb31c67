"""Fail the n-th system call of a command on its files, and run the command again.

`python -m tests.faults.run train 1` prints one JSON object per failed call of training; the last argument is the step
between the numbers of calls.
"""

import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.faults.workers import Faults
from tests.models.kill_training import losses

ERRORS = ("ENOSPC", "EIO", "EAGAIN", "EINTR", "EMFILE")
COMMANDS = {"convert": "convert", "calibrate": "calibrate", "train": "train", "resume": "train"}
"""Command of each path. `resume` continues a run from its first checkpoint of two."""


class Failure(NamedTuple):
    """One failed system call: kind, number from 0 and error; and the faults of the command, one line each."""

    kind: str
    number: int
    error: str
    faults: list[str]


def result(command: str, files: Path) -> object:
    """Return the result of a command: losses, or the content of the output."""
    if command == "train":
        return losses(files / "run")
    if command == "convert":
        with np.load(files / "out.npz") as arrays:
            return {key: array.tolist() for key, array in arrays.items()}
    return (files / "out.yaml").read_text()


def prepare(path: str, faults: Faults) -> Path:
    """Return a folder with the files before the command of a path, whose programs are compiled."""
    before = faults.folder / "before"
    if path == "calibrate":
        assert faults.run("measure") == (0, [])
    faults.clear()
    assert faults.run(COMMANDS[path]) == (0, []), (faults.workers[0].output / "stderr").read_text()
    if path == "resume":
        shutil.rmtree(faults.files / "run" / "checkpoint" / "4")
    else:
        faults.clear()
    return Path(shutil.copytree(faults.files, before))


def failures(path: str, step: int, folder: Path) -> Iterator[Failure]:
    """Yield the outcomes of every `step`-th call of each kind, and of each error."""
    with Faults(folder) as faults:
        before, command = prepare(path, faults), COMMANDS[path]
        faults.replace(before)
        assert faults.run(command)[0] == 0
        counts, expected = faults.counts(), result(command, faults.files)
        for (kind, total), (at, error) in itertools.product(counts.items(), enumerate(ERRORS)):
            for number in itertools.count(at % step, step):
                faults.replace(before)
                found = faults_of(command, faults, expected, (kind, number, error))
                # Threads make a few calls more or fewer in each run.
                if found is not None:
                    yield Failure(kind, number, error, found)
                elif number >= total:
                    break


def faults_of(command: str, faults: Faults, expected: object, failed: tuple[str, int, str]) -> list[str] | None:
    """Run a command with a failed call and once more; return one line per fault, or `None` if it made fewer calls."""
    code, lines = faults.run(command, *failed)
    if faults.counts()[failed[0]] <= failed[1]:
        return None
    found = [] if code in (0, 2) else [f"exit code {code}: {' '.join(lines)[-300:]}"]
    if code == 2 and len(lines) != 1:
        found.append(f"{len(lines)} lines on stderr; expected 1: {' '.join(lines)[-300:]}")
    if code == 0 and any("Traceback" in line for line in lines):
        found.append(f"a traceback with exit code 0: {' '.join(lines)[-300:]}")
    if code == 0 and result(command, faults.files) != expected:
        found.append("exit code 0 with another result")
    again, lines = faults.run(command)
    if again:
        found.append(f"the next command ends with exit code {again}: {' '.join(lines)[-300:]}")
    elif result(command, faults.files) != expected:
        found.append("the next command has another result")
    return found


def main(path: str, step: int) -> None:
    """Print the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        for one in failures(path, step, Path(folder)):
            print(json.dumps({"path": path, **one._asdict()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
