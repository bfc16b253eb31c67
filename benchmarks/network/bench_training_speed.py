"""Speed, memory and stages of the runs of `bench_training_curves` on four ranks with CPU quotas and shaped links.

    python -m benchmarks.training curves --curves runs/training_curves    # counts of every step
    python -m benchmarks.network.bench_training_speed measure    # seconds of twenty steps of each run, and profiles
    python -m benchmarks.network.bench_training_speed memory     # resident memory of a step of each system
    python -m benchmarks.network.bench_training_speed table      # all tables

A step replays the counts of a step of the run, times the ratio of the batches, so any step can be timed without those
before it. Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.memory import measured_peak
from benchmarks.network.speed_tables import memory, speeds, stages
from benchmarks.network.stages import seconds_by_operation, seconds_by_stage
from benchmarks.network.testbed import CONFIG, CORES, KEEP_MEMORY, RELEASE_MEMORY, Program, Testbed, run
from benchmarks.network.training_rounds import NUM_TOKENS
from benchmarks.network.training_runs import (
    DOMAINS,
    FLAT,
    OWN,
    REPLAYED,
    RUNS,
    Curve,
    Curves,
    load_curves,
    runs,
    timed_counts,
)
from benchmarks.network.training_tables import slowest
from benchmarks.results import Table, out_option, report

RATES = {FLAT: 2000e6, DOMAINS: 800e6}
"""Rate of a limited link on each network, in bits per second."""

PASSES = 5
"""Interleaved passes; each times every fifth of the steps."""

Records = dict[tuple[str, str], list[list[float]]]
"""Records of each layer in every timed step, by routing and run."""


def records_of(network: str, curves: Mapping[str, Curves]) -> tuple[np.ndarray, Records]:
    """Return the records `[records, R, E]` of all runs on a network, and their numbers."""
    all_counts, numbers, first = list[np.ndarray](), Records(), 0
    for routing, of_routing in curves.items():
        for name in runs(routing, network):
            counts = timed_counts(name, network, of_routing, NUM_TOKENS)
            of_run = np.arange(first, first + counts[..., 0, 0].size, dtype=np.float64)
            numbers[routing, name] = of_run.reshape(counts.shape[:2]).tolist()
            all_counts.append(counts.reshape(-1, *counts.shape[2:]))
            first += of_run.size
    return np.concatenate(all_counts), numbers


def measure(bed: Testbed, network: str, curves: Mapping[str, Curves]) -> dict[str, Any]:
    """Return the seconds of the timed steps of all runs, interleaved, and then the stages of two steps of each."""
    from models.data.sources import default_corpus

    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    table, records = records_of(network, curves)
    cases = {name: case for name, case in RUNS[network].items() if not case.bias_rate}
    programs = bed.compiled(cases, table)
    bed.limits(RATES[network], CORES)
    for program in programs.values():
        bed.times(program, corpus, 1, 1, next(iter(records.values())), 0)
    points: list[dict[str, Any]] = []
    for turn in range(PASSES):
        for (routing, name), of_steps in records.items():
            chosen = of_steps[turn::PASSES]
            times = bed.times(program_of(name, programs, network), corpus, len(chosen), 1, chosen, 0)
            points.append({"turn": turn, "routing": routing, "run": name, **times})
            bed.say(f"{turn} {routing} {name}: {np.mean(times['seconds']):.3f} s")
    profiles = {}
    for (routing, name), of_steps in records.items():
        chosen, program = of_steps[PASSES // 2 :: len(of_steps) // 2], program_of(name, programs, network)
        operations = seconds_by_operation(partial(bed.times, program, corpus, len(chosen), 1, chosen, 0))
        profiles[f"{routing}/{name}"] = seconds_by_stage(operations, program.program.as_text())
        bed.say(f"{routing} {name}: profiled")
    bed.limits(None, None)
    compiled = {name: program.memory_bytes for name, program in programs.items()}
    return {"points": points, "stages": profiles, "memory": compiled}


def program_of(name: str, programs: dict[str, Program], network: str) -> Program:
    """Return the program of a run; a router with bias routes as its counts say, with the program of `plain`."""
    return programs[name] if name in programs else programs[f"plain{network}"]


def all_curves(folder: Path) -> dict[str, dict[str, Curve]]:
    """Return the curves of each routing."""
    return {routing: load_curves(folder / f"{routing}.npz") for routing in (OWN, REPLAYED)}


def tables(folder: Path, curves: Path) -> dict[str, Table]:
    """Return all tables."""
    points, profiles, compiled = list[dict[str, Any]](), {}, {}
    for network, file in FILES.items():
        of_ranks = json.loads((folder / file).read_text())
        points += [{**one, "network": network} for one in slowest([one["points"] for one in of_ranks])]
        profiles |= of_ranks[0]["stages"]
        compiled |= of_ranks[0]["memory"]
    peaks = json.loads((folder / "memory.json").read_text())
    found = {}
    for routing, of_runs in all_curves(curves).items():
        of_routing = {key.removeprefix(f"{routing}/"): of for key, of in profiles.items() if key.startswith(routing)}
        of_points = [one for one in points if one["routing"] == routing]
        found[routing] = speeds(of_points, of_runs, peaks, of_routing)
        found[f"{routing}_stages"] = stages(of_routing)
    return found | {"memory": memory(compiled, peaks)}


FILES = {FLAT: "flat.json", DOMAINS: "domains.json"}
"""Files of raw measurements on each network."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("measure", "memory", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/training_speed"), help="Folder of raw measurements.")
    parser.add_argument("--curves", type=Path, default=Path("runs/training_curves"), help="Folder of all curves.")
    out_option(parser)
    given = parser.parse_args()
    missing = [f"{routing}.npz" for routing in (OWN, REPLAYED) if not (given.curves / f"{routing}.npz").exists()]
    if given.part != "memory" and missing:
        parser.error(f"--curves is {given.curves}; expected {missing} there, from bench_training_curves")
    os.environ["GLIBC_TUNABLES"] = RELEASE_MEMORY if given.part == "memory" else KEEP_MEMORY
    if given.part == "table":
        report(tables(given.folder, given.curves), given.out)
        return
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
    load, start_s = os.getloadavg()[0], time.monotonic()
    if given.part == "memory":
        peaks = {}
        for network, cases in RUNS.items():
            for name, case in cases.items():
                peaks[name] = max(run(partial(measured_peak, case=case), 1200, network == DOMAINS))
                print(f"{name}: {peaks[name] / 1e6:.0f} MB", flush=True)
        (given.folder / "memory.json").write_text(json.dumps(peaks))
    else:
        curves = all_curves(given.curves)
        for network, file in FILES.items():
            found = run(partial(measure, network=network, curves=curves), 7200, network == DOMAINS)
            (given.folder / file).write_text(json.dumps(found))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
