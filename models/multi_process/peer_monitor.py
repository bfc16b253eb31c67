"""Agreement on options between processes, and prompt shutdown after one of them ends.

`Store` exchanges values before any device is initialized, and `agree` compares options through it. `PeerMonitor` ends
all processes soon after one has ended, each with a message naming that process.

JAX's coordination service also detects this. It takes 60 to 100 s by default, and 10 s with the shortest usable
`heartbeat_timeout_seconds`, and it aborts the process from C++ with some twenty lines. Here each process keeps the
connection to process 0 by which it joined, and the kernel closes it as soon as a process ends. No Python thread has a
deadline, so a busy process is never mistaken for a dead one.

A stopped process keeps its connections. Each process sends its step to process 0 every second, and gets the stall of
the run as the answer. There is one unanswered message at a time, so that no socket of a stopped process fills up.
"""

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

import jax
from jax._src import distributed

from models.console import USER_ERRORS, UserError, say
from models.multi_process.rendezvous import Link, Links, Place
from models.multi_process.stalls import BEAT_S, Progress, Stall, StallDetector, StallLines

AGREE_TIMEOUT_S = 600  # maximum difference between processes in the time to read their data, in seconds


class Store:
    """Key-value store of JAX's coordination service; each key is written once."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, value: str) -> None:
        """Write a value readable by all processes."""
        self._client.key_value_set(f"jax_moe_lb/{key}", value)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a value and return it."""
        try:
            return self._client.blocking_key_value_get(f"jax_moe_lb/{key}", int(timeout_s * 1000))
        except RuntimeError as error:
            raise UserError(f"{key} was not available within {timeout_s} s: {error}") from error


def shared_number(place: Place, store: Store, key: str, number: int) -> int:
    """Return the number of process 0 on all processes."""
    if place.process_id == 0:
        store.put(key, str(number))
        return number
    return int(store.get(key, AGREE_TIMEOUT_S))


def agree(place: Place, store: Store, options: dict) -> None:
    """Check that all processes have the same options; call it before any collective computation."""
    store.put(f"options/{place.process_id}", json.dumps(_flat(options)))
    if place.process_id == 0:
        # Process 0 alone compares the options, as all-to-all reads do not scale to thousands of processes.
        each = [json.loads(store.get(f"options/{i}", AGREE_TIMEOUT_S)) for i in range(place.num_processes)]
        store.put("difference", _difference(each))
    if difference := store.get("difference", AGREE_TIMEOUT_S):
        raise UserError(difference)


def _difference(each: list[dict]) -> str:
    """Describe the differing options and their values per process; return "" if all agree."""
    lines = []
    for name in dict.fromkeys(name for options in each for name in options):
        who: dict[str, list[int]] = {}
        for process, options in enumerate(each):
            who.setdefault(repr(options.get(name)), []).append(process)
        if len(who) > 1:
            lines.append(f"{name} is " + " and ".join(f"{value} on {_processes(ids)}" for value, ids in who.items()))
    return f"{'; '.join(lines)}; expected the same on all processes" if lines else ""


def _processes(ids: list[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def _flat(options: dict) -> dict:
    """Flatten nested dictionaries by joining names with dots, as in `--set section.key`."""
    flat: dict = {}
    for name, value in options.items():
        inner = _flat(value) if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {f"{name}.{key}": one for key, one in inner.items()}
    return flat


CAUSE_TIMEOUT_S = 3.0  # time for a failing process to learn about an earlier failure elsewhere, in seconds

# Time for process 0 to outlive the others, in seconds. JAX aborts processes whose coordinator exits first.
LINGER_S = 3.0
FAILED = 1


class PeerMonitor:
    """Context in which this process ends when another one ends, and reports its own failure to the others."""

    # Leaving the context without an error waits for all other processes to do so. With an error, the process exits
    # here: otherwise JAX would wait at interpreter exit for processes that never arrive.

    def __init__(
        self, place: Place, links: Links, progress: Progress | None = None, stall_timeout_s: float | None = None
    ) -> None:
        self.place, self.progress, self.stall_timeout_s = place, progress or Progress(), stall_timeout_s
        # The thread holding this lock ends the process, and only it prints the reason.
        self.name, self.links, self.deciding = place.name, links, threading.Lock()
        self.detector, self.stall_lines = StallDetector([self.name, *self.links]), StallLines(stall_timeout_s)
        self.stall: Stall | None = None
        # On other processes than 0: whether process 0 answered the last message.
        self.answered, self.left = True, threading.Event()

    def __enter__(self) -> "PeerMonitor":
        for name, link in self.links.items():
            threading.Thread(target=self._watch, args=(name, link), daemon=True).start()
        threading.Thread(target=self._watch_progress, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            # The shutdown waits for all processes; one killed before then is still detected.
            jax.distributed.shutdown()
            self.left.set()
            self._tell({"line": None})
            return
        refused = isinstance(error, UserError)
        if not refused:
            # A failing exchange may be caused by another process ending; its watcher thread then ends this process
            # first.
            time.sleep(CAUSE_TIMEOUT_S)
        with self.deciding:
            if refused:
                say(f"error: {error}")
            else:
                traceback.print_exception(error)
            code = USER_ERRORS if refused else FAILED
            self._tell({"line": f"{self.name} ended: {error or type(error).__name__}", "code": code})
            self._end(code)

    def _watch(self, name: str, link: Link) -> None:
        """Receive messages from another process until it ends, in a thread."""
        explained = False
        while (message := link.receive()) is not None:
            if "step" in message:
                self._hear(name, link, message)
                continue
            explained = True
            if message["line"] is not None:
                threading.Thread(target=self._follow, args=(message,), daemon=True).start()
        link.ended.set()
        if not explained:
            self._follow(
                {"line": f"lost connection to {name}; --resume continues from the newest checkpoint", "code": FAILED}
            )

    def _hear(self, name: str, link: Link, message: dict) -> None:
        """Record the step of another process; process 0 answers with its own one and the stall of the run."""
        self.detector.hear(name, message["step"])
        if self.place.process_id == 0:
            link.send({"step": self.progress.step, "stall": self.stall and asdict(self.stall)})
        else:
            self.stall = message["stall"] and Stall(**message["stall"])
            self.answered = True

    def _watch_progress(self) -> None:
        """Send the step of this process, report stalls, and end the run after the timeout, in a thread."""
        while not self.left.wait(BEAT_S):
            stall = self._look()
            limit_s = stall and (self.stall_timeout_s or stall.limit_s)
            if stall and limit_s and stall.age_s >= limit_s:
                self._give_up(stall)
            if (line := self.stall_lines.line(stall)) is not None:
                say(line)

    def _look(self) -> Stall | None:
        """Return the stall of the run; only process 0 knows the steps of all processes."""
        self.detector.hear(self.name, self.progress.step)
        found = self.detector.stall()
        if self.place.process_id == 0:
            self.stall = found
        elif self.answered:
            self.answered = False
            self._tell({"step": self.progress.step})
        elif self.detector.silent():
            return found
        return self.stall

    def _give_up(self, stall: Stall) -> None:
        """End the run because of a stall; a stopped process receives the reason when it continues."""
        message = {"line": f"{stall}; --resume continues from the newest checkpoint", "code": FAILED}
        if self.place.process_id != 0:
            self._tell(message)
        self._follow(message)

    def _follow(self, message: dict) -> None:
        """End this process because another one ended first."""
        with self.deciding:
            if self.place.process_id == 0:
                self._tell(message)
            if sys.stderr.isatty():
                # The progress line hides the cursor.
                sys.stderr.write("\x1b[?25h\n")
            say(f"error: {message['line']}")
            self._end(message["code"])

    def _tell(self, message: dict) -> None:
        for link in self.links.values():
            link.send(message)

    def _end(self, code: int) -> None:
        """End this process now; process 0 waits for the others to end first, as they need its coordinator."""
        if self.place.process_id == 0:
            until = time.monotonic() + LINGER_S
            for link in self.links.values():
                link.ended.wait(max(until - time.monotonic(), 0))
        os._exit(code)
