"""Gain of `exact` over `plain` by the imbalance of the ranks and the rate of the links, and its break-even."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.network.training_rounds import GAIN_RATES, GAIN_ROUTINGS
from benchmarks.render.results import Table, Value, spread

GAINS = {
    "Mbit/s": ".0f",
    "imbalance": ".2f",
    "exchanges %": ".0f",
    "over plain, predicted": ".2f",
    "over plain, measured": ".2f",
}


def gains(predicted: Table, times: Mapping[Any, np.ndarray]) -> Table:
    """Return predicted and measured gains; speeds of a pass are ratios to `plain` of the same pass.

    Args:
        predicted: predictions of a round, with the shares of exchanges.
        times: milliseconds of a step in each pass, by rate in Mbit/s, routing and system.
    """
    points: list[dict[str, Any]] = [dict(zip(predicted.columns, row, strict=True)) for row in predicted.rows]
    expected = {(point["Mbit/s"], point["routing"], point["system"]): point for point in points}
    rows: list[list[Value]] = []
    for rate, (routing, imbalance) in product(GAIN_RATES, GAIN_ROUTINGS.items()):
        keys = [(rate / 1e6, routing, system) for system in ("plain", "exact")]
        plain, exact = (expected[key] for key in keys)
        ratio = plain["predicted ms"] / exact["predicted ms"]
        rows.append([rate / 1e6, imbalance, plain["exchanges %"], ratio, spread(times[keys[0]] / times[keys[1]])])
    return Table(GAINS, rows)


def break_even(table: Table) -> Table:
    """Return the imbalance of equal speed at each rate, linear between the points of `gains`."""
    of_rates: dict[Value, list[Any]] = defaultdict(list)
    for rate, *row in table.rows:
        of_rates[rate].append(row)
    rows: list[list[Value]] = []
    for rate, of in of_rates.items():
        levels, _, predicted, measured = zip(*of, strict=True)
        # The highest gains give the lowest break-even.
        even = [crossing(levels, [gain[number] for gain in measured]) for number in (0, 2, 1)]
        known = [level for level in even if level is not None]
        rows.append([rate, crossing(levels, predicted), known if len(known) == len(even) else None])
    return Table({"Mbit/s": ".0f", "break-even, predicted": ".2f", "break-even, measured": ".2f"}, rows)


def crossing(levels: Sequence[float], gains: Sequence[float]) -> float | None:
    """Return the level from which on the gain is at least 1, `None` if the last gain is below 1."""
    below = [number for number, gain in enumerate(gains) if gain < 1]
    if not below:
        return levels[0]
    last = below[-1]
    if last == len(levels) - 1:
        return None
    low, high = gains[last], gains[last + 1]
    return float(levels[last] + (1 - low) / (high - low) * (levels[last + 1] - levels[last]))
