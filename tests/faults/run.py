"""Fail the n-th system call of a command on its files, and run the command again.

`python -m tests.faults.run train 1` prints one JSON object per failed call of training; the last argument is the step
between the numbers of calls.
"""

import errno
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.models.kill_training import losses

ROOT = Path(__file__).parents[2]
KINDS = ("write", "sync", "rename", "open", "send", "receive")
ERRORS = ("ENOSPC", "EIO", "EAGAIN", "EINTR", "EMFILE")
CONTROL = struct.Struct("9q")
"""Counts of the kinds of calls; kind, number and error of the failed one."""


class Failure(NamedTuple):
    """One failed system call: kind, number from 0 and error; and the faults of the command, one line each."""

    kind: str
    number: int
    error: str
    faults: list[str]


class Faults:
    """Process that runs commands with failing calls, in a folder.

    Args:
        folder: an existing folder; the files of the commands are in its subfolder `files`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, folder / "files"
        library, control = folder / "calls.so", folder / "control"
        source = Path(__file__).with_name("calls.cc")
        command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        control.write_bytes(bytes(CONTROL.size))
        with control.open("r+b") as file:
            self.control = mmap.mmap(file.fileno(), CONTROL.size)
        # Compiled programs are outside of the files.
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PLATFORMS": "cpu"}
        environment |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment |= {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(control), "FAULT_FOLDER": f"{self.files}/"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.programs"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Faults":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def run(self, name: str, kind: str = "", number: int = 0, error: str = "") -> tuple[int, list[str]]:
        """Run a command, whose n-th call of a kind fails; return its exit code and the lines on stderr."""
        failed = (KINDS.index(kind), number, getattr(errno, error)) if kind else (-1, 0, 0)
        self.control[:] = CONTROL.pack(*[0] * len(KINDS), *failed)
        return self.commands(name, 1)[0]

    def commands(self, name: str, number: int, interrupt_s: float | None = None) -> list[tuple[int, list[str]]]:
        """Run commands at once, and interrupt them after a time; return the exit code and stderr lines of each."""
        given = {"name": name, "folder": str(self.files), "number": number, "interrupt_s": interrupt_s}
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        texts = [(self.folder / f"stderr-{at}").read_text(errors="replace") for at in range(number)]
        return [(code, text.splitlines()) for code, text in zip(codes, texts, strict=True)]

    def counts(self) -> dict[str, int]:
        """Return the calls of the last command by kind."""
        return dict(zip(KINDS, CONTROL.unpack(self.control[:])[: len(KINDS)], strict=True))

    def clear(self) -> None:
        """Remove all files of commands."""
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()


def result(name: str, files: Path) -> object:
    """Return the result of a command: losses, or the content of the output."""
    if name == "train":
        return losses(files / "run")
    if name == "convert":
        with np.load(files / "out.npz") as arrays:
            return {key: array.tolist() for key, array in arrays.items()}
    return (files / "out.yaml").read_text()


def failures(name: str, step: int, folder: Path) -> Iterator[Failure]:
    """Yield the outcomes of every `step`-th call of each kind, and of each error."""
    with Faults(folder) as faults:
        faults.clear()
        if name == "calibrate":
            assert faults.run("measure") == (0, [])
        faults.clear()
        assert faults.run(name)[0] == 0, (folder / "stderr-0").read_text()
        counts, expected = faults.counts(), result(name, faults.files)
        for kind, total in counts.items():
            for at, error in enumerate(ERRORS):
                for number in range(at % step, total, step):
                    faults.clear()
                    yield Failure(kind, number, error, faults_of(name, faults, expected, (kind, number, error)))


def faults_of(name: str, faults: Faults, expected: object, failed: tuple[str, int, str]) -> list[str]:
    """Run a command with a failed call and once more; return one line per fault."""
    code, lines = faults.run(name, *failed)
    found = []
    if code < 0 or code == 70:
        found.append(f"exit code {code}: {' '.join(lines)[-300:]}")
    elif code and len(lines) != 1:
        found.append(f"{len(lines)} lines on stderr; expected 1: {' '.join(lines)[-300:]}")
    elif any("Traceback" in line for line in lines):
        found.append(f"a traceback with exit code 0: {' '.join(lines)[-300:]}")
    if code == 0 and result(name, faults.files) != expected:
        found.append("exit code 0 with another result")
    again, lines = faults.run(name)
    if again:
        found.append(f"the next command ends with exit code {again}: {' '.join(lines)[-300:]}")
    elif result(name, faults.files) != expected:
        found.append("the next command has another result")
    return found


def main(name: str, step: int) -> None:
    """Print the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        for one in failures(name, step, Path(folder)):
            print(json.dumps({"path": name, **one._asdict()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
