"""Training on four ranks with CPU quotas and shaped links: predicted by the simulator, then measured.

    python -m benchmarks.network.bench_training calibrate 2    # rates of the testbed, from other sizes
    python -m benchmarks.network.bench_training predict 2      # twenty predictions; commit them
    python -m benchmarks.network.bench_training measure 2      # the same twenty
    python -m benchmarks.network.bench_training compare 2      # predictions beside measurements
    python -m benchmarks.network.bench_training again 2        # the same, predicted by the simulator of today

Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.levels import level_rates
from benchmarks.network.testbed import (
    CONFIG,
    CORES,
    GATHERED,
    KEEP_MEMORY,
    NUM_RANKS,
    WARM_STEPS,
    Case,
    Program,
    Testbed,
    run,
)
from benchmarks.network.training_rounds import (
    MODEL,
    ROUNDS,
    Points,
    counts_of,
    records,
    relocation,
)
from benchmarks.network.training_tables import compared, slowest
from benchmarks.results import Table, Value, merge, out_option, read, report
from jax_moe_lb import System
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, Links, Migration, mean_report, replay
from jax_moe_lb.sim.config import load_config

RESULTS = Path(__file__).parents[1] / "results"
ALL_ROUNDS = RESULTS / "network_training.json"
RAW = Path("runs/network_training")


# ---- calibration ---------------------------------------------------------------


def calibrate(bed: Testbed, points: Points) -> dict[str, Any]:
    """Return the machine's description and the seconds of a step without experts, at every rate."""
    from jax_moe_lb.sim import measure
    from jax_moe_lb.sim.machine_profile import to_yaml
    from models.data.sources import default_corpus

    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    program = Program(Case(None), CONFIG, bed.mesh, np.zeros((1, NUM_RANKS, CONFIG.model.num_experts), np.int32))
    found = {}
    for rate in points.rates:
        bed.limits(rate, CORES)
        machine = to_yaml(measure.measure(NUM_RANKS), measure.HIDDEN, measure.INNER)
        levels = level_rates(bed.mesh) if points.has_domains else None
        rest = bed.times(program, corpus, 5, 1, None, WARM_STEPS)["seconds"]
        found[str(rate)] = {"machine": machine, "levels": levels, "rest_s": rest}
        bed.limits(None, None)
    return found


def calibrated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calibration of rank 0, with the step of the slowest rank."""
    return {
        rate: {**of, "rest_s": float(np.median(np.max([one[rate]["rest_s"] for one in found], 0)))}
        for rate, of in found[0].items()
    }


def cluster_of(calibration: dict[str, Any]) -> Cluster:
    """Return the cluster of a calibration: a machine file of `jax-moe-lb calibrate`, and the rates of two domains."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(calibration["machine"])
        found = load_config("machine", str(path)).cluster
    assert found is not None
    cluster, rates = found.build(), calibration.get("levels")
    if rates is None:
        return cluster
    levels = (Links(name, 2, rates[name], latency_s=cluster.levels[-1].latency_s) for name in ("node", "gpu"))
    return replace(cluster, levels=tuple(levels))


# ---- predictions ---------------------------------------------------------------


def without_rates(system: System) -> System:
    """Return a system with the plans of a topology without rates, as the one of the measured mesh."""
    if not isinstance(system.balancer, Exact):
        return system
    return replace(system, balancer=replace(system.balancer, cost=None))


def predicted_s(case: Case, routing: str, steps: int, calibration: dict[str, Any]) -> tuple[float, float, float]:
    """Return the mean predicted seconds of a step, and the imbalance before and after."""
    assert case.system is not None
    model, cluster = replace(MODEL, other_s=calibration["rest_s"]), cluster_of(calibration)
    counts = counts_of(routing)[:steps]
    if case.system.relocates:
        counts = np.take_along_axis(counts, relocation(routing, steps)[None, :, None], 3)
    migration = Migration(GATHERED) if case.gathers else Migration()
    found = mean_report(list(replay(without_rates(case.system), model, cluster, counts, migration=migration)))
    return found.step_s, found.imbalance_before, found.imbalance_after


PREDICTED = {
    "Mbit/s": ".0f",
    "routing": "",
    "system": "",
    "imbalance before": ".2f",
    "after": ".2f",
    "predicted ms": ".0f",
}


def predictions(number: int, calibration: dict[str, Any]) -> Table:
    """Return the predictions of a round."""
    rows: list[list[Value]] = []
    for part in ROUNDS[number].parts:
        for rate, routing, name in itertools.product(part.rates, part.routings, part.cases):
            step_s, before, after = predicted_s(part.cases[name], routing, ROUNDS[number].steps, calibration[str(rate)])
            rows.append([rate / 1e6, routing, name, before, after, step_s * 1e3])
    return Table(PREDICTED, rows)


CALIBRATED = {
    "Mbit/s": ".0f",
    "exchange MB/s": ".1f",
    "its latency ms": ".1f",
    "experts GFLOP/s": ".1f",
    "backward over forward": ".2f",
    "planner us": ".0f",
    "permutation GB/s": ".1f",
    "step without experts ms": ".0f",
    "between domains MB/s": ".1f",
}


def calibration_table(found: dict[str, Any]) -> Table:
    """Return the calibrated rates."""
    rows: list[list[Value]] = []
    for rate, of in found.items():
        cluster = cluster_of(of)
        link, gemm = cluster.levels[-1], cluster.gemm
        speed = gemm.seconds(np.array([[1024]]), 1.0)[0]
        rates = [link.bytes_per_s / 1e6, link.latency_s * 1e3, 1024 / speed / 1e9, cluster.backward_factor]
        rates += [(cluster.planner_s or 0) * 1e6, (cluster.hbm_bytes_per_s or 0) / 1e9, of["rest_s"] * 1e3]
        between = cluster.levels[0].bytes_per_s / 1e6 if len(cluster.levels) > 1 else None
        rows.append([float(rate) / 1e6, *rates, between])
    return Table(CALIBRATED, rows)


# ---- measurements --------------------------------------------------------------


def measure(bed: Testbed, number: int, at: int, passes: int, raw: str, after: Path | None) -> dict[str, Any]:
    """Return the times of all points of a round on one network, interleaved."""
    part = ROUNDS[number].parts[at]
    programs = bed.compiled(part.cases, records()[0])
    while after is not None and not after.exists():
        time.sleep(0.5)
    return {"points": points_of(bed, programs, part, ROUNDS[number].steps, passes, f"{raw}.{bed.rank.index}")}


def points_of(
    bed: Testbed, programs: dict[str, Program], part: Points, steps: int, passes: int, raw: str
) -> list[dict[str, Any]]:
    """Return the times of all points of a network, interleaved."""
    from models.data.sources import default_corpus

    corpus, found = default_corpus(CONFIG.data.max_corpus_bytes), list[dict[str, Any]]()
    for rate in part.rates:
        bed.limits(rate, CORES)
        for turn, routing, name in itertools.product(range(passes), part.routings, part.cases):
            program = programs[name]
            if program.case.system is not None and program.case.system.relocates:
                program.relocate(relocation(routing, steps))
            times = bed.times(program, corpus, steps, 1, records()[1][routing][:steps], WARM_STEPS)
            found.append({"rate": rate, "turn": turn, "routing": routing, "system": name, **times})
            Path(raw).write_text(json.dumps(found))
            bed.say(f"{turn} {rate / 1e6:.0f} {routing} {name}: {np.mean(times['seconds']):.3f} s")
        bed.limits(None, None)
    return found


def predict(number: int, folder: Path) -> dict[str, Table]:
    """Return the calibrated rates and the predictions of a round."""
    calibration = json.loads((folder / f"calibration_{number}.json").read_text())
    return {"calibrated": calibration_table(calibration), "predictions": predictions(number, calibration)}


def compare(number: int, folder: Path) -> dict[str, Table]:
    """Return the predictions of a round beside its measurements."""
    predicted = read(ALL_ROUNDS)[f"network_training_predicted_{number}"].tables["predictions"]
    return compared(predicted, measured_points(number, folder))


def again(number: int, folder: Path) -> dict[str, Table]:
    """Summarize predictions by the simulator of today, compared with the measurements of a round."""
    calibration = json.loads((folder / f"calibration_{number}.json").read_text())
    return {"summary": compared(predictions(number, calibration), measured_points(number, folder))["summary"]}


def measured_points(number: int, folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a round on all networks, with the seconds of the slowest rank."""
    files = [folder / f"measured_{number}_{at}.json" for at in range(len(ROUNDS[number].parts))]
    found = [[one["points"] for one in json.loads(file.read_text())] for file in files]
    return [point for of_ranks in found for point in slowest(of_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reports = {"predict": predict, "compare": compare, "again": again}
    parser.add_argument("part", choices=("calibrate", "measure", *reports))
    parser.add_argument("round", type=int, choices=ROUNDS)
    parser.add_argument("--passes", type=int, default=2, help="Interleaved passes over all points.")
    parser.add_argument("--folder", type=Path, default=RAW, help="Folder of raw measurements.")
    parser.add_argument("--networks", type=int, nargs="+", help="Networks of the round to measure; all by default.")
    parser.add_argument("--after", type=Path, help="File to wait for between compilation and measurement.")
    out_option(parser)
    given = parser.parse_args()
    os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    if given.part in reports:
        end = {"predict": "predicted", "compare": "measured", "again": "again"}[given.part]
        out = RESULTS / f"network_training_{end}_{given.round}.json"
        report(reports[given.part](given.round, given.folder), given.out or out)
        if given.out is None:
            merge(out, ALL_ROUNDS)
        return
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
    load, start_s = os.getloadavg()[0], time.monotonic()
    measured(given)
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; {time.monotonic() - start_s:.0f} s")


def measured(given: argparse.Namespace) -> None:
    """Run a part on the testbed and write its raw results."""
    parts, folder, number = ROUNDS[given.round].parts, given.folder.absolute(), given.round
    if given.part == "calibrate":
        found = [calibrated(run(partial(calibrate, points=of), 900, of.has_domains)) for of in parts]
        (folder / f"calibration_{number}.json").write_text(json.dumps(found[0] | found[-1], indent=1))
    else:
        for at in given.networks or range(len(parts)):
            raw = folder / f"measured_{number}_{at}.json"
            one = partial(measure, number=number, at=at, passes=given.passes, raw=str(raw), after=given.after)
            raw.write_text(json.dumps(run(one, 7200, parts[at].has_domains)))


if __name__ == "__main__":
    main()
