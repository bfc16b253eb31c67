"""Speed of runs of `training curves` on four ranks with CPU quotas and shaped links.

    python -m benchmarks.training curves train             # counts of every step
    python -m benchmarks.network training_speed predict    # gains of workloads; commit them
    python -m benchmarks.network training_speed measure    # seconds of steps of each run
    python -m benchmarks.network training_speed table      # all tables

A step of a run replays the counts of a step of its curve, times the ratio of the batches, so any step can be timed
without those before it. Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox, testbed
from benchmarks.network import training as rounds
from benchmarks.network import training_runs as runs
from benchmarks.network.gains import GAINS, ROUTINGS, break_even, counts_of, gain_rows, numbered
from benchmarks.render.results import Table, Value, read, save_run, spread
from models.data.sources import default_corpus

TIMED_WORKLOADS = (runs.TEXT, runs.FREE, runs.QUARTER, runs.ROLLOUT)
"""Workloads of four ranks with text, timed with the runs of `WHOLE`; routings of given imbalances without `BASE`."""

RATE = 2000e6
"""Rate of a link, in bits per second."""

PASSES, PER_PASS = 4, 2
"""Interleaved passes, and steps of a run in each."""

Point = tuple[str, str]
"""Workload and run."""

COMPARED = tuple(name.removesuffix(runs.AUX) for name in (runs.EXACT, runs.RATED, runs.GATHERED))
"""Systems whose gains over `plain` are shown on all workloads."""


# ---- tables ----------------------------------------------------------------------

SPEEDS = {"run": "", "tokens/s over plain with the loss": ".2f", "over plain without it": ".2f", "tokens/s": ",.0f"}
SPEEDS |= {"loss after all steps": ".4f", "steps at equal time": "d", "loss then": ".4f", "copies dropped %": ".2f"}
SPEEDS |= {"imbalance before": ".2f", "after": ".2f", "memory MB": ".0f"}


def speeds(
    seconds: Mapping[str, np.ndarray],
    curves: Mapping[str, runs.Curve],
    after: Mapping[str, float],
    memory: Mapping[str, int],
) -> Table:
    """Return speed, loss and balance of each run from the seconds `[passes, steps]` of its timed steps.

    `after` is the imbalance after balancing in these steps.
    Equal time is the longest time in which no run takes all its steps. Ratios of speeds are inside a pass.
    """
    at = {name: elapsed_s(of, len(curves[name].loss)) for name, of in seconds.items()}
    equal_s = min(times[-1] for times in at.values())
    rows: list[list[Value]] = []
    for name, of in seconds.items():
        curve, steps = curves[name], int(np.searchsorted(at[name], equal_s, side="right"))
        speed = [spread(seconds[other].mean(1) / of.mean(1)) for other in (runs.BASE, "plain")]
        speed.append(spread(testbed.CONFIG.tokens_per_step / of.mean(1)))
        loss = runs.last_mean(curve.loss), steps, runs.last_mean(curve.loss[:steps])
        balance = runs.dropped_percent(curve), float(curve.before.mean()), after[name]
        rows.append([name, *speed, *loss, *balance, memory[program_of(name)] / 1e6])
    (first,) = (row[5] for row in rows if row[0] == runs.BASE)
    note = f"Losses are means of the last {runs.WINDOW} steps. Equal time is that of {first} steps of {runs.BASE}."
    return Table(SPEEDS, rows, notes=[note])


def elapsed_s(seconds: np.ndarray, steps: int) -> np.ndarray:
    """Return the seconds from the start of a run to the end of each step, from `[passes, steps]` timed steps."""
    in_order = seconds.T.reshape(-1)
    return np.cumsum(np.repeat(in_order, steps // in_order.size))


def workloads(seconds: Mapping[Point, np.ndarray], predicted: Table) -> Table:
    """Return predicted and measured gains of each system on each workload, with the tuned loss."""
    rows: list[list[Value]] = []
    for workload, system, *of in predicted.rows:
        names = f"{system}{runs.AUX}", runs.BASE, runs.ROOMY
        own, *others = (seconds.get((str(workload), name)) for name in names)
        gains = [None if of is None or own is None else spread(of.mean(1) / own.mean(1)) for of in others]
        rows.append([workload, system, *of, *gains])
    columns = {f"over {name}, measured": ".2f" for name in ("plain", "headroom 1.5")}
    return Table({**predicted.columns, **columns}, rows)


def over_headroom(on_workloads: Table) -> list[list[Value]]:
    """Return the rows of given imbalances as gains over `plain` with more headroom, system by system."""
    roomy, found = runs.ROOMY.removesuffix(runs.AUX), list[list[Value]]()
    for routing, system, _, share, _, predicted, _, measured in on_workloads.rows:
        if routing in ROUTINGS:
            found.append([system, roomy, RATE / 1e6, ROUTINGS[str(routing)], share, predicted, measured])
    return sorted(found, key=lambda row: COMPARED.index(str(row[0])))


# ---- predictions -----------------------------------------------------------------

PREDICTED = {"workload": "", "system": "", "imbalance": ".2f", "exchanges %": ".0f"}
PREDICTED |= {"over plain, predicted": ".2f", "over headroom 1.5, predicted": ".2f"}


def predictions(folder: Path, calibration: Mapping[str, Any]) -> Table:
    """Return the predicted gain of each system on each workload."""
    rows: list[list[Value]] = []
    for workload in (runs.USUAL, *TIMED_WORKLOADS, runs.TWICE, *ROUTINGS):
        counts = counts_on(workload, folder)
        steps = (rounds.replayed_step(runs.CASES[name], counts, dict(calibration)) for name in runs.WHOLE)
        plain, roomy, *others = steps
        level, share = float(runs.imbalance(counts).mean()), rounds.exchange_share(plain)
        for system, of in zip(COMPARED, others, strict=True):
            rows.append([workload, system, level, share, plain.step_s / of.step_s, roomy.step_s / of.step_s])
    return Table(PREDICTED, rows)


def counts_on(workload: str, folder: Path) -> np.ndarray:
    """Return counts `[steps, layers, R, E]` of a run with the tuned loss, or with a given imbalance.

    Steps are of the whole usual run, and of the second half of runs of other workloads.
    """
    if workload in ROUTINGS:
        return np.resize(counts_of(workload), (PASSES * PER_PASS, *counts_of(workload).shape[1:]))
    curve = runs.load_curve(runs.Key(runs.BASE, workload).path(folder))
    half = curve if workload == runs.USUAL else curve._replace(counts=curve.counts[len(curve.counts) // 2 :])
    return runs.timed_counts(runs.CASES[runs.BASE], half, PASSES * PER_PASS)


# ---- measurements ----------------------------------------------------------------

Records = dict[Point, list[list[float]]]
"""Records of each layer in every timed step."""


def records_of(folder: Path) -> tuple[np.ndarray, Records]:
    """Return the records `[records, R, E]` of all points, and their numbers."""
    counts: dict[Point, np.ndarray] = {}
    for name in runs.TIMED:
        curve = runs.load_curve(runs.Key(name).path(folder))
        counts[runs.USUAL, name] = runs.timed_counts(runs.CASES[name], curve, PASSES * PER_PASS)
    for workload in TIMED_WORKLOADS:
        counts |= dict.fromkeys(((workload, name) for name in runs.WHOLE), counts_on(workload, folder))
    for workload in ROUTINGS:
        counts |= dict.fromkeys(((workload, name) for name in runs.WHOLE[1:]), counts_on(workload, folder))
    return numbered(counts)


def program_of(name: str) -> str:
    """Return the run with the program; a router with bias routes as its counts say."""
    return name.removesuffix(" + bias")


def measure(bed: testbed.Testbed, given: argparse.Namespace) -> None:
    """Write the seconds of the timed steps, interleaved, and the memory of the programs."""
    table, records = records_of(given.curves)
    corpus = default_corpus(testbed.CONFIG.data.max_corpus_bytes)
    cases = {name: runs.CASES[name] for name in runs.TIMED if program_of(name) == name}
    programs = bed.compiled(cases, table)
    quarter = bed.compiled({name: runs.CASES[name] for name in runs.WHOLE}, table, runs.SMALL)
    bed.limits(RATE, testbed.CORES)

    def chosen(point: Point) -> testbed.Program:
        return quarter[point[1]] if point[0] == runs.QUARTER else programs[program_of(point[1])]

    memory = {name: program.memory_bytes for name, program in programs.items()}
    for point, of_steps in records.items():
        bed.times(chosen(point), corpus, 1, of_steps, 0)
    points = list[dict[str, Any]]()
    for turn in range(PASSES):
        for point, of_steps in records.items():
            times = bed.times(chosen(point), corpus, PER_PASS, of_steps[turn::PASSES], 0)
            points.append({"turn": turn, "workload": point[0], "run": point[1], **times})
            bed.say(f"{turn} {point}: {np.mean(times['seconds']):.3f} s")
        found = {"memory": memory, "points": points}
        (given.folder / f"measured.{bed.rank.index}.json").write_text(json.dumps(found))
    bed.limits(None, None)


def of_ranks(folder: Path) -> list[dict[str, Any]]:
    """Return the raw measurements of all ranks."""
    return [json.loads((folder / f"measured.{rank}.json").read_text()) for rank in range(testbed.NUM_RANKS)]


def seconds_of(ranks: Sequence[Mapping[str, Any]]) -> dict[Point, np.ndarray]:
    """Return the seconds `[passes, steps]` of each point on its slowest rank."""
    found: dict[Point, list[list[float]]] = defaultdict(list)
    for one in rounds.slowest([rank["points"] for rank in ranks]):
        found[one["workload"], one["run"]].append(one["seconds"])
    return {point: np.array(times) for point, times in found.items()}


def after_of(rank: Mapping[str, Any]) -> dict[str, float]:
    """Return the imbalance after balancing in the timed steps of each run on the usual workload."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in rank["points"]:
        if one["workload"] == runs.USUAL:
            found[one["run"]] += one["after"]
    return {name: float(np.mean(of)) for name, of in found.items()}


def tables(folder: Path, curves: Path) -> dict[str, Table]:
    ranks = of_ranks(folder)
    seconds, first = seconds_of(ranks), ranks[0]
    on_workloads = workloads(seconds, read(SPEED)["network_training_speed_predicted"].tables["predictions"])
    predicted = read(rounds.ALL_ROUNDS)[f"network_training_predicted_{rounds.ROUND}"].tables["predictions"]
    over_plain = gain_rows(predicted, rounds.step_ms(rounds.measured_points()))
    gains = Table(GAINS, [*over_plain, *over_headroom(on_workloads)])
    of_runs = {name: times for (workload, name), times in seconds.items() if workload == runs.USUAL}
    of_curves = {name: runs.load_curve(runs.Key(name).path(curves)) for name in runs.TIMED}
    of_texts = [row for row in on_workloads.rows if row[0] not in ROUTINGS]
    return {
        "speeds": speeds(of_runs, of_curves, after_of(first), first["memory"]),
        "workloads": dataclasses.replace(on_workloads, rows=of_texts),
        "gains": gains,
        "break_even": break_even(gains),
    }


SPEED = rounds.RESULTS / "network_training_speed.json"


def predict(curves: Path) -> dict[str, Table]:
    """Return the predictions by the rates of the last round, and save them beside the measurements."""
    calibration = json.loads((rounds.RAW / rounds.CALIBRATION).read_text())[str(RATE)]
    found = {"predictions": predictions(curves, calibration)}
    save_run(found, "network_training_speed_predicted", SPEED)
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("predict", "measure", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/training_speed"), help="Folder of raw measurements.")
    parser.add_argument("--curves", type=Path, default=Path("runs/training_curves"), help="Folder of all curves.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    """Return the tables, or write raw measurements.

    Raises:
        ValueError: a curve is missing.
    """
    of_base = [runs.Key(runs.BASE, workload) for workload in (*TIMED_WORKLOADS, runs.TWICE)]
    wanted = [*map(runs.Key, runs.TIMED), *of_base]
    missing = [path.name for key in wanted if not (path := key.path(given.curves)).exists()]
    if missing:
        raise ValueError(f"--curves is {given.curves}; expected {missing} there, from `training curves train`")
    os.environ["GLIBC_TUNABLES"] = testbed.KEEP_MEMORY
    if given.part == "table":
        return tables(given.folder, given.curves)
    if given.part == "predict":
        return predict(given.curves)
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
    testbed.run(partial(measure, given=given), 7200)
    return {}
