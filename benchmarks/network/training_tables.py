"""Tables of `bench_training`: predictions beside measurements, and the training table."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

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


def compared(predicted: Table, measured: Sequence[Mapping[str, Any]]) -> Table:
    """Return predictions beside measurements, with their errors and the order of systems in the notes."""
    titles, times = list(predicted.columns), step_ms(measured)
    points = [dict(zip(titles, row, strict=True)) for row in predicted.rows]
    keys = [(point["Mbit/s"], point["routing"], point["system"]) for point in points]
    expected = {key: float(point["predicted ms"]) for key, point in zip(keys, points, strict=True)}
    found = {key: float(np.median(times[key])) for key in keys}
    off = {key: 100 * (expected[key] / found[key] - 1) for key in keys}
    rows: list[list[Value]] = []
    for key in keys:
        plain = (*key[:2], "plain")
        over = [expected[plain] / expected[key], found[plain] / found[key]]
        rows.append([*key, expected[key], spread(times[key]), off[key], *over])
    return Table(COMPARED, rows, notes=notes(expected, found, off))


def notes(expected: Mapping[Any, float], found: Mapping[Any, float], off: Mapping[Any, float]) -> list[str]:
    """Return the median deviation, and the share of right orders."""
    errors = np.abs(list(off.values()))
    groups = defaultdict(list)
    for key in expected:
        groups[key[:2]].append(key)
    right = places = pairs = 0
    for keys in groups.values():
        orders = [sorted(keys, key=times.__getitem__) for times in (expected, found)]
        places += sum(one == other for one, other in zip(*orders, strict=True))
        for one, other in itertools.combinations(keys, 2):
            pairs += 1
            right += (expected[one] < expected[other]) == (found[one] < found[other])
    return [
        f"Absolute deviation: median {np.median(errors):.1f} %, largest {errors.max():.1f} %. "
        f"{places} of {len(expected)} systems have their place in the order of their link and routing, "
        f"and {right} of {pairs} pairs are in the right order."
    ]

