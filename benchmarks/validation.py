"""Rows of the validation table: predictions of the simulator against measurements, without fitted numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.results import Table, Value

Pairs = Sequence[tuple[float, float]]
"""Pairs of predicted and measured values."""

COLUMNS = {
    "source": "",
    "predicted": "",
    "inputs from the source": "",
    "numbers": "d",
    "mean deviation %": ".1f",
    "max. deviation %": "+.1f",
    "over": "",
    "speed-up, mean deviation %": ".1f",
    "speed-up, max. deviation %": "+.1f",
    "mean deviation % under other assumptions, min. and max.": ".1f",
    "max. under": "",
}


@dataclass(frozen=True)
class Check:
    """Predictions for one source.

    Args:
        source: source of the measurement.
        predicted: predicted quantity.
        known: values of the same source used by the prediction.
        values: predicted and measured values, without those used in a fit.
        baseline: baseline of the speed-ups.
        speedups: predicted and measured speed-ups.
        assumptions: `values` under other assumptions, by name.
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
        """Row of the table."""
        under = {name: mean_off(pairs) for name, pairs in self.assumptions.items()}
        some = [mean_off(self.values), min(under.values()), max(under.values())] if under else None
        worst = max(under, key=lambda name: under[name]) if under else ""
        speedups = [mean_off(self.speedups), worst_off(self.speedups)] if self.speedups else [None, None]
        numbers = [len(self.values), mean_off(self.values), worst_off(self.values)]
        return [self.source, self.predicted, self.known, *numbers, self.baseline, *speedups, some, worst]


def table(checks: Sequence[Check]) -> Table:
    """Return the table of all checks."""
    return Table(COLUMNS, [check.line for check in checks])


def assumptions_table(checks: Sequence[Check]) -> Table:
    """Return the deviations under every assumption; the first of a source equals the other table."""
    rows: list[list[Value]] = []
    for check in checks:
        under = {"as assumed": check.values, **check.assumptions} if check.assumptions else {}
        rows += [[check.source, check.predicted, name, mean_off(pairs)] for name, pairs in under.items()]
    return Table({"source": "", "predicted": "", "under": "", "mean deviation %": ".1f"}, rows)


def percent_off(pairs: Pairs) -> np.ndarray:
    """Return deviations of predicted from measured values, in percent."""
    predicted, measured = np.array(pairs).T
    return 100 * (predicted / measured - 1)


def mean_off(pairs: Pairs) -> float:
    """Return the mean of the absolute deviations, in percent."""
    return float(np.abs(percent_off(pairs)).mean())


def worst_off(pairs: Pairs) -> float:
    """Return the largest deviation, in percent."""
    return max(percent_off(pairs).tolist(), key=abs)


def ratios(pairs: Pairs, over: Pairs) -> Pairs:
    """Return speed-ups over a baseline, predicted and measured."""
    return [(base / value, known / measured) for (value, measured), (base, known) in zip(pairs, over, strict=True)]
