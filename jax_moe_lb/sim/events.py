"""A timeline of tasks on streams, with fair sharing of links between transfers.

A task starts when its dependencies are done and its streams are free. Transfers that overlap share links with max-min
fairness, level by level, and so take longer. The busiest links of two transfers count as the same ones.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from jax_moe_lb.sim.network import Flow

TINY = 1e-300
"""Below the seconds of any byte."""

FULL = 1 - 1e-9
"""A level counts as full from here on, and a transfer as at its own speed: sums are off by rounding errors."""


@dataclass(frozen=True)
class Transfer:
    """A transfer is what an exchange needs of links that it shares with others.

    Args:
        latency_s: the seconds before its bytes move.
        busy_s: the seconds in which they move if it has the links for itself.
        level_s: for each level the seconds that its busiest link needs of these.
    """

    latency_s: float
    busy_s: float
    level_s: tuple[float, ...]


def fair_parts(transfers: Sequence[Transfer]) -> list[float]:
    """Returns the part of its own speed that each transfer gets: all rise together until a level of theirs is full.

    Args:
        transfers: those that move bytes at the same time, of the same levels.

    Examples:
        >>> alone, both = Transfer(0.0, 1.0, (1.0, 0.0)), Transfer(0.0, 1.0, (1.0, 0.25))
        >>> fair_parts([alone]), fair_parts([alone, both])
        ([1.0], [0.5, 0.5])
    """
    # What a transfer at full speed takes of each level; one without bytes takes nothing.
    needs = [[level / max(one.busy_s, TINY) for level in one.level_s] for one in transfers]
    parts, rising = [0.0] * len(needs), set(range(len(needs)))
    while rising:
        wanted = [sum(needs[one][level] for one in rising) for level in range(len(needs[0]))]
        room = [(1 - taken) / want for taken, want in zip(_taken(parts, needs), wanted, strict=True) if want]
        more = max(min([*room, *(1 - parts[one] for one in rising)]), 0.0)
        for one in rising:
            parts[one] += more
        full = [taken >= FULL for taken in _taken(parts, needs)]
        rising = {one for one in rising if parts[one] < FULL and not _uses(needs[one], full)}
    return parts


def _taken(parts: list[float], needs: list[list[float]]) -> list[float]:
    """Sums up what is taken of each level."""
    return [sum(part * need[level] for part, need in zip(parts, needs, strict=True)) for level in range(len(needs[0]))]


def _uses(need: list[float], full: list[bool]) -> bool:
    return any(level and is_full for level, is_full in zip(need, full, strict=True))


PerRank = Float[np.ndarray, "R"]
"""It has one entry for every rank, or a single one where all ranks do the same."""


@dataclass(eq=False)
class Task:
    """A task happens on every rank, from `start` to `end`.

    Args:
        stage: its name in reports.
        layer: the layer that it belongs to; -1 for none.
        streams: the streams that it occupies, and the links that it uses.
        seconds_each: how long it takes if nothing slows it down: a number, or one for every rank.
        before: the tasks that it waits for: dependencies, and what its streams did before.
        together: whether no rank starts before all can, as in an exchange.
        flow: the bytes on links, if it sends any.
        rows: the token copies that each rank serves, if it serves any.
        transfer: what it needs of links, if it shares them with what overlaps.
        rank_bytes: the bytes that each rank sends to ranks of other groups, by links that no flow knows.
        start: when it starts on each rank, in seconds since the step began; known once the timeline is solved.
        end: when it ends on each rank, likewise.
    """

    stage: str
    layer: int
    streams: tuple[str, ...]
    seconds_each: Any
    before: tuple["Task", ...] = field(repr=False)
    together: bool
    flow: Flow | None
    rows: np.ndarray | None = None
    transfer: Transfer | None = None
    rank_bytes: float = 0.0
    start: PerRank = field(default_factory=lambda: np.zeros(0))
    end: PerRank = field(default_factory=lambda: np.zeros(0))

    @property
    def seconds(self) -> float:
        """Tells the seconds on the rank that it takes longest on."""
        return float((self.end - self.start).max())

    def begin(self, num_ranks: int) -> None:
        """Sets the start, once all before it have ended, and the end if it shares nothing.

        Args:
            num_ranks: the length of both.
        """
        start: PerRank = np.zeros(num_ranks)
        for task in self.before:
            start = np.maximum(start, task.end)
        self.start = np.full(num_ranks, start.max()) if self.together else start
        if self.transfer is None:
            self.end = self.start + self.seconds_each


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
        links: tuple[str, ...] = (),
        transfer: Transfer | None = None,
        rank_bytes: float = 0.0,
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
            links: the links that it uses; it waits for them as for a stream unless it is a transfer.
            transfer: what it needs of links that it shares, instead of `seconds`.
            rank_bytes: the bytes that each rank sends to ranks of other groups.
        """
        used = streams if transfer is not None else streams + links
        # A stream does one task after the other, in the order of these calls.
        before = (*after, *(self._last[stream] for stream in used if stream in self._last))
        task = Task(stage, layer, streams + links, seconds, before, together, flow, rows, transfer, rank_bytes)
        self.tasks.append(task)
        self._last |= dict.fromkeys(used, task)
        return task

    def solve(self) -> None:
        """Finds when every task starts and ends."""
        if any(task.transfer is not None for task in self.tasks):
            share_links(self.tasks, self.num_ranks)
            return
        for task in self.tasks:
            task.begin(self.num_ranks)

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


def share_links(tasks: list[Task], num_ranks: int) -> None:
    """Finds when tasks start and end if transfers share links.

    Args:
        tasks: all of them, in an order in which each comes behind what it waits for.
        num_ranks: the length of their arrays.
    """
    waits = {id(task): len(task.before) for task in tasks}
    next_ones: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        for earlier in task.before:
            next_ones[id(earlier)].append(task)
    ready = [task for task in tasks if not task.before]
    coming: list[tuple[float, int, Task]] = []
    moving: dict[int, tuple[Task, float]] = {}
    now, order = 0.0, itertools.count()

    def done(task: Task) -> None:
        for later in next_ones[id(task)]:
            waits[id(later)] -= 1
            if not waits[id(later)]:
                ready.append(later)

    while ready or coming or moving:
        while ready:
            task = ready.pop()
            task.begin(num_ranks)
            if task.transfer is None:
                done(task)
            else:
                heapq.heappush(coming, (float(task.start.max()) + task.transfer.latency_s, next(order), task))
        parts = fair_parts([task.transfer for task, _ in moving.values() if task.transfer is not None])
        ends = [now + left / part for (_, left), part in zip(moving.values(), parts, strict=True)]
        until = min([*ends, coming[0][0] if coming else math.inf])
        for (key, (task, left)), part, end in zip(list(moving.items()), parts, ends, strict=True):
            # Compared with the end itself, as what is left would be off by rounding errors.
            if end > until:
                moving[key] = task, left - part * (until - now)
                continue
            del moving[key]
            task.end = np.full(num_ranks, until)
            done(task)
        now = until
        while coming and coming[0][0] <= now:
            task = heapq.heappop(coming)[2]
            if task.transfer is not None:
                moving[id(task)] = task, task.transfer.busy_s
