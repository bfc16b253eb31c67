"""Training on four ranks with CPU quotas and shaped links: predicted by the simulator, then measured.

    python -m benchmarks.network training calibrate    # rates of the testbed, from other sizes
    python -m benchmarks.network training predict      # predictions; commit them
    python -m benchmarks.network training measure      # the same points
    python -m benchmarks.network training compare      # predictions beside measurements

Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import itertools
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.gains import CASES, MODEL, RATES, ROUTINGS, STEPS, counts_of, records
from benchmarks.network.testbed import CONFIG, CORES, KEEP_MEMORY, NUM_RANKS, WARM_STEPS, Case, Program, Testbed, run
from benchmarks.render.results import Table, Value, read, save_run, spread
from jax_moe_lb import System
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, Migration, Report, mean_report, replay
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.machine_profile import to_yaml
from jax_moe_lb.sim.measure import HIDDEN, INNER
from jax_moe_lb.sim.measure import measure as measure_machine
from models.data.sources import default_corpus

ROUND = 6
"""Round of predictions and measurements; earlier ones had other programs."""

RESULTS = Path(__file__).parents[1] / "results"
ALL_ROUNDS = RESULTS / "network_training.json"
RAW = Path("runs/network_training")
"""Folder of raw measurements."""

PASSES = 2
"""Interleaved passes over all points."""

CALIBRATION, MEASURED = f"calibration_{ROUND}.json", f"measured_{ROUND}_0.json"


def step_ms(measured: Sequence[Mapping[str, Any]]) -> dict[tuple[float, str, str], np.ndarray]:
    """Return the mean milliseconds of a step in each pass, by rate in Mbit/s, routing and system."""
    found = defaultdict(list)
    for one in measured:
        key = (one["rate"] / 1e6, one["routing"], one["system"])
        found[key].append(1e3 * float(np.mean(one["seconds"])))
    return {key: np.array(times) for key, times in found.items()}


def slowest(of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the measurements of rank 0 with the seconds of the slowest rank."""
    return [
        {**same[0], "seconds": np.max([one["seconds"] for one in same], 0).tolist()}
        for same in zip(*of_ranks, strict=True)
    ]


POINT = {"Mbit/s": ".0f", "routing": "", "system": ""}
COMPARED = POINT | {"predicted ms": ".0f", "measured ms": ".0f", "deviation %": "+.1f"}
COMPARED |= {"over plain, predicted": ".2f", "over plain, measured": ".2f"}
SUMMARY = {"": "", "points": "d", "median deviation %": ".1f", "largest deviation %": ".1f"}


def compared(predicted: Table, measured: Sequence[Mapping[str, Any]]) -> dict[str, Table]:
    """Return predictions beside measurements, and a summary of errors."""
    times = step_ms(measured)
    expected = {tuple(point[name] for name in POINT): float(point["predicted ms"]) for point in predicted.dicts()}
    found = {key: float(np.median(times[key])) for key in expected}
    off = {key: 100 * (ms / found[key] - 1) for key, ms in expected.items()}
    rows: list[list[Value]] = []
    for key, ms in expected.items():
        at_plain = (*key[:2], "plain")
        over = [expected[at_plain] / ms, found[at_plain] / found[key]]
        rows.append([*key, ms, spread(times[key]), off[key], *over])
    errors = np.abs(list(off.values()))
    summary: list[Value] = ["all", len(off), float(np.median(errors)), float(errors.max())]
    return {"compared": Table(COMPARED, rows), "summary": Table(SUMMARY, [summary])}


# ---- calibration ---------------------------------------------------------------


def calibrate(bed: Testbed) -> dict[str, Any]:
    """Return the machine's description and the seconds of a step without experts, at every rate."""
    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    program = Program(Case(None), CONFIG, bed.mesh, np.zeros((1, NUM_RANKS, CONFIG.model.num_experts), np.int32))
    found = {}
    for rate in RATES:
        bed.limits(rate, CORES)
        machine = to_yaml(measure_machine(NUM_RANKS), HIDDEN, INNER)
        rest = bed.times(program, corpus, 5, None, WARM_STEPS)["seconds"]
        found[str(rate)] = {"machine": machine, "rest_s": rest}
        bed.limits(None, None)
    return found


def calibrated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calibration of rank 0, with the step of the slowest rank."""
    return {
        rate: {**of, "rest_s": float(np.median(np.max([one[rate]["rest_s"] for one in found], 0)))}
        for rate, of in found[0].items()
    }


def cluster_of(calibration: dict[str, Any]) -> Cluster:
    """Return the cluster of a calibration: a machine file of `jax-moe-lb calibrate`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(calibration["machine"])
        found = load_config("machine", str(path)).cluster
    assert found is not None
    return found.build()


# ---- predictions ---------------------------------------------------------------


def without_rates(system: System) -> System:
    """Return a system with the plans of a topology without rates, as the one of the measured mesh."""
    if not isinstance(system.balancer, Exact):
        return system
    return replace(system, balancer=replace(system.balancer, cost=None))


def replayed_step(case: Case, counts: np.ndarray, calibration: dict[str, Any]) -> Report:
    """Return the predicted mean step of counts `[steps, layers, R, E]`."""
    assert case.system is not None
    cluster, tokens = cluster_of(calibration), int(counts[0, 0, 0].sum()) // MODEL.per_token
    (level,) = cluster.levels
    cluster = replace(cluster, levels=(replace(level, size=counts.shape[2]),))
    # The step without experts is measured at the tokens of `MODEL`.
    model = replace(MODEL, tokens=tokens, other_s=calibration["rest_s"] * tokens / MODEL.tokens)
    system = case.system if case.has_rates else without_rates(case.system)
    return mean_report(list(replay(system, model, cluster, counts, migration=Migration(case.gathered))))


EXCHANGES = ("counts", "dispatch", "combine", "weights", "gradients")
"""Stages of the simulator that are exchanges, forward and backward."""


def exchange_share(step: Report) -> float:
    """Return the share of exchanges in the time of a step, in percent."""
    stages = {name: of.exposed_s for name, of in step.stages.items() if name.partition(" (")[0] in EXCHANGES}
    return 100 * sum(stages.values()) / step.step_s


PREDICTED = POINT | {"imbalance before": ".2f", "after": ".2f", "predicted ms": ".0f", "exchanges %": ".0f"}


def predictions(calibration: dict[str, Any]) -> Table:
    rows: list[list[Value]] = []
    for rate, routing, name in itertools.product(RATES, ROUTINGS, CASES):
        step = replayed_step(CASES[name], counts_of(routing), calibration[str(rate)])
        times = [step.imbalance_before, step.imbalance_after, 1e3 * step.step_s, exchange_share(step)]
        rows.append([rate / 1e6, routing, name, *times])
    return Table(PREDICTED, rows)


CALIBRATED = {"Mbit/s": ".0f", "exchange MB/s": ".1f", "its latency ms": ".1f", "experts GFLOP/s": ".1f"}
CALIBRATED |= {"backward over forward": ".2f", "planner us": ".0f", "permutation GB/s": ".1f"}
CALIBRATED |= {"step without experts ms": ".0f"}


def calibration_table(found: dict[str, Any]) -> Table:
    """Return the calibrated rates."""
    rows: list[list[Value]] = []
    for rate, of in found.items():
        cluster = cluster_of(of)
        link, gemm = cluster.levels[-1], cluster.gemm
        speed = gemm.seconds(np.array([[1024]]), 1.0)[0]
        rates = [link.bytes_per_s / 1e6, link.latency_s * 1e3, 1024 / speed / 1e9, cluster.backward_factor]
        rates += [(cluster.planner_s or 0) * 1e6, (cluster.hbm_bytes_per_s or 0) / 1e9, of["rest_s"] * 1e3]
        rows.append([float(rate) / 1e6, *rates])
    return Table(CALIBRATED, rows)


# ---- measurements --------------------------------------------------------------


def measure(bed: Testbed) -> list[dict[str, Any]]:
    """Return the times of all points, interleaved."""
    table, numbers = records()
    programs = bed.compiled(CASES, table)
    corpus, found = default_corpus(CONFIG.data.max_corpus_bytes), list[dict[str, Any]]()
    for rate in RATES:
        bed.limits(rate, CORES)
        for turn, routing, name in itertools.product(range(PASSES), ROUTINGS, CASES):
            times = bed.times(programs[name], corpus, STEPS, numbers[routing], WARM_STEPS)
            found.append({"rate": rate, "turn": turn, "routing": routing, "system": name, **times})
            (RAW / f"{MEASURED}.{bed.rank.index}").write_text(json.dumps(found))
            bed.say(f"{turn} {rate / 1e6:.0f} {routing} {name}: {np.mean(times['seconds']):.3f} s")
        bed.limits(None, None)
    return found


def measured_points() -> list[dict[str, Any]]:
    """Return the measurements, with the seconds of the slowest rank."""
    return slowest([one["points"] for one in json.loads((RAW / MEASURED).read_text())])


def predict() -> dict[str, Table]:
    """Return the calibrated rates and the predictions."""
    calibration = json.loads((RAW / CALIBRATION).read_text())
    return {"calibrated": calibration_table(calibration), "predictions": predictions(calibration)}


def compare() -> dict[str, Table]:
    """Return the predictions beside the measurements."""
    predicted = read(ALL_ROUNDS)[f"network_training_predicted_{ROUND}"].tables["predictions"]
    return compared(predicted, measured_points())


REPORTS = {"predict": ("predicted", predict), "compare": ("measured", compare)}
"""Names of the results, and their tables."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("calibrate", "measure", *REPORTS))


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    """Return the tables of a report, after saving them beside the other rounds unless `--out` is given."""
    os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    if given.part in REPORTS:
        name, report = REPORTS[given.part]
        tables = report()
        if given.out is None:
            save_run(tables, f"network_training_{name}_{ROUND}", ALL_ROUNDS)
        return tables
    sandbox.enter()
    RAW.mkdir(parents=True, exist_ok=True)
    if given.part == "calibrate":
        (RAW / CALIBRATION).write_text(json.dumps(calibrated(run(calibrate, 900)), indent=1))
    else:
        ranks = run(measure, 7200)
        (RAW / MEASURED).write_text(json.dumps([{"points": points} for points in ranks]))
    return {}
