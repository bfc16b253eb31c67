"""Simulation of a system's step on a cluster: seconds, exposed seconds and bytes.

`Totals` sums tasks by stage and bytes by level.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.core.plan import imbalance, load, plain_plan
from jax_moe_lb.core.topology import check_host_counts
from jax_moe_lb.core.types import State
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.events import Timeline
from jax_moe_lb.sim.limits import check_entries, check_timeline
from jax_moe_lb.sim.memory import Memory, memory_of
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.network import level_bytes
from jax_moe_lb.sim.schedule import Scheduler
from jax_moe_lb.sim.work import LayerWork, layer_work, sampled_model, sampled_work, uniform_work
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch

BUBBLE = "pipeline bubble"
"""Stage in which a rank waits for the other stages of a pipeline."""


@dataclass(frozen=True)
class StageTime:
    """Totals of all tasks of one stage in a step."""

    busy_s: float = 0.0  # seconds of its tasks, each on its slowest rank
    exposed_s: float = 0.0  # seconds of its tasks on the critical path. All stages sum to the time of the step.
    bytes: float = 0.0  # bytes sent by its tasks, over all links of all levels

    @property
    def hidden_s(self) -> float:
        """Seconds overlapped with other stages, at least 0."""
        return max(self.busy_s - self.exposed_s, 0.0)

    def plus(self, other: "StageTime", times: float) -> "StageTime":
        """Add another total `times` times."""
        return StageTime(*(mine + times * its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Totals:
    """Totals of one or more microbatches."""

    step_s: float  # seconds of the microbatches in sequence
    stages: dict[str, StageTime] = field(default_factory=dict)  # totals of each stage by name
    # Bytes sent by all ranks over the links of each level, and to ranks of other groups
    level_bytes: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline, cluster: Cluster) -> "Totals":
        """Sum the tasks of one microbatch."""
        exposed, busy = timeline.exposed_s(), timeline.busy_s()
        sent = dict.fromkeys(busy, 0.0)
        names = [level.name for level in cluster.levels]
        by_level = dict.fromkeys(names, 0.0)
        for task in timeline.tasks:
            # Only exchanges have a flow.
            flows = {} if task.flow is None else dict(zip(names, level_bytes(task.flow, cluster), strict=True))
            if task.rank_bytes:
                flows = {task.streams[0].removesuffix(" links"): task.rank_bytes * cluster.num_ranks}
            for level, num_bytes in flows.items():
                by_level[level] = by_level.get(level, 0.0) + num_bytes
                sent[task.stage] += num_bytes
        stages = {name: StageTime(busy_s, exposed.get(name, 0.0), sent[name]) for name, busy_s in busy.items()}
        return cls(timeline.end_s, stages, by_level)

    def plus(self, other: "Totals", times: float) -> "Totals":
        """Add the totals of another microbatch `times` times."""
        stages = self.stages | {
            name: self.stages.get(name, StageTime()).plus(s, times) for name, s in other.stages.items()
        }
        levels = {name: self.level_bytes.get(name, 0.0) for name in (*self.level_bytes, *other.level_bytes)}
        sums = {name: sent + times * other.level_bytes.get(name, 0.0) for name, sent in levels.items()}
        return Totals(self.step_s + times * other.step_s, stages, sums)

    def waiting(self, seconds: float) -> "Totals":
        """Add the idle seconds of a rank in a pipeline."""
        if not seconds:
            return self
        return Totals(self.step_s + seconds, self.stages | {BUBBLE: StageTime(seconds, seconds)}, self.level_bytes)


States = list[list[State]]
"""Balancer state of every layer, one state per group of ranks."""


@dataclass(frozen=True)
class Report:
    """Times, bytes, imbalance and memory of a simulated step.

    Args:
        step_s: Time of the step, in seconds.
        stages: Totals per stage by its name, in the order of their first tasks.
        level_bytes: Bytes sent on all links per level, by its name.
        imbalance_before: `max / mean` of the load at home, mean over layers; 1 for uniform routing.
        imbalance_after: `max / mean` of the load under the plans, mean over layers. 1.05 or less is usual for planned
            quotas with enough slots.
        rounds: Maximum number of rounds over layers; 1 is usual under good plans.
        memory: Bytes on one rank, by part.
        timeline: Solved timeline of the last microbatch.
        states: Balancer states for the next step.
    """

    step_s: float
    stages: dict[str, StageTime]
    level_bytes: dict[str, float]
    imbalance_before: float
    imbalance_after: float
    rounds: int
    memory: Memory
    timeline: Timeline = field(repr=False)
    states: States = field(repr=False, default_factory=list)


def simulate(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    counts: Num[np.ndarray, "..."],
    *,
    migration: Migration = Migration(),
    step: Step = Step(),
    states: States | None = None,
) -> Report:
    """Simulate one step, planned by the system's own balancer for the given counts.

    Use it to predict the time of a system, and the stages hidden by overlap, on unavailable machines.

    Args:
        system: System, as in `moe`.
        model: Sizes of the layers. With groups beside the expert-parallel one, pass a rank's `Parallel.share`.
        cluster: Machine.
        counts: `[X, R, E]` for `X` layers, or `[R, E]`, nonnegative integers. Layer `i` of the model uses counts `i %
            X`, and none uses counts beyond the layers.
        migration: Gathers of expert domains (HybridEP); none by default.
        step: Passes of the step; forward and backward by default.
        states: `Report.states` of the step before, for balancers with history; None (default) before the first step.

    Returns:
        Times, bytes, imbalance and memory of the step.

    Raises:
        ValueError: The counts have another shape or dtype, are negative, exceed int32 or the size limit, or are
            rejected by the balancer.

    Examples:
        >>> from jax_moe_lb import greedy
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, skewed_counts
        >>> model = ModelShape(layers=2, hidden=1024, inner=2048, experts=16, per_token=2, tokens=1024)
        >>> cluster = Cluster((Links("gpu", 8, 450e9),))
        >>> report = simulate(greedy(), model, cluster, skewed_counts(model, 8, 2.0, 1, 0))
        >>> report.imbalance_after < 1.05 < report.imbalance_before, list(report.stages)[:3]
        (True, ['attention', 'counts', 'weights'])
    """
    counts = _checked(counts, model, cluster)
    works, after = _works(system, model, cluster, counts, migration, states)
    memory = memory_of(system, model, cluster, migration, step)
    return _report(_of_layers(works, model), model, cluster, step, _at_home(counts, model, cluster), memory, after)


def simulate_microbatch(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    counts: Num[np.ndarray, "..."],
    migration: Migration,
    step: Step,
    states: States | None,
) -> tuple[float, int]:
    """Return the seconds and the most rounds of one microbatch, without the totals and the memory of a report."""
    # The arguments are those of `simulate`.
    works, _ = _works(system, model, cluster, _checked(counts, model, cluster), migration, states)
    return _microbatch(_of_layers(works, model), model, cluster, step).end_s, max(work.rounds for work in works)


def _of_layers(found: Sequence[Any], model: ModelShape) -> list[Any]:
    """Return the entries of the model's layers, which cycle through the counts and so need no further plans."""
    return [found[at % len(found)] for at in range(model.layers)]


def _at_home(counts: Int[np.ndarray, "X R E"], model: ModelShape, cluster: Cluster) -> float:
    """Return the mean imbalance of the model's layers without balancing."""
    found = [float(imbalance(load(plain_plan(layer, cluster.topology())))) for layer in counts]
    return float(np.mean(_of_layers(found, model)))


def _works(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    counts: Int[np.ndarray, "X R E"],
    migration: Migration,
    states: States | None,
) -> tuple[list[LayerWork], States]:
    if states and len(states) != len(counts):
        raise ValueError(f"states has {len(states)} layers; expected the {len(counts)} of counts")
    before = states or itertools.repeat(None, len(counts))
    found = [
        layer_work(system, model, cluster, layer, migration, state) for layer, state in zip(counts, before, strict=True)
    ]
    return [work for work, _ in found], [state for _, state in found]


def replay(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    trace: Num[np.ndarray, "steps ..."],
    *,
    migration: Migration = Migration(),
    step: Step = Step(),
    states: States | None = None,
) -> Iterator[Report]:
    """Simulate every step of a trace, and carry the state of balancers with history.

    Use it with counts recorded by a training run.

    Args:
        system: System, as in `moe`.
        model: Sizes of the layers.
        cluster: Machine.
        trace: `[steps, X, R, E]` or `[steps, R, E]`, integer counts of every step.
        migration: Gathers of expert domains; none by default.
        step: Passes per step; forward and backward by default.
        states: Balancer states before the first step, as returned by `remembered`; None by default.

    Yields:
        The report per step.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.layer.systems import eplb
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, skewed_counts
        >>> model = ModelShape(layers=1, hidden=64, inner=128, experts=16, per_token=2, tokens=256)
        >>> trace = np.stack([skewed_counts(model, 8, 2.0, 1, 0)] * 4)
        >>> reports = list(replay(eplb(), model, Cluster((Links("gpu", 8, 450e9),)), trace))
        >>> [report.imbalance_after < report.imbalance_before for report in reports]  # EPLB plans from three steps
        [False, False, False, True]
    """
    for counts in trace:
        report = simulate(system, model, cluster, counts, migration=migration, step=step, states=states)
        states = report.states
        yield report


def keeps_history(system: System, model: ModelShape, cluster: Cluster) -> bool:
    """Return whether a system plans from earlier steps, so that a single step is not representative."""
    return bool(jax.tree.leaves(system.balancer.init((cluster.num_ranks, model.experts))))


def remembered(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    before: Iterable[Int[np.ndarray, "X R E"]],
    migration: Migration = Migration(),
) -> States | None:
    """Update the state of a balancer through earlier steps, without simulating their time."""
    states: States | None = None
    for counts in before:
        _, states = _works(system, model, cluster, counts[: model.layers], migration, states)
    return states


def mean_report(reports: Sequence[Report]) -> Report:
    """Average times, bytes and imbalances over steps.

    Args:
        reports: At least one report of the same system and cluster, as yielded by `replay`.

    Returns:
        A report with the means, the maximum of rounds, and the timeline and states of the last step.

    Raises:
        ValueError: `reports` is empty.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import plain
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, skewed_counts
        >>> model = ModelShape(layers=1, hidden=64, inner=128, experts=16, per_token=2, tokens=256)
        >>> trace = np.stack([skewed_counts(model, 8, imbalance, 1, 0) for imbalance in (1.0, 3.0)])
        >>> reports = list(replay(plain(), model, Cluster((Links("gpu", 8, 450e9),)), trace))
        >>> min(r.step_s for r in reports) < mean_report(reports).step_s < max(r.step_s for r in reports)
        True
    """
    if not reports:
        raise ValueError("reports is empty; expected at least one report")

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    names = dict.fromkeys(name for report in reports for name in report.stages)
    # A missing stage, such as `weights` in a step without replicas, counts as 0 in the mean.
    stages = {}
    for name in names:
        of_steps = (astuple(report.stages.get(name, StageTime())) for report in reports)
        stages[name] = StageTime(*map(mean, zip(*of_steps, strict=True)))
    return replace(
        reports[-1],
        step_s=mean(report.step_s for report in reports),
        stages=stages,
        level_bytes={name: mean(report.level_bytes[name] for report in reports) for name in reports[-1].level_bytes},
        imbalance_before=mean(report.imbalance_before for report in reports),
        imbalance_after=mean(report.imbalance_after for report in reports),
        rounds=max(report.rounds for report in reports),
    )


def simulate_uniform(
    model: ModelShape,
    cluster: Cluster,
    *,
    migration: Migration = Migration(),
    step: Step = Step(),
    dispatch: Dispatch = Direct(),
) -> Report:
    """Simulate a step of plain expert parallelism, or HybridEP, under uniform routing, on any number of ranks.

    Use it for machines too large for an array of counts; `work.py` describes the assumptions.

    Args:
        model: Sizes of the layers.
        cluster: Machine.
        migration: Gathers of expert domains (HybridEP); none by default.
        step: Passes of the step; forward and backward by default.
        dispatch: Transport of tokens, of one wave; `Direct()` by default.

    Returns:
        Times, bytes and memory of the step.

    Raises:
        ValueError: The experts are no multiple of the ranks, the cluster has jitter, or the dispatch has two phases.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links, Migration, ModelShape
        >>> model = ModelShape(layers=4, hidden=1024, inner=4096, experts=8000, per_token=2, tokens=4096)
        >>> cluster = Cluster((Links("dc", 1000, 1.25e9), Links("gpu", 8, 100e9)))
        >>> plain, hybrid = (simulate_uniform(model, cluster, migration=Migration(s)) for s in ((), (10, 1)))
        >>> plain.level_bytes["dc"] > 0 and "gather" in hybrid.stages
        True
    """
    work = uniform_work(model, cluster, migration, dispatch)
    memory = memory_of(System(dispatch=dispatch), model, cluster, migration, step)
    return _report([work] * model.layers, model, cluster, step, 1.0, memory, [])


def simulate_sample(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    sample: Cluster,
    counts: Num[np.ndarray, "..."],
    *,
    migration: Migration = Migration(),
    step: Step = Step(),
) -> Report:
    """Simulate a step on a machine with too many ranks for the planner, from a sample of the ranks."""
    # `sim/work.py` describes the method.
    part = sampled_model(model, cluster, sample)
    counts = _checked(counts, part, sample)
    works = [sampled_work(system, model, cluster, sample, layer, migration) for layer in counts]
    memory = memory_of(system, model, cluster, migration, step)
    found = _report(_of_layers(works, part), part, sample, step, _at_home(counts, part, sample), memory, [])
    # All members of the machine send as many bytes as those of the sample.
    times = cluster.num_ranks / sample.num_ranks
    stages = {name: replace(stage, bytes=stage.bytes * times) for name, stage in found.stages.items()}
    level_bytes = {name: sent * times for name, sent in found.level_bytes.items()}
    return replace(found, stages=stages, level_bytes=level_bytes)


def _microbatch(
    layers: Sequence[LayerWork], model: ModelShape, cluster: Cluster, step: Step, *, is_last: bool = True
) -> Timeline:
    """Return the solved timeline of one microbatch; `is_last` for the last one of a step."""
    # Under uniform routing, waves have a single row that stands for all ranks.
    timeline = Timeline(max(len(wave.rows) for work in layers for wave in work.waves))
    Scheduler(model, cluster, step, timeline, is_last).run(list(layers))
    return timeline


def _report(
    layers: Sequence[LayerWork],
    model: ModelShape,
    cluster: Cluster,
    step: Step,
    imbalance_before: float,
    memory: Memory,
    states: States,
) -> Report:
    timeline, parallel = _microbatch(layers, model, cluster, step), step.parallel
    totals = Totals.of(timeline, cluster)
    if parallel.microbatches > 1 or parallel.turns_waited:
        # All microbatches are equal, except that only the last one completes the gradients.
        before = Totals.of(_microbatch(layers, model, cluster, step, is_last=False), cluster)
        totals = totals.plus(before, float(parallel.microbatches - 1)).waiting(parallel.turns_waited * before.step_s)
    return Report(
        step_s=totals.step_s,
        stages=totals.stages,
        level_bytes=totals.level_bytes,
        imbalance_before=imbalance_before,
        imbalance_after=float(np.mean([imbalance(work.load) for work in layers])),
        rounds=max(work.rounds for work in layers),
        memory=memory,
        timeline=timeline,
        states=states,
    )


def _checked(counts: Any, model: ModelShape, cluster: Cluster) -> Int[np.ndarray, "X R E"]:
    counts = np.asarray(counts)
    if counts.ndim not in (2, 3) or counts.shape[-2:] != (cluster.num_ranks, model.experts) or not len(counts):
        raise ValueError(
            f"counts has shape {counts.shape}; expected [layers, R, E] with R = {cluster.num_ranks} "
            f"and E = {model.experts}, those of the cluster and the model"
        )
    if not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"counts has dtype {counts.dtype}; expected integers")
    layers = counts.reshape(-1, *counts.shape[-2:])
    check_entries(*layers.shape)
    check_timeline(model.layers, cluster.num_ranks)
    for layer in layers:
        check_host_counts(layer)
    # Planners count in int32; `check_host_counts` has checked that the sums fit. No layer uses further counts.
    return layers[: model.layers].astype(np.int32)
