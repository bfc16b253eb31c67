"""A `Workload` is a step on which choices are compared: drawn in several shapes, or of a trace."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.sim.drift import Drift
from jax_moe_lb.sim.loads import LoadShape, drifting_counts, skewed_counts
from jax_moe_lb.sim.model import ModelShape

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
