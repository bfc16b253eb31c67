"""Speed, memory and stages of the runs of `training curves` on four ranks with CPU quotas and shaped links.

    python -m benchmarks.training curves --curves runs/training_curves    # counts of every step
    python -m benchmarks.network training_speed measure    # seconds of twenty steps of each run, and profiles
    python -m benchmarks.network training_speed memory     # resident memory of a step of each system
    python -m benchmarks.network training_speed table      # all tables

A step replays the counts of a step of the run, times the ratio of the batches, so any step can be timed without those
before it. Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.stages import seconds_by_operation, seconds_by_stage
from benchmarks.network.testbed import (
    CONFIG,
    CORES,
    KEEP_MEMORY,
    NUM_RANKS,
    RELEASE_MEMORY,
    Case,
    Program,
    Testbed,
    release_memory,
    run,
)
from benchmarks.network.training import slowest
from benchmarks.network.training_rounds import NUM_TOKENS, records
from benchmarks.network.training_runs import (
    BATCH_TOKENS,
    DOMAINS,
    FLAT,
    INTERVAL,
    OWN,
    REPLAYED,
    RUNS,
    WINDOW,
    Curve,
    Curves,
    curve_of,
    last_mean,
    load_curves,
    runs,
    timed_counts,
)
from benchmarks.render.results import Table, Value, spread

SPEEDS = {
    "run": "",
    "tokens/s over plain": ".2f",
    "tokens/s": ",.0f",
    "loss after all steps": ".4f",
    "steps at equal time": "d",
    "loss then": ".4f",
    "copies dropped %": ".2f",
    "imbalance before": ".2f",
    "after": ".2f",
    "memory MB": ".0f",
    "experts %": ".0f",
    "exchanges %": ".0f",
}


def speeds(
    points: Sequence[Mapping[str, Any]],
    curves: Curves,
    peaks: Mapping[str, float],
    profiles: Mapping[str, Mapping[str, float]],
) -> Table:
    """Return speed, loss and balance of each run.

    Equal time is the longest time in which no run of a network takes all its steps. The speeds of a pass are ratios to
    `plain` of the same pass and network.
    """
    seconds: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for one in points:
        seconds[one["network"], one["run"]].append(one["seconds"])
    at = {key: elapsed_s(np.array(of)) for key, of in seconds.items()}
    rows: list[list[Value]] = []
    equal_of: dict[str, int] = {}
    for (network, name), of in seconds.items():
        curve = curve_of(name, curves)
        equal_s = min(times[-1] for (other, _), times in at.items() if other == network)
        steps = int(np.searchsorted(at[network, name], equal_s, side="right"))
        equal_of.setdefault(network, steps)
        mean_s = np.mean(of, 1)
        plain_s = np.mean(seconds[network, f"plain{network}"], 1)
        speed = [spread(plain_s / mean_s), spread(CONFIG.tokens_per_step / mean_s)]
        loss = last_mean(curve.loss), steps, last_mean(curve.loss[:steps])
        rows.append([name, *speed, *loss, *balance(curve), peaks[name] / 1e6, *shares(profiles[name])])
    flat, domains = equal_of.values()
    note = (
        f"Losses are means of the last {WINDOW} steps. Equal time is that of {flat} steps of plain, and of {domains} "
        "on two domains."
    )
    return Table(SPEEDS, rows, notes=[note])


def elapsed_s(seconds: np.ndarray) -> np.ndarray:
    """Return the seconds from the start of a run to the end of each step."""
    in_order = seconds.T.reshape(-1)
    return np.cumsum(np.repeat(in_order, INTERVAL))


def balance(curve: Curve) -> list[float]:
    """Return the dropped copies in percent, and the imbalance before and after, means of all steps."""
    copies = BATCH_TOKENS * NUM_RANKS * CONFIG.model.experts_per_token * CONFIG.model.num_layers
    return [float(100 * curve.dropped.mean() / copies), float(curve.before.mean()), float(curve.after.mean())]


def shares(profile: Mapping[str, float]) -> list[float]:
    """Return the shares of the experts and of all exchanges in the profiled time of rank 0, in percent."""
    total = sum(profile.values())
    exchanges = sum(seconds for stage, seconds in profile.items() if stage.endswith("exchange"))
    return [100 * profile.get("experts", 0.0) / total, 100 * exchanges / total]


STAGES = {
    "experts": ("experts",),
    "rows": ("dispatch: exchange", "combine: exchange"),
    "weights": ("weights: exchange", "weights"),
    "counts, with the wait for the slowest rank": ("counts: exchange",),
    "sums of gradients, with the wait": ("router: exchange", "rest: exchange"),
}


def stages(profiles: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the share of each stage in the profiled steps of rank 0, in percent."""
    rows: list[list[Value]] = []
    for name, of in profiles.items():
        total = sum(of.values())
        parts = [100 * sum(of.get(part, 0.0) for part in stage) / total for stage in STAGES.values()]
        rows.append([name, *parts, 100 - sum(parts)])
    return Table({"run": "", **dict.fromkeys(STAGES, ".0f"), "the rest of the model": ".0f"}, rows)


def memory(bytes_of: Mapping[str, int], peaks: Mapping[str, float]) -> Table:
    """Return the memory of each program on one rank."""
    rows: list[list[Value]] = []
    for name, compiled in bytes_of.items():
        pairs = [(compiled, bytes_of["plain"]), (peaks[name], peaks["plain"])]
        rows.append([name, *(value for each, plain in pairs for value in (each / 1e6, each / plain))])
    columns = {"run": ""}
    for kind in ("compiled", "measured"):
        columns |= {f"{kind} MB per rank": ".0f", f"{kind} over plain": ".2f"}
    return Table(columns, rows)


STEPS = 2
STATUS = Path("/proc/self/status")


def measured_peak(bed: Testbed, case: Case) -> int:
    """Return the bytes of state and temporaries of a rank: the peak of the process over that of the compiled program.

    The allocator returns freed memory before, so that the memory of compilation does not count.
    """
    from models.data.sources import default_corpus

    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    program = Program(case, CONFIG, bed.mesh, records()[0])
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    bed.times(program, corpus, STEPS, 1, None, 0)
    return resident_bytes("VmHWM") - before


def resident_bytes(name: str) -> int:
    """Return an entry of the status of this process, in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    assert match is not None
    return 1024 * int(match[1])


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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("measure", "memory", "table"))
    parser.add_argument("--folder", type=Path, default=Path("runs/training_speed"), help="Folder of raw measurements.")
    parser.add_argument("--curves", type=Path, default=Path("runs/training_curves"), help="Folder of all curves.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    """Return the tables, or write raw measurements.

    Raises:
        ValueError: a file of curves is missing.
    """
    missing = [f"{routing}.npz" for routing in (OWN, REPLAYED) if not (given.curves / f"{routing}.npz").exists()]
    if given.part != "memory" and missing:
        raise ValueError(f"--curves is {given.curves}; expected {missing} there, from `training curves`")
    os.environ["GLIBC_TUNABLES"] = RELEASE_MEMORY if given.part == "memory" else KEEP_MEMORY
    if given.part == "table":
        return tables(given.folder, given.curves)
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
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
    return {}
