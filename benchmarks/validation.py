"""One line of the table of what the simulator predicts beside what was measured, and what was not fitted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.results import Table, Value

Pairs = Sequence[tuple[float, float]]
"""Predicted and measured."""

COLUMNS = {
    "source": "",
    "predicted": "",
    "known of it": "",
    "numbers": "d",
    "off, mean %": ".1f",
    "off, worst %": "+.1f",
    "over": "",
    "speed-up off, mean %": ".1f",
    "speed-up off, worst %": "+.1f",
    "mean % under other assumptions, least and most": ".1f",
    "the most under": "",
}


@dataclass(frozen=True)
class Check:
    """What is predicted of one source.

    Args:
        source: who measured.
        predicted: what.
        known: what of the measurement, or of the same source, the prediction has in it.
        values: predicted and measured, without anything that was fitted to.
        baseline: what the speed-ups are over.
        speedups: predicted and measured.
        assumptions: `values` under others, by name.
    """

    source: str
    predicted: str
    known: str
    values: Pairs
    baseline: str = ""
    speedups: Pairs = ()
    assumptions: Mapping[str, Pairs] = field(default_factory=dict)

    @property
    def line(self) -> list[Value]:
        """A row of the table."""
        under = {name: mean_off(pairs) for name, pairs in self.assumptions.items()}
        some = [mean_off(self.values), min(under.values()), max(under.values())] if under else None
        worst = max(under, key=lambda name: under[name]) if under else ""
        speedups = [mean_off(self.speedups), worst_off(self.speedups)] if self.speedups else [None, None]
        numbers = [len(self.values), mean_off(self.values), worst_off(self.values)]
        return [self.source, self.predicted, self.known, *numbers, self.baseline, *speedups, some, worst]


def table(checks: Sequence[Check]) -> Table:
    """All of them."""
    return Table(COLUMNS, [check.line for check in checks])


def assumptions_table(checks: Sequence[Check]) -> Table:
    """How far each is off under every assumption; the first of a source is that of the other table."""
    rows: list[list[Value]] = []
    for check in checks:
        under = {"as assumed": check.values, **check.assumptions} if check.assumptions else {}
        rows += [[check.source, check.predicted, name, mean_off(pairs)] for name, pairs in under.items()]
    return Table({"source": "", "predicted": "", "under": "", "off, mean %": ".1f"}, rows)


def percent_off(pairs: Pairs) -> np.ndarray:
    """Of the predicted from the measured values."""
    predicted, measured = np.array(pairs).T
    return 100 * (predicted / measured - 1)


def mean_off(pairs: Pairs) -> float:
    """Mean of the absolute deviations, %."""
    return float(np.abs(percent_off(pairs)).mean())


def worst_off(pairs: Pairs) -> float:
    """The largest deviation, %."""
    return max(percent_off(pairs).tolist(), key=abs)


def ratios(pairs: Pairs, over: Pairs) -> Pairs:
    """How many times as fast as a baseline, predicted and measured."""
    return [(base / value, known / measured) for (value, measured), (base, known) in zip(pairs, over, strict=True)]
