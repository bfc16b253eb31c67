"""Launcher of one process per rank, each in its namespace, forked from a parent with all imports done.

The parent imports JAX but starts no backend. Each rank then sees one network and its own hosts file, in which the host
name resolves to the rank's address, the one gloo binds to.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.network.network import Host, Network
from benchmarks.network.sandbox import inside

GRACE_S = 1.0
"""Time for other ranks to report their errors after the first failure, in seconds."""

QUOTED_CHARACTERS = 3000
"""Number of last characters of a failed rank's output to include in the message."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, PR_SET_PDEATHSIG = 4096, 16384, 1 << 18, 1


@dataclass(frozen=True)
class Rank:
    """Coordinates of a rank."""

    index: int
    hosts: tuple[Host, ...]
    network: Network

    @property
    def address(self) -> str:
        return self.hosts[self.index].address


Body = Callable[[Rank], Any]
"""Function run by each rank; its JSON-compatible result is returned to the parent."""


class RanksFailed(RuntimeError):
    """Some ranks failed or timed out."""


def launch(network: Network, body: Body, *, deadline_s: float) -> list[Any]:
    """Run `body` on all ranks in parallel; no process remains afterwards, also after errors.

    Call it in a sandbox, in a process without other threads and thus without a JAX backend.
    """
    if not inside():
        raise RuntimeError("launch was called outside a sandbox; expected inside, see sandbox.enter")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        ranks = [_fork(Rank(index, network.hosts, network), body, Path(folder)) for index in range(len(network.hosts))]
        try:
            return _collect(ranks, deadline_s)
        finally:
            for rank in ranks:
                rank.end()


# ---- the parent ----------------------------------------------------------------


@dataclass
class _Child:
    """Process of a rank, in the parent."""

    index: int
    pid: int
    pipe: int
    log: Path
    said: bytes = b""
    status: int | None = None

    def poll(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def end(self) -> None:
        if not self.poll():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.pipe)

    @property
    def failure(self) -> str | None:
        """Description of the failure, `None` if there is none."""
        if self.status is None or self.status == 0:
            return None
        if self.status < 0:
            return f"rank {self.index} was ended by {signal.Signals(-self.status).name}"
        return f"rank {self.index} failed"

    def tail(self) -> str:
        """Return the end of the process's output."""
        return self.log.read_text(errors="replace")[-QUOTED_CHARACTERS:].strip()


def _collect(ranks: list[_Child], deadline_s: float) -> list[Any]:
    end_s, failures = time.monotonic() + deadline_s, list[_Child]()
    with selectors.DefaultSelector() as pipes:
        for rank in ranks:
            pipes.register(rank.pipe, selectors.EVENT_READ, rank)
        while any(rank.status is None for rank in ranks) and time.monotonic() < end_s:
            for key, _ in pipes.select(timeout=0.05):
                _read(key.data, pipes)
            failed = [rank for rank in ranks if rank.status is None and rank.poll() and rank.failure]
            if failed and not failures:
                end_s = min(end_s, time.monotonic() + GRACE_S)
            # List killed ranks first, as they did not fail because of others.
            failures += sorted(failed, key=lambda rank: rank.status or 0)
        for key in list(pipes.get_map().values()):
            _read(key.data, pipes)
    late = [rank for rank in ranks if rank.status is None]
    if failures or late:
        raise RanksFailed(_report(failures, late, deadline_s))
    return [json.loads(rank.said) for rank in ranks]


def _read(rank: _Child, pipes: selectors.BaseSelector) -> None:
    """Read all available data."""
    while True:
        try:
            part = os.read(rank.pipe, 1 << 16)
        except BlockingIOError:
            return
        rank.said += part
        if not part:
            pipes.unregister(rank.pipe)
            return


def _report(failures: list[_Child], late: list[_Child], deadline_s: float) -> str:
    parts = [f"{rank.failure}:\n{rank.tail() or '(it wrote nothing)'}" for rank in failures]
    names = ", ".join(str(rank.index) for rank in late)
    if late and failures:
        parts.append(f"ranks {names} were still running, and were ended")
    elif late:
        parts.append(f"ranks {names} were not done after {deadline_s:.0f} s, and were ended")
        parts += [f"rank {rank.index} wrote last:\n{rank.tail()}" for rank in late if rank.tail()]
    return "\n".join(parts)


# ---- a rank --------------------------------------------------------------------


def _fork(rank: Rank, body: Body, folder: Path) -> _Child:
    reader, writer = os.pipe()
    log = folder / f"{rank.index}.log"
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be(rank, body, folder, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    return _Child(rank.index, pid, reader, log)


def _be(rank: Rank, body: Body, folder: Path, writer: int) -> NoReturn:
    """Run a rank's process to its end, without inherited handlers, exit hooks or shutdown barriers."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Keep Python's own stdout; redirect the output of libraries to the log.
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        with open(folder / f"{rank.index}.log", "wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _move_in(rank, folder)
        said = json.dumps(body(rank)).encode()
        while said:
            said = said[os.write(writer, said) :]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _move_in(rank: Rank, folder: Path) -> None:
    """Enter the rank's namespace with its own host name and hosts file, and die with the parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    with open(f"/run/netns/{rank.hosts[rank.index].namespace}") as namespace:
        _check(libc.setns(namespace.fileno(), CLONE_NEWNET), f"setns to {namespace.name}")
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate")
    socket.sethostname(f"rank{rank.index}")
    hosts = folder / f"{rank.index}.hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{rank.address} rank{rank.index}\n")
    _check(libc.mount(bytes(hosts), b"/etc/hosts", None, MS_BIND, None), "mount --bind on /etc/hosts")


def _check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")
