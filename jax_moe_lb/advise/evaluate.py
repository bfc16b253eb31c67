"""Evaluation of choices on workloads, by one layer or by whole steps.

A `Workload` is a step of synthetic counts in one of several shapes, or of a recorded trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.advise.choice import Candidate, Choice
from jax_moe_lb.planners.relocation import plan_relocation
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.drift import Drift
from jax_moe_lb.sim.loads import LoadShape, drifting_counts, skewed_counts
from jax_moe_lb.sim.memory import Memory, memory_of
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.network import seconds
from jax_moe_lb.sim.planner_times import needs_counts, planning_s
from jax_moe_lb.sim.run import (
    Report,
    States,
    keeps_history,
    remembered,
    simulate,
    simulate_microbatch,
    simulate_sample,
    simulate_uniform,
)
from jax_moe_lb.sim.work import shared_work

BEFORE = 4
"""Number of steps before a workload. The plan of a balancer with a period of three steps is then one step old, the
middle of its possible ages."""

EARLIER = (-75, -50, -25)
"""Earlier steps from which homes are planned. Homes move every 50 steps; on average they are 25 steps old, planned from
the 50 steps before.
"""


ALIKE = (LoadShape.RANKS, LoadShape.HOT, LoadShape.ZIPF)
"""Load shapes with the same counts if each rank has one expert."""


@dataclass(frozen=True)
class Workload:
    """Routing of one step on which systems are compared."""

    name: str  # name in messages
    # `[X, R, E]` int32 for `X` layers; experts are in the order of their homes without relocation. None stands for
    # uniform routing on any number of ranks.
    counts: Int[np.ndarray, "X R E"] | None
    # Load of every expert before this step, from which new homes are planned. None (default) keeps the homes.
    earlier: Num[np.ndarray, "X E"] | None = None
    # Counts of the steps directly before, for balancers with history. None (default) if unknown.
    before: Int[np.ndarray, "steps X R E"] | None = None

    def first_layer(self, num_ranks: int | None = None, factor: float = 1) -> "Workload":
        """Return the first layer on the first ranks, scaled to another number of tokens with the same popularity."""

        def part(counts: Int[np.ndarray, "*steps X R E"] | None) -> Int[np.ndarray, "*steps 1 r E"] | None:
            # Rounding changes each entry by at most one token, so the skew remains.
            return None if counts is None else np.rint(counts[..., :1, :num_ranks, :] * factor).astype(np.int32)

        return Workload(
            self.name, part(self.counts), None if self.earlier is None else self.earlier[:1], part(self.before)
        )


def drawn_workloads(
    model: ModelShape,
    num_ranks: int,
    imbalance: float,
    layers: int,
    shapes: Sequence[LoadShape],
    draws: int,
    seed: int,
    drift: Drift = Drift(),
) -> list[Workload]:
    """Sample workloads of several shapes with the same imbalance."""
    if imbalance <= 1:
        even = skewed_counts(model, num_ranks, 1.0, layers, seed)
        return [Workload("even", even, even.sum(1), np.stack([even] * BEFORE))]
    workloads, refusals, times = [], [], (*EARLIER, *range(-BEFORE, 1))
    if model.experts == num_ranks:
        first = next((shape for shape in shapes if shape in ALIKE), None)
        shapes = [shape for shape in shapes if shape is first or shape not in ALIKE]
    for draw in range(draws):
        for shape in shapes:
            try:
                steps = drifting_counts(model, num_ranks, times, layers, drift, imbalance, seed + draw, shape)
            except ValueError as error:
                refusals.append(error)
                continue
            earlier = steps[: len(EARLIER)].sum((0, 2), dtype=np.int64)
            workloads.append(Workload(f"{shape.value}, draw {draw + 1}", steps[-1], earlier, steps[len(EARLIER) : -1]))
    if not workloads:
        raise refusals[0]
    return workloads


def recorded_workloads(
    steps: Sequence[int], recorded: Int[np.ndarray, "steps layers R E"], most_steps: int, most_layers: int
) -> list[Workload]:
    """Take evenly spaced workloads from the second half of a trace; homes are planned from the first half."""
    half = len(steps) // 2
    counts = recorded[:, _spread(0, recorded.shape[1], most_layers)]
    earlier = counts[:half].sum((0, 2), dtype=np.int64) if half else None
    # Either all workloads have steps before them or none has, as in a short trace.
    knows = half >= BEFORE
    return [
        Workload(f"step {steps[at]}", counts[at], earlier, counts[at - BEFORE : at] if knows else None)
        for at in _spread(half, len(counts), most_steps)
    ]


def _spread(start: int, end: int, most: int) -> list[int]:
    """Choose at most `most` evenly spaced integers from `start` to below `end`."""
    return sorted({int(at) for at in np.linspace(start, end - 1, min(most, end - start))})


@dataclass
class Evaluator:
    """Cached simulation of choices for one model, machine and step."""

    model: ModelShape  # sizes of the layers
    cluster: Cluster  # machine
    step: Step  # passes of a step
    # Part of the machine whose counts the workloads have; None (default) for counts of all ranks
    sample: Cluster | None = None
    # Function called with the progress, as text, before every simulation; None (default) for none
    tell: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    # No arguments: `dataclasses.replace` begins with empty caches.
    _simulations: int = field(default=0, init=False, repr=False, compare=False)
    _built: dict[Choice, Candidate] = field(default_factory=dict, init=False, repr=False, compare=False)
    _memories: dict[Choice, Memory] = field(default_factory=dict, init=False, repr=False, compare=False)
    _seen: dict[tuple[Choice, str], tuple[float, int]] = field(default_factory=dict, init=False, repr=False)
    _placed: dict[tuple[str, int], Int[np.ndarray, "X R E"]] = field(default_factory=dict, init=False, repr=False)

    def glance(self, choice: Choice, workload: Workload) -> float:
        """Simulate one layer of the model with the first layer of a workload."""
        return self._glanced(choice, workload)[0]

    def rounds(self, choice: Choice, workload: Workload) -> int:
        """Return the rounds of one layer of the model with the first layer of a workload."""
        return self._glanced(choice, workload)[1]

    def least_headroom(self, choice: Choice, workload: Workload) -> Choice:
        """Return the choice with the least headroom that has one round in a simulated layer; else the choice itself."""
        # More headroom than for one round saves no time.
        for smaller in choice.with_less_room:
            if self._seen.get((smaller, workload.name), (0.0, 0))[1] == 1:
                return smaller
        return choice

    def _glanced(self, choice: Choice, workload: Workload) -> tuple[float, int]:
        """Return the seconds and the rounds of one layer."""
        key = choice, workload.name
        if key not in self._seen:
            # Other layers and microbatches take the same time under all choices.
            model, layer = replace(self.model, layers=1, other_s=0.0), workload.first_layer()
            step = replace(self.step, parallel=self.step.parallel.of_one_microbatch)
            if layer.counts is None or self.sample is not None:
                found = self._simulated(choice, layer, model, step)
                self._seen[key] = found.step_s, found.rounds
            else:
                # Without the totals of a report.
                one = self._begun(choice, layer)
                counts, states = self._routed(one, layer, layer.counts)
                system, migration = one.system, one.migration
                self._seen[key] = simulate_microbatch(system, model, self.cluster, counts, migration, step, states)
        return self._seen[key]

    def report(self, choice: Choice, workload: Workload) -> Report:
        """Simulate the whole step."""
        return self._simulated(choice, workload, self.model, self.step)

    def memory(self, choice: Choice) -> Memory:
        """Count the memory of a rank, without a simulation."""
        if choice not in self._memories:
            one = self.candidate(choice)
            self._memories[choice] = memory_of(one.system, self.model, self.cluster, one.migration, self.step)
        return self._memories[choice]

    def candidate(self, choice: Choice) -> Candidate:
        """Build the candidate of a choice."""
        if choice not in self._built:
            self._built[choice] = choice.build(self.model, self.cluster, self.step)
        return self._built[choice]

    def floor_s(self, choice: Choice, workload: Workload) -> float:
        """Compute a lower bound of the seconds of `glance`: the operations at the peak, and the gathers."""
        one, step, model = self.candidate(choice), self.step, self.model
        before_s = model.before_experts_s(self.cluster) * (3 if step.backward else 1)
        # A recording has fewer copies than the model on all ranks but the one with the most tokens.
        counts = workload.counts
        copies = model.tokens * model.per_token if counts is None else counts[0].sum() / counts.shape[1]
        passes = 1 + (self.cluster.backward_factor - (not step.recompute)) * step.backward
        experts_s = passes * copies * model.row_flops / self.cluster.gemm.peak_flops_per_s
        work = shared_work(model, self.cluster, one.migration, model.experts, one.system.dispatch)
        flows = [*work.gather, *(work.gather * (step.backward and work.gather_again))]
        flows += work.gather_home if step.backward else ()
        planner_s = 0.0
        # Tokens wait for the planner, unless those of a first wave are served beside it.
        if needs_counts(one.system.balancer) and not one.system.dispatch.cost().passes_home:
            group = self.cluster.topology(one.migration.group_sizes(self.cluster))
            sizes_of_plan = group.num_ranks, group.ranks_per_domain, model.experts
            given_s, wait_s = self.cluster.planner_s, self.cluster.host_wait_s
            planner_s = planning_s(one.system.balancer, *sizes_of_plan, wait_s) if given_s is None else given_s
        # Experts wait for attention and planner, and for gathers beside both. Gradients go home after experts.
        return experts_s + max(before_s + planner_s, sum(seconds(flow, self.cluster) for flow in flows))

    def _begun(self, choice: Choice, workload: Workload) -> Candidate:
        """Return the candidate of a choice whose simulation begins."""
        self._simulations += 1
        if self.tell is not None:
            self.tell(f"{self._simulations} simulations, {choice.name} on {workload.name}")
        return self.candidate(choice)

    def _simulated(self, choice: Choice, workload: Workload, model: ModelShape, step: Step) -> Report:
        one = self._begun(choice, workload)
        if workload.counts is None:
            dispatch = one.system.dispatch
            return simulate_uniform(model, self.cluster, migration=one.migration, step=step, dispatch=dispatch)
        counts, states = self._routed(one, workload, workload.counts)
        if self.sample is not None:
            parts = model, self.cluster, self.sample, counts
            return simulate_sample(one.system, *parts, migration=one.migration, step=step)
        return simulate(one.system, model, self.cluster, counts, migration=one.migration, step=step, states=states)

    def _routed(
        self, one: Candidate, workload: Workload, counts: Int[np.ndarray, "X R E"]
    ) -> tuple[Int[np.ndarray, "X R E"], States | None]:
        """Return the counts with experts in the order of a candidate's homes, and the states of the balancer."""
        if one.system.relocates:
            # Cache the homes: all relocating choices share them, and planning them takes longer than most simulations.
            key = workload.name, len(counts)
            if key not in self._placed:
                self._placed[key] = permute_to_homes(workload, one, self.sample or self.cluster)
            counts = self._placed[key]
        states = None
        if workload.before is not None and self.sample is None and keeps_history(one.system, self.model, self.cluster):
            states = remembered(one.system, self.model, self.cluster, workload.before)
        return counts, states


def permute_to_homes(workload: Workload, candidate: Candidate, cluster: Cluster) -> Int[np.ndarray, "X R E"]:
    """Return the counts of a workload with experts in the order of a candidate's homes."""
    if workload.counts is None:
        raise ValueError(f"workload {workload.name!r} has no counts; expected some")
    if not candidate.system.relocates or workload.earlier is None:
        return workload.counts
    permutation = plan_relocation(workload.earlier, cluster.topology())
    # Place `p` gets the expert previously at `permutation[p]`.
    return np.take_along_axis(workload.counts, permutation[:, None], 2)
