"""Detection of a run without progress, and of the processes that it waits for.

Each process sends its step every `BEAT_S` seconds from a thread, even while its main thread compiles or waits for a
collective. A process without these messages is stopped, suspended or blocked; one with an earlier step than the others
is late. A stopped process may return, so by default the run waits for it without limit. If all processes respond, and
none begins a step for `LIMIT_S` seconds or for `LIMIT_INTERVALS` of the longest intervals, no step will end: the run
then ends, and can be resumed.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BEAT_S = 1.0  # seconds between messages of a process
SILENT_S = 5.0  # seconds without a message after which a process counts as stopped
REPORT_S = 20.0  # seconds without progress before the first line; each further line comes after twice the time
LIMIT_S = 1800.0  # minimum seconds without progress after which a run ends by default, if all processes respond

# The same as a multiple of the longest interval between two steps so far, compilation before step 1 included.
LIMIT_INTERVALS = 10


@dataclass
class Progress:
    """Last step begun by this process."""

    step: int = 0  # number of the step; 0 before the first one


@dataclass(frozen=True)
class Stall:
    """Time without progress of a run."""

    cause: str  # description of the awaited processes
    age_s: float  # seconds without progress
    step: int  # step of the foremost process
    limit_s: float | None = None  # seconds without progress after which the run ends by default; `None` for never

    def __str__(self) -> str:
        return f"{self.cause} for {self.age_s:.0f} s, " + (f"at step {self.step}" if self.step else "before step 1")


class StallDetector:
    """Steps of all processes and the times of their last messages; methods may be called in several threads."""

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.looked = self.moved = clock()
        self.heard = dict.fromkeys(names, self.moved)
        self.steps = dict.fromkeys(self.heard, 0)
        self.gap_s = self.longest_s = 0.0

    def hear(self, name: str, step: int) -> None:
        """Record a message of a process."""
        now, before = self.clock(), self.heard[name]
        if step > self.step:
            self.gap_s, self.moved = now - self.moved, now
            self.longest_s = max(self.longest_s, self.gap_s)
        elif now - before > SILENT_S:
            # The return of a stopped process is progress.
            self.moved = now
        self.heard[name], self.steps[name] = now, step

    @property
    def step(self) -> int:
        """Step of the foremost process."""
        return max(self.steps.values())

    def silent(self) -> list[str]:
        """Return the processes without messages for `SILENT_S` seconds."""
        now = self.clock()
        return [name for name, at in self.heard.items() if now - at > SILENT_S]

    def stall(self) -> Stall | None:
        """Return the stall of the run; call it every `BEAT_S` seconds."""
        # The result is `None` before step 1, while all processes compile, and for three times the duration of the last
        # step if all processes respond.
        now, before = self.clock(), self.looked
        self.looked = now
        if now - before > SILENT_S:
            # This process was stopped itself: its sockets contain the unread messages of the others.
            self.heard, self.moved = dict.fromkeys(self.heard, now), now
        if silent := self.silent():
            since = max(self.moved, *(self.heard[name] for name in silent))
            return Stall(f"waiting for {_several(silent)}", now - since, self.step)
        age_s, limit_s = now - self.moved, max(LIMIT_S, LIMIT_INTERVALS * self.longest_s)
        if late := [name for name, step in self.steps.items() if step < self.step]:
            return Stall(f"waiting for {_several(late)}", age_s, self.step, limit_s)
        if not self.step or age_s < 3 * self.gap_s:
            return None
        return Stall(f"waiting, although all {len(self.steps)} processes respond,", age_s, self.step, limit_s)


def _several(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class StallLines:
    """Lines about stalls, at increasing intervals."""

    def __init__(self, timeout_s: float | None) -> None:
        self.first_s = self.due_s = min(REPORT_S, timeout_s / 2 if timeout_s else REPORT_S)
        self.shown: Stall | None = None

    def line(self, stall: Stall | None) -> str | None:
        """Return the line about the present state, `None` if there is nothing new to report."""
        if self.shown and (stall is None or stall.age_s < self.shown.age_s):
            shown, self.shown, self.due_s = self.shown, None, self.first_s
            return f"the run continues: {shown.cause} took more than {shown.age_s:.0f} s"
        if stall is None or stall.age_s < self.due_s:
            return None
        # A stall among responding processes is detected late, after several intervals.
        while self.due_s <= stall.age_s:
            self.due_s *= 2
        self.shown = stall
        return str(stall)
