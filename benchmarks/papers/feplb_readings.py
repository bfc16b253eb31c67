"""Interpretations of FEPLB's scheduler (arXiv 2604.19654) beside the token stragglers published in its paper.

The paper gives the order of moves: the rank with the highest load gives its busiest dynamic expert not yet moved,
whole, to the rank with the lowest load. A `Reading` specifies the other rules. `jax_moe_lb.balancers.FEPLB` has some of
them as options; here all are implemented in NumPy, vectorized over microbatches.

The six points are reductions of the token straggler in percent: figure 5 (2, 4 and 8 ranks) and figure 6 (8 ranks with
2, 4 and 8 dynamic experts). All readings use the same loads, fitted only to the column "before" (`stragglers.py`) and
not to any system. As neither the popularity distribution nor the copies per rank are published, there are four kinds of
loads. The error of a reading is the root mean square over the six points, in percentage points.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.feplb import plain, straggler
from benchmarks.papers.stragglers import CASES, Shape, counts, lognormal, zipf
from benchmarks.papers.stragglers import DYNAMIC as DYNAMIC_EXPERTS
from benchmarks.render.results import Table, Value

NO_TAKER = 2**40
"""Larger than any load."""

NUM_DYNAMIC = 4
"""Dynamic experts of a rank in figure 5."""

PER_TAKER = 8
"""Most experts taken by a rank, as in the paper's memory figure."""

DYNAMIC: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "busiest": lambda tokens: tokens,
    "fixed, first": lambda tokens: np.broadcast_to(-np.arange(tokens.shape[1]), tokens.shape),
}
"""Scores `[N, E]` of tokens `[N, E]` selecting the dynamic experts of a rank, the highest ones.

The first experts by index represent any choice independent of load.
"""

ACCEPT: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "taker < donor before": lambda tokens, giver, taker, mean: taker + tokens < giver,
    "donor >= mean": lambda tokens, giver, taker, mean: giver - tokens >= mean,
    "taker <= donor": lambda tokens, giver, taker, mean: taker + tokens <= giver - tokens,
    "any": lambda tokens, giver, taker, mean: np.ones_like(tokens, bool),
}
"""Condition for a useful move, from the tokens of the expert, and donor, taker and mean load before the move."""


@dataclass(frozen=True)
class Reading:
    dynamic: str = "busiest"
    accept: str = "taker < donor before"
    skip: bool = False
    tau: int = 1

    def __str__(self) -> str:
        after = "next" if self.skip else "stop"
        return " | ".join([self.dynamic, self.accept, after, str(self.tau)])


def straggler_after(loads: np.ndarray, reading: Reading, num_dynamic: int) -> np.ndarray:
    """Return `max(load) - mean(load)` after the moves, `[N]`, in token copies, with all ranks in one domain."""
    number, num_ranks, _ = loads.shape
    flat = loads.sum(1, dtype=np.int64)
    tokens, score = (values.reshape(number, num_ranks, -1) for values in (flat, DYNAMIC[reading.dynamic](flat)))
    order = np.argsort(np.argsort(-score, axis=2, kind="stable"), axis=2)
    movable = (order < num_dynamic) & (tokens >= reading.tau)
    load = tokens.sum(2)
    mean = load.mean(1)
    room, going = np.full(load.shape, PER_TAKER), np.arange(number)
    while going.size:
        giver = load[going].argmax(1)
        able = (room[going] > 0) & (np.arange(num_ranks) != giver[:, None])
        taker = np.where(able, load[going], NO_TAKER).argmin(1)
        owned, dynamic = tokens[going, giver], movable[going, giver]
        ends = (load[going, giver], load[going, taker], mean[going])
        useful = ACCEPT[reading.accept](owned, *(value[:, None] for value in ends))
        expert = np.where(dynamic & useful if reading.skip else dynamic, owned, -1).argmax(1)
        each = np.arange(going.size)
        made = (dynamic & useful)[each, expert] & able[each, taker]
        going, giver, taker, expert = going[made], giver[made], taker[made], expert[made]
        moved = tokens[going, giver, expert]
        load[going, giver] -= moved
        load[going, taker] += moved
        room[going, taker] -= 1
        movable[going, giver, expert] = False
    return load.max(1) - mean


def one_changed() -> Iterator[Reading]:
    """Yield the default, and the readings that differ from it in one rule."""
    yield from (Reading(), Reading(tau=1792), Reading(skip=True))
    yield from (Reading(accept=accept) for accept in list(ACCEPT)[1:])
    yield Reading("fixed, first")


KINDS: dict[str, tuple[Shape, int]] = {
    f"{shape.__name__}, {copies}": (shape, copies) for shape in (lognormal, zipf) for copies in (16384, 32768)
}
"""Loads by popularity distribution and token copies per rank."""

FIGURE_5 = [100 * (1 - case.feplb / case.straggler) for case in CASES]
PUBLISHED = np.array([*FIGURE_5, *DYNAMIC_EXPERTS.values()])


def error(points: np.ndarray) -> float:
    """Return the root mean square error over the points of all kinds of loads, in percentage points."""
    return float(np.sqrt(np.mean((points - PUBLISHED) ** 2)))


def rises(points: np.ndarray) -> bool:
    """Return whether the reduction increases with the number of ranks, as published."""
    return bool((np.diff(points[:3]) > 0).all())


class Loads:
    def __init__(self, kind: tuple[Shape, int], number: int) -> None:
        shape, copies = kind
        self.loads = {case.num_ranks: counts(case, 0, number, copies, shape) for case in CASES}
        self.before = {ranks: straggler(plain(loads)).sum() for ranks, loads in self.loads.items()}

    def find(self, reading: Reading) -> np.ndarray:
        """Return the reductions of a reading at the six points, in percent."""
        points = [(case.num_ranks, NUM_DYNAMIC) for case in CASES] + [(8, number) for number in DYNAMIC_EXPERTS]
        after = [straggler_after(self.loads[ranks], reading, number).sum() for ranks, number in points]
        return 100 * (1 - np.array(after) / np.array([self.before[ranks] for ranks, _ in points]))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=400, help="Microbatches per point.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    kinds = {name: Loads(kind, given.number) for name, kind in KINDS.items()}
    rows: list[list[Value]] = []
    for reading in one_changed():
        found = {name: kind.find(reading) for name, kind in kinds.items()}
        errors = [error(points) for points in (*found.values(), np.stack(list(found.values())))]
        rising = "; ".join(name for name, points in found.items() if rises(points))
        rows.append([*str(reading).split(" | "), *errors, rising or "none"])
    columns = dict.fromkeys(("dynamic", "accepted if", "if rejected", "tau"), "")
    columns |= dict.fromkeys((*kinds, "all"), ".1f") | {"rises on": ""}
    return {"one_changed": Table(columns, rows, "The default, and one rule changed")}
