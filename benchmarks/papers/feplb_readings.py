"""Fit of interpretations of FEPLB's scheduler to the token stragglers published in its paper.

The six points are reductions of the token straggler in percent: figure 5 (2, 4 and 8 ranks) and figure 6 (8 ranks with
2, 4 and 8 dynamic experts). All readings use the same loads, fitted only to the column "before" (`stragglers.py`) and
not to any system. As neither the popularity distribution nor the copies per rank are published, there are four kinds of
loads. The first table has FasterMoE, the paper's baseline, on each kind, as a measure of its plausibility.

The error of a reading is the root mean square over the six points, in percentage points. Its trend is "+" if the three
numbers of figure 5 increase with the ranks, as published. Ranges are minimum and maximum over five fifths of the
microbatches.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from benchmarks.papers.feplb import fastermoe, plain, reduction, straggler
from benchmarks.papers.feplb_rules import Reading, readings, straggler_after
from benchmarks.papers.stragglers import CASES, DYNAMIC, Shape, counts, lognormal, zipf
from benchmarks.render.results import Table, Value

KINDS: dict[str, tuple[Shape, int]] = {
    f"{shape.__name__}, {copies}": (shape, copies) for shape in (lognormal, zipf) for copies in (16384, 32768)
}
"""Loads by popularity distribution and token copies per rank."""

FIGURE_5 = [100 * (1 - case.feplb / case.straggler) for case in CASES]
PUBLISHED = np.array([*FIGURE_5, *DYNAMIC.values()])
GROUPS = 5

NAMED = {
    # Readings available as options of the library, and fixed subsets under its other rules.
    "FEPLB(), the default": Reading(),
    "FEPLB(skip=True)": Reading(skip=True),
    "FEPLB(tau=1792)": Reading(tau=1792),
    "FEPLB(tau=2304)": Reading(tau=2304),
    "FEPLB(tau=2048, skip=True)": Reading(tau=2048, skip=True),
    "fixed, first": Reading("fixed, first"),
    "fixed, first, next": Reading("fixed, first", skip=True),
    "fixed, history 0.5": Reading("fixed, history 0.5"),
}


@dataclass(frozen=True)
class Found:
    """Results of a reading on one kind of loads."""

    points: np.ndarray

    @property
    def error(self) -> float:
        """Root mean square error over the six points, in percentage points."""
        return float(np.sqrt(np.mean((self.points[0] - PUBLISHED) ** 2)))

    @property
    def rises(self) -> bool:
        """Whether the reduction increases with the number of ranks, as published."""
        return bool((np.diff(self.points[0, :3]) > 0).all())

    @property
    def ranges(self) -> list[list[float]]:
        """Per point: the value over all microbatches, and the minimum and maximum over the fifths."""
        return np.stack([self.points[0], self.points[1:].min(0), self.points[1:].max(0)], axis=1).tolist()


class Loads:
    """One kind of loads with its results; points shared between readings are planned once."""

    def __init__(self, kind: tuple[Shape, int], seed: int, number: int) -> None:
        shape, copies = kind
        self.loads = {case.num_ranks: counts(case, seed, number, copies, shape) for case in CASES}
        self.before = {ranks: straggler(plain(loads)) for ranks, loads in self.loads.items()}
        self._known: dict[tuple[Reading, int, int], np.ndarray] = {}

    def find(self, reading: Reading) -> Found:
        """Return the results at the six points."""
        figure_5 = [self._reduced(reading, case.num_ranks, reading.main) for case in CASES]
        figure_6 = [self._reduced(reading, 8, number) for number in DYNAMIC]
        return Found(np.stack([*figure_5, *figure_6], axis=1))

    def _reduced(self, reading: Reading, ranks: int, num_dynamic: int) -> np.ndarray:
        """Return the reduction in percent, `[1 + GROUPS]`."""
        key = replace(reading, main=4), ranks, num_dynamic
        if key not in self._known:
            after = _sums(straggler_after(self.loads[ranks], reading, num_dynamic))
            self._known[key] = 100 * (1 - after / _sums(self.before[ranks]))
        return self._known[key]


def _sums(values: np.ndarray) -> np.ndarray:
    """Return sums over all microbatches and over each group, `[1 + GROUPS]`."""
    return np.array([part.sum() for part in (values, *np.array_split(values, GROUPS))])


def error_over(found: Iterable[Found]) -> float:
    """Return the root mean square error over all kinds of loads, weighted equally."""
    return float(np.sqrt(np.mean([one.error**2 for one in found])))


def one_changed(start: Reading) -> list[Reading]:
    """Return the reading, and all readings that differ from it in one rule."""
    rules = [field.name for field in fields(start)]
    return [one for one in readings() if sum(getattr(one, rule) != getattr(start, rule) for rule in rules) <= 1]


def distinct(ranked: Iterable[Reading], found: dict[Reading, list[Found]], number: int) -> list[Reading]:
    """Return the first `number` readings with distinct results; a budget often has no effect."""
    first: dict[bytes, Reading] = {}
    for reading in ranked:
        first.setdefault(np.stack([one.points[0] for one in found[reading]]).tobytes(), reading)
    return list(first.values())[:number]


def baseline(kinds: dict[str, Loads]) -> Table:
    """Return FasterMoE's rows of figure 5."""
    known = np.array([100 * (1 - case.fastermoe / case.straggler) for case in CASES])
    rows: list[list[Value]] = [["published", *known.tolist(), None]]
    for name, kind in kinds.items():
        cut = np.array([reduction(fastermoe(loads), plain(loads)) for loads in kind.loads.values()])
        rows.append([name, *cut.tolist(), float(np.sqrt(np.mean((cut - known) ** 2)))])
    columns = ("2 ranks", "4 ranks", "8 ranks", "error")
    return Table({"FasterMoE, % less": ""} | dict.fromkeys(columns, ".1f"), rows)


HEAD = ("dynamic", "accepted if", "if rejected", "tau", "budget", "main dyn")


def errors(title: str, lines: list[Reading], found: dict[Reading, list[Found]], kinds: Iterable[str]) -> Table:
    """Return one row per reading: its error on each kind of loads, and the kinds with the published trend."""
    names = list(kinds)
    rows: list[list[Value]] = []
    for reading in lines:
        rises = "; ".join(name for name, one in zip(names, found[reading], strict=True) if one.rises)
        of_kinds = [one.error for one in found[reading]]
        rows.append([*str(reading).split(" | "), *of_kinds, error_over(found[reading]), rises or "none"])
    columns = dict.fromkeys(HEAD, "") | dict.fromkeys((*names, "all"), ".1f") | {"rises on": ""}
    return Table(columns, rows, title)


def points(name: str, rows: dict[str, Found]) -> Table:
    """Return one row per reading: the six points with ranges."""
    columns = ("2 ranks", "4 ranks", "8 ranks", "8, dyn 2", "8, dyn 4", "8, dyn 8", "error")
    lines: list[list[Value]] = [["published", *PUBLISHED.tolist(), None]]
    lines += [[label, *found.ranges, found.error] for label, found in rows.items()]
    return Table({"reading": ""} | dict.fromkeys(columns, ".1f"), lines, f"{name}: % less")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=400, help="Microbatches per point.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--best", type=int, default=8, help="Readings in the tables of the best.")
    parser.add_argument("--all", action="store_true", help="Also report the errors of every reading.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    kinds = {name: Loads(kind, given.seed, given.number) for name, kind in KINDS.items()}
    found = {reading: [kind.find(reading) for kind in kinds.values()] for reading in readings()}
    ranked = sorted(found, key=lambda reading: error_over(found[reading]))
    bare = [reading for reading in ranked if reading.tau == 1]
    best = distinct(ranked, found, given.best), distinct(bare, found, given.best)
    tables = {
        "fastermoe": baseline(kinds),
        "one_changed": errors("The default, and one rule changed", one_changed(Reading()), found, kinds),
        "best": errors("The best over all loads", best[0], found, kinds),
        "best_without_tau": errors("The best without a threshold", best[1], found, kinds),
    }
    for column, name in enumerate(kinds):
        here = sorted(found, key=lambda reading: found[reading][column].error)
        nearest = {str(reading).replace(" | ", "; "): reading for reading in distinct(here, found, 3)}
        rows = {label: found[reading][column] for label, reading in (NAMED | nearest).items()}
        tables[f"points_{name.replace(', ', '_')}"] = points(name, rows)
    if given.all:
        tables["every"] = errors(f"Every reading: {len(ranked)}", ranked, found, kinds)
    return tables
