"""Start training processes on this machine; `python -m tests.models.processes` only waits.

Its arguments select its behavior: wait for a minute (`wait`), also in a step that never ends (`stuck`), or fail
(`fail`); and the seconds until a stall ends it.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models.multi_process import stalls
from models.multi_process.peer_monitor import PeerMonitor
from models.multi_process.rendezvous import Place, join

ROOT = Path(__file__).parents[2]
JOIN_TIMEOUT_S = 120
WAIT_S = 60.0
STUCK_S = 5.0
"""Limit of a stall among responding processes, in place of `stalls.LIMIT_S`."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(module: str, *arguments: str, folder: Path = ROOT) -> subprocess.Popen:
    """Start a process on CPUs in a folder, with captured output."""
    # gRPC would use proxies for 127.0.0.1.
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def end(processes: list[subprocess.Popen], within_s: float) -> list[tuple[int, str, str]]:
    """Return exit codes, outputs and errors of processes, which must end within `within_s` seconds."""
    until = time.monotonic() + within_s
    try:
        for process in processes:
            process.wait(max(until - time.monotonic(), 0.01))
    finally:
        for process in processes:
            process.kill()
        ended = [process.communicate() for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def joined(*whats: str, stall_timeout_s: float = 0) -> list[subprocess.Popen]:
    """Start processes that join each other and then idle."""
    given = [str(free_port()), str(len(whats))]
    processes = [
        start("tests.models.processes", *given, str(i), what, str(stall_timeout_s)) for i, what in enumerate(whats)
    ]
    for process in processes:
        assert process.stdout.readline() == "joined\n", process.communicate()
    return processes


def place(port: int, num_processes: int, process_id: int) -> list[str]:
    """Return the command line of a process of a run."""
    given = {"coordinator": f"127.0.0.1:{port}", "num_processes": num_processes, "process_id": process_id}
    return ["--distributed", *multi_process(**given)]


def multi_process(**given: object) -> list[str]:
    return [word for key, value in given.items() for word in ("--set", f"multi_process.{key}={value}")]


def train(*options: str, folder: Path = ROOT, of_each: Sequence[Sequence[str]] = ((), ())) -> list[subprocess.Popen]:
    """Train the tiny model with two processes of two devices."""
    port, join = free_port(), multi_process(join_timeout_s=JOIN_TIMEOUT_S)
    return [
        start("tests.models.tiny_process", *place(port, 2, i), *join, *options, *of_each[i], folder=folder)
        for i in range(2)
    ]


def main(port: str, num_processes: str, process_id: str, what: str, stall_timeout_s: str = "0") -> None:
    place = Place("127.0.0.1", int(port), int(num_processes), int(process_id))
    progress = stalls.Progress()
    with PeerMonitor(place, join(place, JOIN_TIMEOUT_S), progress, stall_timeout_s=float(stall_timeout_s)):
        print("joined", flush=True)
        if what == "fail":
            raise OSError("no space left")
        if what == "stuck":
            stalls.LIMIT_S, progress.step = STUCK_S, 1
        time.sleep(WAIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
