"""Evaluation of choices on workloads, by one layer or by whole steps.

A `Workload` is a step of synthetic counts in one of several shapes, or of a recorded trace.
"""

from collections.abc import Sequence
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
from jax_moe_lb.sim.run import Report, keeps_history, remembered, simulate, simulate_sample, simulate_uniform
from jax_moe_lb.sim.work import shared_work

BEFORE = 4
"""So many steps come before a workload's own. Balancers that plan every three steps then have a plan that was made one
step before, the middle one of the ages that it has."""

EARLIER = (-75, -50, -25)
"""Homes move every 50 steps: in the middle of that time they are 25 steps old, planned from the 50 before."""


@dataclass(frozen=True)
class Workload:
    """A workload is the routing of one step on which systems are compared.

    Args:
        name: what messages call it.
        counts: `[X, R, E]` int32, of `X` layers, experts by their homes as they are without relocation; `None` for
            uniform routing on any number of ranks.
        earlier: `[X, E]`, the load of every expert before that step, from which new homes are planned; `None` if it is
            not known, and then homes stay.
    """

    name: str
    counts: Int[np.ndarray, "X R E"] | None
    earlier: Num[np.ndarray, "X E"] | None = None
    before: Int[np.ndarray, "steps X R E"] | None = None

    @property
    def first_layer(self) -> "Workload":
        """Returns its first layer alone."""
        counts, earlier, before = self.counts, self.earlier, self.before
        return Workload(
            self.name,
            None if counts is None else counts[:1],
            None if earlier is None else earlier[:1],
            None if before is None else before[:, :1],
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
    """Draws workloads of several shapes that have the same imbalance, one draw of each shape first.

    Args:
        model: see `skewed_counts`, also of the next three.
        num_ranks: `R`.
        imbalance: `max / mean` of the ranks' load. At 1 all shapes are the same, and there is one workload.
        layers: how many layers each workload has.
        shapes: which shapes; those that cannot have the imbalance on this machine are left out.
        draws: how many workloads of each shape.
        seed: of the first draw; each further one takes the next.
        drift: how popularity changed in the steps before; not at all by default.

    Raises:
        ValueError: no shape can have the imbalance, or what `skewed_counts` refuses.
    """
    if imbalance <= 1:
        even = skewed_counts(model, num_ranks, 1.0, layers, seed)
        return [Workload("even", even, even.sum(1), np.stack([even] * BEFORE))]
    workloads, refusals, times = [], [], (*EARLIER, *range(-BEFORE, 1))
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


def recorded_workloads(trace: Int[np.ndarray, "steps layers R E"], most_steps: int, most_layers: int) -> list[Workload]:
    """Takes workloads from the second half of a trace, at even distances; homes are planned from the first half.

    Args:
        trace: `[steps, layers, R, E]`, the recorded counts. Of a single step nothing earlier is known.
        most_steps: how many workloads there are at most.
        most_layers: how many layers each has at most.
    """
    half = len(trace) // 2
    layers = _spread(0, trace.shape[1], most_layers)
    earlier = trace[:half, layers].sum((0, 2), dtype=np.int64) if half else None
    # All of them have steps before them, or none has: those of a short trace do not.
    knows = half >= BEFORE
    return [
        Workload(f"step {at}", trace[at, layers], earlier, trace[at - BEFORE : at, layers] if knows else None)
        for at in _spread(half, len(trace), most_steps)
    ]


def _spread(start: int, end: int, most: int) -> list[int]:
    """Chooses at most so many of the integers from `start` on and below `end`, at even distances."""
    return sorted({int(at) for at in np.linspace(start, end - 1, min(most, end - start))})


@dataclass
class Evaluator:
    """A judge simulates choices for one model, machine and step, and remembers what it has looked at.

    Args:
        model: the sizes of the layers.
        cluster: the machine.
        step: the passes of a step.
        sample: a part of the machine, whose counts workloads then have; `None`: they have those of all ranks.
    """

    model: ModelShape
    cluster: Cluster
    step: Step
    sample: Cluster | None = None
    _seen: dict[tuple[Choice, str], float] = field(default_factory=dict, repr=False)
    _placed: dict[tuple[str, int], Int[np.ndarray, "X R E"]] = field(default_factory=dict, repr=False)

    def glance(self, choice: Choice, workload: Workload) -> float:
        """Simulates one layer of the model with the first layer of a workload.

        Args:
            choice: what to simulate.
            workload: its name must be its own, as answers are remembered by it.

        Returns:
            Its seconds.
        """
        key = choice, workload.name
        if key not in self._seen:
            # What other layers and microbatches do is the same for all choices.
            model = replace(self.model, layers=1, other_s=0.0)
            step = replace(self.step, parallel=self.step.parallel.of_one_microbatch)
            self._seen[key] = self._simulated(choice, workload.first_layer, model, step).step_s
        return self._seen[key]

    def report(self, choice: Choice, workload: Workload) -> Report:
        """Simulates the whole step.

        Args:
            choice: what to simulate.
            workload: its counts; without counts routing is uniform.
        """
        return self._simulated(choice, workload, self.model, self.step)

    def memory(self, choice: Choice) -> Memory:
        """Counts what a rank holds, without a simulation."""
        one = self.candidate(choice)
        return memory_of(one.system, self.model, self.cluster, one.migration, self.step)

    def candidate(self, choice: Choice) -> Candidate:
        """Makes the candidate of a choice."""
        return choice.build(self.model, self.cluster, self.step)

    def floor_s(self, choice: Choice) -> float:
        """Computes seconds below which no workload brings a layer: its operations at the peak, and what is gathered.

        Args:
            choice: its gathers do not depend on the workload, and its experts need those of a level load at least.
        """
        one, step, model = self.candidate(choice), self.step, self.model
        before_s = model.before_experts_s(self.cluster) * (3 if step.backward else 1)
        passes = 1 + (3 if step.recompute else 2) * step.backward
        experts_s = passes * model.tokens * model.per_token * model.row_flops / self.cluster.gemm.peak_flops_per_s
        work = shared_work(model, self.cluster, one.migration, model.experts, one.system.dispatch)
        flows = [*work.gather, *(work.gather * (step.backward and work.gather_again))]
        flows += work.gather_home if step.backward else ()
        # Experts wait for the gathers before them, and gradients go home after them.
        return experts_s + max(before_s, sum(seconds(flow, self.cluster) for flow in flows))

    def _simulated(self, choice: Choice, workload: Workload, model: ModelShape, step: Step) -> Report:
        one = self.candidate(choice)
        if workload.counts is None:
            return simulate_uniform(model, self.cluster, migration=one.migration, step=step)
        counts = workload.counts
        if one.system.relocates:
            # All that relocate get the same homes, whose plan takes longer than many a simulation.
            key = workload.name, len(counts)
            if key not in self._placed:
                self._placed[key] = permute_to_homes(workload, one, self.sample or self.cluster)
            counts = self._placed[key]
        if self.sample is not None:
            parts = model, self.cluster, self.sample, counts
            return simulate_sample(one.system, *parts, migration=one.migration, step=step)
        states = None
        if workload.before is not None and keeps_history(one.system, model, self.cluster):
            states = remembered(one.system, model, self.cluster, workload.before)
        return simulate(one.system, model, self.cluster, counts, migration=one.migration, step=step, states=states)


def permute_to_homes(workload: Workload, candidate: Candidate, cluster: Cluster) -> Int[np.ndarray, "X R E"]:
    """Returns the counts of a workload with experts by the homes that a candidate gives them.

    Args:
        workload: its counts, and what was before them.
        candidate: whether its system relocates.
        cluster: the machine, whose domains get equal loads.

    Raises:
        ValueError: the workload has no counts.
    """
    if workload.counts is None:
        raise ValueError(f"workload {workload.name!r} has no counts; expected some")
    if not candidate.system.relocates or workload.earlier is None:
        return workload.counts
    permutation = plan_relocation(workload.earlier, cluster.topology())
    # Place `p` gets the expert that was at `permutation[p]`.
    return np.take_along_axis(workload.counts, permutation[:, None], 2)
