"""Tables of `bench_training`: predictions beside measurements."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.results import Table, Value, spread

COMPARED = {
    "Mbit/s": ".0f",
    "routing": "",
    "system": "",
    "predicted ms": ".0f",
    "measured ms": ".0f",
    "deviation %": "+.1f",
    "over plain, predicted": ".2f",
    "over plain, measured": ".2f",
}


def step_ms(measured: Sequence[Mapping[str, Any]]) -> dict[tuple[float, str, str], np.ndarray]:
    """Return the mean milliseconds of a step in each pass, by rate in Mbit/s, routing and system."""
    found = defaultdict(list)
    for one in measured:
        key = (one.get("rate", 0.0) / 1e6, one["routing"], one["system"])
        found[key].append(1e3 * float(np.mean(one["seconds"])))
    return {key: np.array(times) for key, times in found.items()}


def slowest(of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the measurements of rank 0 with the seconds of the slowest rank."""
    return [
        {**same[0], "seconds": np.max([one["seconds"] for one in same], 0).tolist()}
        for same in zip(*of_ranks, strict=True)
    ]


SUMMARY = {
    "": "",
    "points": "d",
    "median deviation %": ".1f",
    "largest deviation %": ".1f",
    "systems in their place": "d",
    "or tied": "d",
    "pairs in order": "d",
    "pairs": "d",
    "pairs apart in order": "d",
    "pairs apart": "d",
}


def compared(predicted: Table, measured: Sequence[Mapping[str, Any]]) -> dict[str, Table]:
    """Return predictions beside measurements, and a summary of errors and orders."""
    titles, times = list(predicted.columns), step_ms(measured)
    points = [dict(zip(titles, row, strict=True)) for row in predicted.rows]
    keys = [(point["Mbit/s"], point["routing"], point["system"]) for point in points]
    expected = {key: float(point["predicted ms"]) for key, point in zip(keys, points, strict=True)}
    found = {key: float(np.median(times[key])) for key in keys}
    off = {key: 100 * (expected[key] / found[key] - 1) for key in keys}
    rows: list[list[Value]] = []
    for key in keys:
        at_plain = (*key[:2], "plain")
        over = [expected[at_plain] / expected[key], found[at_plain] / found[key]]
        rows.append([*key, expected[key], spread(times[key]), off[key], *over])
    errors = np.abs(list(off.values()))
    numbers = len(keys), float(np.median(errors)), float(errors.max())
    summary: list[Value] = ["all", *numbers, *orders(expected, {key: times[key] for key in keys})]
    return {"compared": Table(COMPARED, rows), "summary": Table(SUMMARY, [summary])}


class Orders(NamedTuple):
    """Systems and pairs of systems in order, among those of the same link and routing."""

    places: int
    possible: int
    right: int
    pairs: int
    apart_right: int
    apart: int


def orders(expected: Mapping[Any, float], times: Mapping[Any, np.ndarray]) -> Orders:
    """Compare the order of predictions with that of measurements."""
    groups, found = defaultdict(list), np.zeros(6, np.int64)
    for key in expected:
        groups[key[:2]].append(key)
    for keys in groups.values():
        predicted = np.array([expected[key] for key in keys])
        median, low, high = (np.array([of(times[key]) for key in keys]) for of in (np.median, np.min, np.max))
        ranks = [np.argsort(np.argsort(one)) for one in (predicted, median)]
        # Fastest and slowest rank: behind surely faster systems, and before surely slower ones.
        best, worst = (high[None] < low[:, None]).sum(1), len(keys) - 1 - (low[None] > high[:, None]).sum(1)
        is_possible = (best <= ranks[0]) & (ranks[0] <= worst)
        one, other = np.triu_indices(len(keys), 1)
        is_right = (predicted[one] < predicted[other]) == (median[one] < median[other])
        is_apart = (high[one] < low[other]) | (high[other] < low[one])
        counted = ranks[0] == ranks[1], is_possible, is_right, np.ones_like(one), is_right & is_apart, is_apart
        found += [int(np.sum(each)) for each in counted]
    return Orders(*found.tolist())
