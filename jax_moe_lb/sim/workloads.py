"""A `Workload` is a step on which choices are compared: drawn in several shapes, or of a trace."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.sim.loads import LoadShape, skewed_counts
from jax_moe_lb.sim.model import ModelShape


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


def drawn_workloads(
    model: ModelShape, num_ranks: int, imbalance: float, layers: int, shapes: Sequence[LoadShape], draws: int, seed: int
) -> list[Workload]:
    """Draws workloads of several shapes that have the same imbalance, one draw of each shape first.

    What was before them is another draw of the same popularity: experts are assumed to stay as popular as they are.

    Args:
        model: see `skewed_counts`, also of the next three.
        num_ranks: `R`.
        imbalance: `max / mean` of the ranks' load. At 1 all shapes are the same, and there is one workload.
        layers: how many layers each workload has.
        shapes: which shapes; those that cannot have the imbalance on this machine are left out.
        draws: how many workloads of each shape.
        seed: of the first draw; each further one takes the next.

    Raises:
        ValueError: no shape can have the imbalance, or what `skewed_counts` refuses.
    """
    if imbalance <= 1:
        even = skewed_counts(model, num_ranks, 1.0, layers, seed)
        return [Workload("even", even, even.sum(1))]
    workloads, refusals = [], []
    for draw in range(draws):
        for shape in shapes:
            try:
                counts = skewed_counts(model, num_ranks, imbalance, layers, seed + draw, shape)
            except ValueError as error:
                refusals.append(error)
                continue
            workloads.append(Workload(f"{shape.value}, draw {draw + 1}", counts, _again(counts, seed + draw)))
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
    return [Workload(f"step {at}", trace[at][layers], earlier) for at in _spread(half, len(trace), most_steps)]


def _spread(start: int, end: int, most: int) -> list[int]:
    """Chooses at most so many of the integers from `start` on and below `end`, at even distances."""
    return sorted({int(at) for at in np.linspace(start, end - 1, min(most, end - start))})


def _again(counts: Int[np.ndarray, "X R E"], seed: int) -> Int[np.ndarray, "X E"]:
    """Draws what experts get in total a second time: as many copies, with the popularity that the first draw shows."""
    rng = np.random.default_rng((seed, 1))
    totals = counts.sum(1, dtype=np.int64)
    return np.stack([rng.multinomial(layer.sum(), layer / layer.sum()) for layer in totals])
