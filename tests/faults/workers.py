"""Processes of `tests.faults.programs`, with a library that fails system calls on the files of a folder."""

import errno
import json
import mmap
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = ("write", "sync", "rename", "open", "send", "receive")
CONTROL = struct.Struct("9q")
"""Counts of the kinds of calls; kind, number and error of the failed one."""

LIMIT_S = 300.0
"""Time limit of a command."""

SETTLED_S = 0.2
"""Seconds without a change after which the files of a failed command count as settled."""

Ended = tuple[int, list[str]]
"""Exit code of a command, negative for a signal, and its lines on stderr."""


class Worker:
    """Process that runs commands, and starts again after it has ended.

    Args:
        environment: environment of the process.
        output: folder for the output of a command.
    """

    def __init__(self, environment: dict[str, str], output: Path) -> None:
        output.mkdir(exist_ok=True)
        self.environment, self.output = environment, output
        self.process: subprocess.Popen | None = None

    def begin(self, name: str, folder: Path) -> None:
        """Start a command."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.faults.programs"]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, **pipes)
        given = {"name": name, "folder": str(folder), "output": str(self.output)}
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def end(self) -> Ended:
        """Wait for the end of a command; a process that has ended or exceeds the time limit is replaced."""
        answer = ""
        if select.select([self.process.stdout], [], [], LIMIT_S)[0]:
            answer = self.process.stdout.readline()
        lines = (self.output / "stderr").read_text(errors="replace").splitlines()
        if answer:
            return int(answer), lines
        self.process.kill()
        code, self.process = self.process.wait(), None
        return code, lines

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


class Faults:
    """Commands with failing calls in a folder.

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
        environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")} | os.environ | {"JAX_PLATFORMS": "cpu"}
        environment |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment |= {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(control), "FAULT_FOLDER": f"{self.files}/"}
        self.workers = [Worker(environment, folder / f"output-{at}") for at in range(2)]
        self.clear()

    def __enter__(self) -> "Faults":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()

    def run(self, name: str, kind: str = "", number: int = 0, error: str = "") -> Ended:
        """Run a command, whose n-th call of a kind fails."""
        failed = (KINDS.index(kind), number, getattr(errno, error)) if kind else (-1, 0, 0)
        self.control[:] = CONTROL.pack(*[0] * len(KINDS), *failed)
        self.workers[0].begin(name, self.files)
        ended = self.workers[0].end()
        if ended[0]:
            self._settle()
        return ended

    def _settle(self) -> None:
        """Wait until the files no longer change."""
        # Threads complete the other writes of a failed checkpoint, as the process of the command does not end.
        before: list = []
        while (now := list(os.walk(self.files))) != before:
            before = now
            time.sleep(SETTLED_S)

    def interrupted(self, name: str, after_s: float) -> Ended:
        """Run a command, and interrupt it after a time."""
        self.workers[0].begin(name, self.files)
        time.sleep(after_s)
        self.workers[0].process.send_signal(signal.SIGINT)
        return self.workers[0].end()

    def run_two(self, name: str, later_s: float = 0) -> list[Ended]:
        """Run a command in two processes, the second one after a time."""
        for worker in self.workers:
            worker.begin(name, self.files)
            time.sleep(later_s if worker is self.workers[0] else 0)
        return [worker.end() for worker in self.workers]

    def counts(self) -> dict[str, int]:
        """Return the calls of the last command by kind."""
        return dict(zip(KINDS, CONTROL.unpack(self.control[:])[: len(KINDS)], strict=True))

    def clear(self) -> None:
        """Remove all files of commands."""
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir()

    def replace(self, files: Path) -> None:
        """Replace the files of commands by a copy of others."""
        shutil.rmtree(self.files, ignore_errors=True)
        shutil.copytree(files, self.files)
