"""A `Judge` simulates choices on workloads: one layer at a glance, or the whole step."""

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int

from jax_moe_lb.relocation import plan_relocation
from jax_moe_lb.sim.choice import Candidate, Choice
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.memory import Memory, memory_of
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import seconds
from jax_moe_lb.sim.run import Report, keeps_history, remembered, simulate, simulate_sample, simulate_uniform
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import shared_work
from jax_moe_lb.sim.workloads import Workload


@dataclass
class Judge:
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
                self._placed[key] = at_homes(workload, one, self.sample or self.cluster)
            counts = self._placed[key]
        if self.sample is not None:
            parts = model, self.cluster, self.sample, counts
            return simulate_sample(one.system, *parts, migration=one.migration, step=step)
        states = None
        if workload.before is not None and keeps_history(one.system, model, self.cluster):
            states = remembered(one.system, model, self.cluster, workload.before)
        return simulate(one.system, model, self.cluster, counts, migration=one.migration, step=step, states=states)


def at_homes(workload: Workload, candidate: Candidate, cluster: Cluster) -> Int[np.ndarray, "X R E"]:
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
