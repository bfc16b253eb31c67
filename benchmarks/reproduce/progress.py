"""Progress of `benchmarks.reproduce`, with an estimate of the time left from earlier runs."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.render.results import Table, Value

FILE = Path(__file__).parent / "seconds.json"
"""Times of the last run of each benchmark, by size."""

UNKNOWN_S = 60.0
"""Estimate for a benchmark without an earlier run."""


class Seconds(NamedTuple):
    """Times of one run."""

    wall: float
    cpu: float


@dataclass
class Pace:
    """Times of benchmarks, from earlier runs and from this one."""

    size: str
    names: Sequence[str]
    file: Path = FILE
    known: dict[str, Seconds] = field(init=False)
    ended: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.known = {name: Seconds(*times) for name, times in found.get(self.size, {}).items()}

    def expected_s(self, name: str) -> float:
        """Return the time of the last run, without its waits for a busy machine, in seconds."""
        return min(self.known[name]) if name in self.known else UNKNOWN_S

    def will_take_s(self, name: str) -> float:
        """Estimate the time of a benchmark at the pace of this run, in seconds."""
        return self.expected_s(name) * self.slowdown

    def leave_out(self, name: str) -> None:
        """Remove a benchmark from this run."""
        self.names = [other for other in self.names if other != name]

    @property
    def total_s(self) -> float:
        """Expected time of all benchmarks of this run, in seconds."""
        return math.fsum(map(self.expected_s, self.names))

    def done_s(self, running: str = "", elapsed_s: float = 0.0) -> float:
        """Return the expected time of the part that is done, in seconds."""
        done = math.fsum(self.expected_s(name) for name in self.ended)
        # A benchmark that takes longer than before is nearly done.
        return done + (min(elapsed_s / self.slowdown, 0.95 * self.expected_s(running)) if running else 0.0)

    @property
    def slowdown(self) -> float:
        """Time of the ended benchmarks over that of their last runs; 1 before the first end."""
        before = math.fsum(self.expected_s(name) for name in self.ended)
        return math.fsum(self.ended.values()) / before if before else 1.0

    def left_s(self, running: str = "", elapsed_s: float = 0.0) -> float:
        """Estimate the time left, in seconds; arguments as in `done_s`."""
        return (self.total_s - self.done_s(running, elapsed_s)) * self.slowdown

    def end(self, name: str, seconds: Seconds | None, elapsed_s: float) -> None:
        """Note the end of a benchmark, and its times for later runs."""
        self.ended[name] = elapsed_s
        if seconds is None:
            return
        found = json.loads(self.file.read_text()) if self.file.exists() else {}
        of_size = found.setdefault(self.size, {}) | {name: list(seconds)}
        found[self.size] = dict(sorted(of_size.items()))
        lines = ",\n".join(
            f' "{size}": {{\n' + ",\n".join(f'  "{run}": {json.dumps(times)}' for run, times in of.items()) + "\n }"
            for size, of in found.items()
        )
        self.file.write_text(f"{{\n{lines}\n}}\n")

    def table(self) -> Table:
        """Return the times of the last runs, and their sum."""
        known = [(name, self.known[name]) for name in self.names if name in self.known]
        rows: list[list[Value]] = [[name, *seconds] for name, seconds in known]
        sums = [math.fsum(times) for times in zip(*(seconds for _, seconds in known), strict=True)] or [0.0, 0.0]
        unknown = ", ".join(name for name in self.names if name not in self.known)
        return Table(
            {"benchmark": "", "wall s": ".0f", "CPU s": ".0f"},
            [*rows, ["all of these", *sums]],
            notes=[f"Never timed: {unknown}."] if unknown else [],
        )


@dataclass
class Shown:
    """Progress on the screen."""

    pace: Pace
    bar: Progress

    def __post_init__(self) -> None:
        self.task = self.bar.add_task("", total=self.pace.total_s, left="")

    def during(self, name: str) -> Callable[[float], None]:
        """Return the function to call while a benchmark runs, with its seconds so far."""

        def tick(elapsed_s: float) -> None:
            left = f"{math.ceil(self.pace.left_s(name, elapsed_s) / 60)} min left"
            self.bar.update(self.task, completed=self.pace.done_s(name, elapsed_s), description=name, left=left)

        tick(0.0)
        return tick

    def leave_out(self, name: str, why_not: str) -> None:
        """Print why a benchmark is left out."""
        self.pace.leave_out(name)
        self.bar.update(self.task, total=self.pace.total_s)
        self.bar.console.print(f"{name}: {why_not}", highlight=False, soft_wrap=True)

    def end(self, name: str, how: str, seconds: Seconds | None) -> None:
        """Print the end of a benchmark, and the time left."""
        elapsed_s = self.pace.expected_s(name) if seconds is None else seconds.wall
        self.pace.end(name, seconds, elapsed_s)
        left = math.ceil(self.pace.left_s() / 60)
        self.bar.update(self.task, completed=self.pace.done_s(), left=f"{left} min left")
        self.bar.console.print(f"{name}: {how}; {left} min left", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def shown_progress(pace: Pace) -> Iterator[Shown]:
    """Show a bar on a terminal, and one line for each ended benchmark anywhere."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}")
    with Progress(*columns) as bar:
        bar.disable = not bar.console.is_terminal
        yield Shown(pace, bar)
