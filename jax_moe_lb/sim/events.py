"""Timeline of tasks on streams, with fair sharing of links between transfers.

A task starts after its dependencies, on free streams. Overlapping transfers share links with max-min fairness, level by
level, and so take longer. The model assumes that the busiest links of two transfers are the same links.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from jax_moe_lb.sim.network import Flow

TINY = 1e-300
"""Lower bound of a transfer's duration, below the seconds of any byte, to avoid division by 0."""

FULL = 1 - 1e-9
"""Share from which a level counts as full and a transfer as at full speed, with a margin for rounding errors."""


@dataclass(frozen=True)
class Transfer:
    """Demand of an exchange for shared links."""

    latency_s: float  # seconds before its bytes move
    busy_s: float  # seconds of its bytes without other transfers on the links
    level_s: tuple[float, ...]  # per level, the seconds of its busiest link within `busy_s`


def fair_parts(transfers: Sequence[Transfer]) -> list[float]:
    """Compute the share of the full speed per transfer, under max-min fairness."""
    # All shares rise together; a transfer's share stops when one of its levels is full.
    # Demand of each transfer at full speed per level; 0 for transfers without bytes.
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
    return [sum(part * need[level] for part, need in zip(parts, needs, strict=True)) for level in range(len(needs[0]))]


def _uses(need: list[float], full: list[bool]) -> bool:
    return any(level and is_full for level, is_full in zip(need, full, strict=True))


PerRank = Float[np.ndarray, "R"]
"""One entry per rank, or a single entry if all ranks behave the same."""


@dataclass(eq=False)
class Task:
    """Task on every rank, from `start` to `end`."""

    stage: str  # name in reports
    streams: tuple[str, ...]  # occupied streams and used links
    seconds_each: PerRank | float  # duration without link sharing, in seconds: one number, or one per rank
    layer: int = -1  # index of its layer; -1 for none
    together: bool = False  # if True, all ranks start at the same time, as in an exchange
    flow: Flow | None = None  # bytes on links, or None
    rows: np.ndarray | None = None  # token copies served by each rank, or None
    transfer: Transfer | None = None  # demand for links shared with overlapping transfers, or None
    rank_bytes: float = 0.0  # bytes sent by each rank to ranks of other groups, over links outside any flow
    # Tasks to wait for: its dependencies, and the previous tasks of its streams; set by `Timeline.add`
    before: tuple["Task", ...] = field(default=(), repr=False)
    # Start on each rank, in seconds since the start of the step; set by `Timeline.solve`
    start: PerRank = field(default_factory=lambda: np.zeros(0))
    end: PerRank = field(default_factory=lambda: np.zeros(0))  # end on each rank, likewise

    @property
    def seconds(self) -> float:
        """Duration on the slowest rank, in seconds."""
        return float((self.end - self.start).max())

    def begin(self, num_ranks: int) -> None:
        """Set the start from the ends of the tasks before, and the end if the task shares no links."""
        start: PerRank = np.zeros(num_ranks)
        for task in self.before:
            start = np.maximum(start, task.end)
        self.start = np.full(num_ranks, start.max()) if self.together else start
        if self.transfer is None:
            self.end = self.start + self.seconds_each


@dataclass
class Timeline:
    """Tasks of a step, in the order of the streams."""

    num_ranks: int  # length of the tasks' arrays: `R`, or 1 if all ranks behave the same
    tasks: list[Task] = field(default_factory=list)  # tasks so far
    _last: dict[str, Task] = field(default_factory=dict, repr=False)

    def add(self, task: Task, after: tuple[Task, ...] = (), links: tuple[str, ...] = ()) -> Task:
        """Append a task to the streams and links, after others."""
        used = task.streams if task.transfer is not None else task.streams + links
        # A stream runs its tasks in sequence, in the order of these calls.
        task.before = (*after, *(self._last[stream] for stream in used if stream in self._last))
        task.streams += links
        self.tasks.append(task)
        self._last |= dict.fromkeys(used, task)
        return task

    def solve(self) -> None:
        """Compute the start and end of every task."""
        if any(task.transfer is not None for task in self.tasks):
            share_links(self.tasks, self.num_ranks)
            return
        for task in self.tasks:
            task.begin(self.num_ranks)

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step to the end of the last task."""
        return max((float(task.end.max()) for task in self.tasks), default=0.0)

    def critical_path(self) -> list[tuple[Task, int]]:
        """Return the critical path in order and without gaps: each task with the rank on which it ended last."""
        if not self.tasks:
            return []
        task = max(self.tasks, key=lambda task: task.end.max())
        path = [(task, int(np.argmax(task.end)))]
        while task.before:
            rank = path[-1][1]
            # If ranks start together, the last of all ranks was critical, else the last task of the same rank.
            if task.together:
                task = max(task.before, key=lambda one: one.end.max())
                rank = int(np.argmax(task.end))
            else:
                task = max(task.before, key=lambda one: one.end[rank])
            path.append((task, rank))
        return path[::-1]

    def exposed_s(self) -> dict[str, float]:
        """Sum the seconds per stage on the critical path; all stages sum to the time of the step."""
        exposed: dict[str, float] = defaultdict(float)
        for task, rank in self.critical_path():
            exposed[task.stage] += float(task.end[rank] - task.start[rank])
        return dict(exposed)

    def busy_s(self) -> dict[str, float]:
        """Sum the seconds of each stage's tasks, each on the slowest rank."""
        busy: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            busy[task.stage] += task.seconds
        return dict(busy)


def share_links(tasks: list[Task], num_ranks: int) -> None:
    """Compute the start and end of tasks whose transfers share links."""
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
            # Compare with the end itself, because the remaining seconds have rounding errors.
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
