"""Tasks run on streams: a task starts when what it depends on is done and its streams are free."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from jax_moe_lb.sim.network import Flow

PerRank = Float[np.ndarray, "R"]
"""It has one entry for every rank, or a single one where all ranks do the same."""


@dataclass(frozen=True, eq=False)
class Task:
    """A task happens on every rank, from `start` to `end`.

    Args:
        stage: its name in reports.
        layer: the layer that it belongs to; -1 for none.
        streams: the streams that it occupies.
        start: when it starts on each rank, in seconds since the step began.
        end: when it ends on each rank, in seconds since the step began.
        before: the tasks that it waited for: dependencies, and what its streams did before.
        together: whether no rank starts before all can, as in an exchange.
        flow: the bytes on links, if it sends any.
        rows: the token copies that each rank serves, if it serves any.
    """

    stage: str
    layer: int
    streams: tuple[str, ...]
    start: PerRank
    end: PerRank
    before: tuple["Task", ...] = field(repr=False)
    together: bool
    flow: Flow | None
    rows: np.ndarray | None = None

    @property
    def seconds(self) -> float:
        """Tells the seconds on the rank that it takes longest on."""
        return float((self.end - self.start).max())


@dataclass
class Timeline:
    """A timeline has all tasks of a step, in the order in which streams take them.

    Args:
        num_ranks: the length of the arrays of tasks: `R`, or 1 where all ranks do the same.
        tasks: the tasks so far.
    """

    num_ranks: int
    tasks: list[Task] = field(default_factory=list)
    _last: dict[str, Task] = field(default_factory=dict, repr=False)

    def add(
        self,
        stage: str,
        streams: tuple[str, ...],
        seconds: Any,
        after: tuple[Task, ...] = (),
        *,
        layer: int = -1,
        together: bool = False,
        flow: Flow | None = None,
        rows: np.ndarray | None = None,
    ) -> Task:
        """Adds a task behind all those that its streams have.

        Args:
            stage: its name in reports.
            streams: the streams that it occupies.
            seconds: how long it takes: a number, or one for every rank.
            after: the tasks that must be done before.
            layer: the layer that it belongs to; -1 for none.
            together: whether no rank starts before all can.
            flow: the bytes on links, if it sends any.
            rows: the token copies that each rank serves, if it serves any.
        """
        # A stream does one task after the other, in the order of these calls.
        before = (*after, *(self._last[stream] for stream in streams if stream in self._last))
        start: PerRank = np.zeros(self.num_ranks)
        for task in before:
            start = np.maximum(start, task.end)
        if together:
            start = np.full(self.num_ranks, start.max())
        task = Task(stage, layer, streams, start, start + seconds, before, together, flow, rows)
        self.tasks.append(task)
        self._last |= dict.fromkeys(streams, task)
        return task

    @property
    def end_s(self) -> float:
        """Tells the seconds from the start of the step until the last task is done."""
        return max((float(task.end.max()) for task in self.tasks), default=0.0)

    def critical_path(self) -> list[tuple[Task, int]]:
        """Finds the tasks that the end waited for, in order and without a gap, each with the rank that was last."""
        if not self.tasks:
            return []
        task = max(self.tasks, key=lambda task: task.end.max())
        path = [(task, int(np.argmax(task.end)))]
        while task.before:
            rank = path[-1][1]
            # Where ranks start together the last of them all was waited for, else the same rank's own last task.
            if task.together:
                task = max(task.before, key=lambda one: one.end.max())
                rank = int(np.argmax(task.end))
            else:
                task = max(task.before, key=lambda one: one.end[rank])
            path.append((task, rank))
        return path[::-1]

    def exposed_s(self) -> dict[str, float]:
        """Sums up the seconds of each stage on the critical path. They add up to the time of the step."""
        exposed: dict[str, float] = defaultdict(float)
        for task, rank in self.critical_path():
            exposed[task.stage] += float(task.end[rank] - task.start[rank])
        return dict(exposed)

    def busy_s(self) -> dict[str, float]:
        """Sums up the seconds of each stage's tasks, each on its slowest rank."""
        busy: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            busy[task.stage] += task.seconds
        return dict(busy)
