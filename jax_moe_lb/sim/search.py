"""`search` finds the fastest choices of a `Space`, looking at few of them for long.

It goes in three stages. For one workload of every shape it looks at one layer of the choices that the space begins
with, then again and again at all that is beside the fastest families, until nothing beside them is faster. What is
fastest there is looked at on every shape, one layer each. The best of these get whole steps on all workloads. A choice
whose floor is above what others take is not simulated, as no workload could make it fast. The first two stages are a
heuristic: what is slow in one layer of one draw of every shape is never judged on the others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_moe_lb.sim.choice import Choice
from jax_moe_lb.sim.judge import Judge
from jax_moe_lb.sim.run import Report, mean_report
from jax_moe_lb.sim.space import Space
from jax_moe_lb.sim.workloads import Workload

FAMILIES = 4
"""The search goes on from the best of so many families; a family differs in slots, eps and relays alone."""

MOST_MOVES = 8
"""It goes on so often at most; three or four times are usual."""

FINALISTS = 8
"""So many families get whole steps on all workloads."""


@dataclass(frozen=True)
class Outcome:
    """An outcome is a choice with what its whole steps took.

    Args:
        choice: what was simulated.
        report: the mean over all workloads.
        times_s: the seconds of a step on each workload, in the order of the workloads.
    """

    choice: Choice
    report: Report
    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Returns the median over workloads."""
        return float(np.median(self.times_s))

    def ratios(self, other: "Outcome") -> tuple[float, ...]:
        """Returns its time over another's, workload by workload.

        Args:
            other: an outcome on the same workloads.
        """
        # Where neither takes any time they are equal.
        return tuple(mine / its if its else 1.0 for mine, its in zip(self.times_s, other.times_s, strict=True))

    def is_like(self, other: "Outcome") -> bool:
        """Tells whether the range of the ratios includes 1: on some workload each is as fast as the other."""
        ratios = self.ratios(other)
        return min(ratios) <= 1 <= max(ratios)


@dataclass(frozen=True)
class Found:
    """This is what a search has found.

    Args:
        outcomes: the best of each of the best families, and plain, by the median of their time over plain's on the
            same workload, the fastest first.
        glances: every choice that was looked at, with the seconds of one layer, the median over the shapes on which it
            was.
        refused: choices that need more memory than there is, each with what it needs.
        fits: whether plain fits into memory; if not, nothing is refused for it.
    """

    outcomes: tuple[Outcome, ...]
    glances: dict[Choice, float]
    refused: dict[Choice, str]
    fits: bool


def search(space: Space, judge: Judge, shapes: Sequence[Workload], workloads: Sequence[Workload]) -> Found:
    """Finds the fastest choices.

    Args:
        space: the choices.
        judge: it simulates them.
        shapes: the workloads of the first two stages, one of each shape.
        workloads: those of whole steps.
    """
    fits, refused = is_room(judge, Choice()), dict[Choice, str]()

    def may(choice: Choice) -> bool:
        if fits and not is_room(judge, choice):
            refused[choice] = needs(judge, choice)
        return choice not in refused

    explored = [_explored(space, judge, workload, may) for workload in shapes]
    chosen = {choice for times in explored for choice in _best_of_families(times, FINALISTS)} | {Choice()}
    # On every shape, so that what one of them favours is compared on the others.
    middle = {choice: float(np.median([judge.glance(choice, workload) for workload in shapes])) for choice in chosen}
    finalists = dict.fromkeys([*_best_of_families(middle, FINALISTS), Choice()])
    outcomes = [judged(choice, judge, workloads) for choice in finalists]
    plain = next(one for one in outcomes if one.choice == Choice())
    # Workload by workload, as workloads differ; of equals the simplest.
    outcomes.sort(key=lambda one: (float(np.median(one.ratios(plain))), one.choice.parts))
    glances = {c: float(np.median([t[c] for t in explored if c in t])) for c in dict.fromkeys(_all(explored))} | middle
    return Found(tuple(outcomes), glances, refused, fits)


def judged(choice: Choice, judge: Judge, workloads: Iterable[Workload]) -> Outcome:
    """Simulates whole steps of a choice on workloads.

    Args:
        choice: what to simulate.
        judge: it simulates.
        workloads: at least one.
    """
    reports = [judge.report(choice, workload) for workload in workloads]
    return Outcome(choice, mean_report(reports), tuple(report.step_s for report in reports))


def is_room(judge: Judge, choice: Choice) -> bool:
    """Tells whether a choice fits into a rank's memory; it does where nobody knows how much there is."""
    there = judge.cluster.memory_bytes
    return there is None or judge.memory(choice).total <= there


def needs(judge: Judge, choice: Choice) -> str:
    """Says what a choice needs of how much memory, by name."""
    memory, there = judge.memory(choice), judge.cluster.memory_bytes or 0.0
    return f"needs {memory.total / 1e9:.1f} GB of {there / 1e9:.1f}: {memory.words}"


def _explored(space: Space, judge: Judge, workload: Workload, may: Callable[[Choice], bool]) -> dict[Choice, float]:
    """Looks at one layer of choices, those beside the fastest included."""
    times: dict[Choice, float] = {}

    def look(choices: Iterable[Choice]) -> None:
        for choice in choices:
            best = [times[one] for one in _best_of_families(times, FAMILIES)]
            limit = best[-1] if len(best) == FAMILIES else float("inf")
            if choice not in times and may(choice) and judge.floor_s(choice) <= limit:
                times[choice] = judge.glance(choice, workload)

    look(space.first())
    for _ in range(MOST_MOVES):
        before = len(times)
        for choice in _best_of_families(times, FAMILIES):
            look(space.near(choice))
        if len(times) == before:
            break
    return times


def _best_of_families(times: dict[Choice, float], number: int) -> list[Choice]:
    """Returns the fastest choice of each of the fastest families."""
    found: dict[Choice, Choice] = {}
    for choice in sorted(times, key=lambda choice: (times[choice], choice.parts)):
        found.setdefault(choice.family, choice)
    return list(found.values())[:number]


def _all(explored: Sequence[dict[Choice, float]]) -> Iterable[Choice]:
    return (choice for times in explored for choice in times)
