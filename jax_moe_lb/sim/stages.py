"""`Totals` sums up the tasks of microbatches by their stages, and the bytes by the links that carry them."""

from dataclasses import dataclass, field

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.events import Timeline
from jax_moe_lb.sim.network import level_bytes

BUBBLE = "pipeline bubble"
"""The stage in which a rank waits for the others of a pipeline."""


@dataclass(frozen=True)
class StageTime:
    """Sums up all tasks of one stage in a step.

    Args:
        busy_s: the seconds that they take, each on its slowest rank.
        exposed_s: the seconds of them on the critical path. Over all stages these add up to the time of the step.
        bytes: the bytes that they send on all links of all levels together.
    """

    busy_s: float = 0.0
    exposed_s: float = 0.0
    bytes: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Returns the seconds that other stages hide; at least 0."""
        return max(self.busy_s - self.exposed_s, 0.0)

    def plus(self, other: "StageTime", times: float) -> "StageTime":
        """Adds another one so many times."""
        return StageTime(
            self.busy_s + times * other.busy_s,
            self.exposed_s + times * other.exposed_s,
            self.bytes + times * other.bytes,
        )


@dataclass(frozen=True)
class Totals:
    """Has the sums of some microbatches.

    Args:
        step_s: their seconds, one after the other.
        stages: by name.
        level_bytes: what all ranks together sent on the links of each level, and to ranks of other groups.
    """

    step_s: float
    stages: dict[str, StageTime] = field(default_factory=dict)
    level_bytes: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline, cluster: Cluster) -> "Totals":
        """Sums up one microbatch.

        Args:
            timeline: its tasks, solved.
            cluster: the machine that they ran on.
        """
        exposed, busy = timeline.exposed_s(), timeline.busy_s()
        sent = dict.fromkeys(busy, 0.0)
        names = [level.name for level in cluster.levels]
        by_level = dict.fromkeys(names, 0.0)
        for task in timeline.tasks:
            # Products and the planner send nothing.
            flows = {} if task.flow is None else dict(zip(names, level_bytes(task.flow, cluster), strict=True))
            if task.rank_bytes:
                flows = {task.streams[0].removesuffix(" links"): task.rank_bytes * cluster.num_ranks}
            for level, num_bytes in flows.items():
                by_level[level] = by_level.get(level, 0.0) + num_bytes
                sent[task.stage] += num_bytes
        stages = {name: StageTime(busy_s, exposed.get(name, 0.0), sent[name]) for name, busy_s in busy.items()}
        return cls(timeline.end_s, stages, by_level)

    def plus(self, other: "Totals", times: float) -> "Totals":
        """Adds the same microbatch so many times."""
        stages = self.stages | {
            name: self.stages.get(name, StageTime()).plus(s, times) for name, s in other.stages.items()
        }
        levels = {name: self.level_bytes.get(name, 0.0) for name in (*self.level_bytes, *other.level_bytes)}
        sums = {name: sent + times * other.level_bytes.get(name, 0.0) for name, sent in levels.items()}
        return Totals(self.step_s + times * other.step_s, stages, sums)

    def waiting(self, seconds: float) -> "Totals":
        """Adds what a rank waits for the others of a pipeline."""
        if not seconds:
            return self
        return Totals(self.step_s + seconds, self.stages | {BUBBLE: StageTime(seconds, seconds)}, self.level_bytes)
