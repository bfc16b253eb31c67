"""Training on four ranks with CPU quotas and shaped links: predicted by the simulator, then measured.

    python -m benchmarks.network.bench_training calibrate 2    # rates of the testbed, from other sizes
    python -m benchmarks.network.bench_training predict 2      # twenty predictions; commit them
    python -m benchmarks.network.bench_training measure 2 --runs 5    # the same twenty, then the training table
    python -m benchmarks.network.bench_training compare 2      # predictions beside measurements
    python -m benchmarks.network.bench_training profile 2      # operations of some steps
    python -m benchmarks.network.bench_training table 2        # the training table

Run it as root, or with user namespaces and writable control groups (see `testbed.py`). `table` also reads the curves of
`python -m benchmarks.bench_training_curves --curves runs/network_training/curves.json`.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network.replayed import recorded
from benchmarks.network.stages import seconds_by_operation, seconds_by_stage
from benchmarks.network.testbed import (
    CASES,
    CONFIG,
    CORES,
    KEEP_MEMORY,
    NUM_RANKS,
    SYSTEMS,
    WARM_STEPS,
    Case,
    Program,
    Testbed,
    run,
)
from benchmarks.network.training_tables import compared, losses, memory, slowest, stages, trained
from benchmarks.results import Table, Value, out_option, report
from benchmarks.results import load as load_tables
from jax_moe_lb import System, exact, plain
from jax_moe_lb.balancers import Exact
from jax_moe_lb.sim import Cluster, LoadShape, ModelShape, mean_report, replay, simulate, skewed_counts
from jax_moe_lb.sim.config import load_config

RESULTS = Path(__file__).parents[1] / "results"
RAW = Path("runs/network_training")
TRACES = Path(__file__).parents[1] / "traces"

NUM_TOKENS = CONFIG.tokens_per_step // NUM_RANKS
STEPS = 4
"""Steps of a routing, measured in turn."""

MODEL = ModelShape(
    layers=CONFIG.model.num_layers,
    hidden=CONFIG.model.embed_dim,
    inner=CONFIG.model.mlp_dim,
    experts=CONFIG.model.num_experts,
    per_token=CONFIG.model.experts_per_token,
    tokens=NUM_TOKENS,
    itemsize=4,
    pre_expert_s=0.0,
)


@dataclass(frozen=True)
class Round:
    """Twenty points: systems x routings x links.

    Args:
        rates: rates of a rank's link per direction, in bits per second.
        routings: names of `counts_of`.
    """

    rates: tuple[float, ...]
    routings: tuple[str, ...]


ROUNDS = {
    1: Round((2000e6, 500e6), ("popular ranks, 2.0", "recorded")),
    2: Round((4000e6, 1000e6), ("zipf, 1.6", "popular ranks, 2.5")),
}


ROUTINGS = tuple(routing for of in ROUNDS.values() for routing in of.routings)
"""Routings of all rounds. Programs contain the counts of all, so both rounds run the same programs."""

TRAIN_RATE, TRAIN_ROUTINGS = 2000e6, ("popular ranks, 2.0",)
"""Link and replayed routings of the training table."""


@cache
def counts_of(routing: str) -> np.ndarray:
    """Return `[STEPS, layers, R, E]` counts: recorded ones, or synthetic ones of a shape and an imbalance."""
    layers = CONFIG.model.num_layers
    if routing == "recorded":
        shape = (layers, NUM_RANKS, CONFIG.model.num_experts)
        found = recorded(TRACES / "free_0.npz", shape, NUM_TOKENS, CONFIG.model.experts_per_token)
        return found[:: len(found) // STEPS][:STEPS]
    shape, imbalance = routing.rsplit(", ", 1)
    steps = [skewed_counts(MODEL, NUM_RANKS, float(imbalance), layers, seed, LoadShape(shape)) for seed in range(STEPS)]
    return np.stack(steps)


@cache
def records() -> tuple[np.ndarray, dict[str, list[list[float]]]]:
    """Return the records of all routings, and those of each routing by step and layer."""
    all_counts = np.stack([counts_of(routing) for routing in ROUTINGS])
    numbers = np.arange(np.prod(all_counts.shape[:3]), dtype=np.float64).reshape(all_counts.shape[:3])
    flat = all_counts.reshape(-1, *all_counts.shape[3:])
    return flat, {routing: of.tolist() for routing, of in zip(ROUTINGS, numbers, strict=True)}


# ---- calibration ---------------------------------------------------------------


def calibrate(bed: Testbed, rates: tuple[float, ...]) -> dict[str, Any]:
    """Return the machine's description and the seconds of a step without experts, at every rate."""
    from jax_moe_lb.sim import measure
    from jax_moe_lb.sim.machine_profile import to_yaml
    from models.data.sources import default_corpus

    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    program = Program(Case(None), CONFIG, bed.mesh, np.zeros((1, NUM_RANKS, CONFIG.model.num_experts), np.int32))
    found = {}
    for rate in rates:
        bed.limits(rate, CORES)
        machine = to_yaml(measure.measure(NUM_RANKS), measure.HIDDEN, measure.INNER)
        rest = bed.times(program, corpus, 5, 1, None, WARM_STEPS)["seconds"]
        found[str(rate)] = {"machine": machine, "rest_s": rest}
        bed.limits(None, None)
    return found


def calibrated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the calibration of rank 0, with the step of the slowest rank."""
    return {
        rate: {**of, "rest_s": float(np.median(np.max([one[rate]["rest_s"] for one in found], 0)))}
        for rate, of in found[0].items()
    }


def cluster_of(machine: str) -> Cluster:
    """Return the cluster of a machine file of `jax-moe-lb calibrate`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.yaml"
        path.write_text(machine)
        found = load_config("machine", str(path)).cluster
    assert found is not None
    return found.build()


# ---- predictions ---------------------------------------------------------------


def without_rates(system: System) -> System:
    """Return a system with the plans of a topology without rates, as the one of the measured mesh."""
    if not isinstance(system.balancer, Exact):
        return system
    return replace(system, balancer=replace(system.balancer, cost=None))


def predicted_s(name: str, routing: str, calibration: dict[str, Any]) -> tuple[float, float, float]:
    """Return the mean predicted seconds of a step, and the imbalance before and after."""
    model, cluster = replace(MODEL, other_s=calibration["rest_s"]), cluster_of(calibration["machine"])
    found = mean_report(list(replay(without_rates(SYSTEMS[name]), model, cluster, counts_of(routing))))
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
    for rate in ROUNDS[number].rates:
        for routing in ROUNDS[number].routings:
            for name in SYSTEMS:
                step_s, before, after = predicted_s(name, routing, calibration[str(rate)])
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
}


def calibration_table(found: dict[str, Any]) -> Table:
    """Return the calibrated rates."""
    rows: list[list[Value]] = []
    for rate, of in found.items():
        cluster = cluster_of(of["machine"])
        link, gemm = cluster.levels[-1], cluster.gemm
        speed = gemm.seconds(np.array([[1024]]), 1.0)[0]
        rates = [link.bytes_per_s / 1e6, link.latency_s * 1e3, 1024 / speed / 1e9, cluster.backward_factor]
        rates += [(cluster.planner_s or 0) * 1e6, (cluster.hbm_bytes_per_s or 0) / 1e9, of["rest_s"] * 1e3]
        rows.append([float(rate) / 1e6, *rates])
    return Table(CALIBRATED, rows)


# ---- measurements --------------------------------------------------------------


def measure(bed: Testbed, number: int, passes: int, runs: int, raw: str) -> dict[str, Any]:
    """Return the times of all points of a round, then those of the training table; all interleaved.

    Args:
        bed: this rank.
        number: number of the round.
        passes: passes over its points.
        runs: passes over the training table; 0 leaves it out.
        raw: file for the results of this rank so far.
    """
    programs = compiled(bed, tuple(CASES if runs else SYSTEMS))
    found = {
        "points": points_of(bed, programs, number, passes),
        "memory": {name: program.memory_bytes for name, program in programs.items()},
        "trained": [],
    }
    for turn in range(runs):
        Path(f"{raw}.{bed.rank.index}").write_text(json.dumps(found))
        found["trained"] += train(bed, programs, turn)
    return found


def points_of(bed: Testbed, programs: dict[str, Program], number: int, passes: int) -> list[dict[str, Any]]:
    """Return the times of all points of a round, interleaved."""
    from models.data.sources import default_corpus

    corpus, found = default_corpus(CONFIG.data.max_corpus_bytes), []
    for rate in ROUNDS[number].rates:
        bed.limits(rate, CORES)
        for turn in range(passes):
            for routing in ROUNDS[number].routings:
                for name in SYSTEMS:
                    times = bed.times(programs[name], corpus, STEPS, 1, records()[1][routing], WARM_STEPS)
                    found.append({"rate": rate, "turn": turn, "routing": routing, "system": name, **times})
                    _say(bed, f"{rate / 1e6:.0f} {routing} {name}: {np.mean(times['seconds']):.3f} s")
        bed.limits(None, None)
    return found


def compiled(bed: Testbed, names: tuple[str, ...]) -> dict[str, Program]:
    """Compile programs without a quota."""
    from benchmarks.network.jax_ranks import check_same_program

    programs = {}
    for name in names:
        programs[name] = Program(CASES[name], CONFIG, bed.mesh, records()[0])
        check_same_program(programs[name].lowered.as_text())
        _say(bed, f"{name}: compiled")
    return programs


def train(bed: Testbed, programs: dict[str, Program], turn: int) -> list[dict[str, Any]]:
    """Return times of all cases with their own routing, then replayed."""
    from models.data.sources import default_corpus

    corpus, found = default_corpus(CONFIG.data.max_corpus_bytes), []
    bed.limits(TRAIN_RATE, CORES)
    for routing in (None, *TRAIN_ROUTINGS):
        for name, program in programs.items():
            # These routers differ from `plain` by their training alone.
            if routing is not None and name in ("router bias", "aux loss"):
                continue
            replayed = None if routing is None else records()[1][routing]
            times = bed.times(program, corpus, STEPS, 1 + turn * STEPS, replayed, 0)
            found.append({"turn": turn, "routing": routing or "own", "system": name, **times})
            _say(bed, f"{turn} {routing} {name}: {np.mean(times['seconds']):.3f} s")
    bed.limits(None, None)
    return found


def profile(bed: Testbed, names: tuple[str, ...], routing: str) -> dict[str, Any]:
    """Return the seconds of each operation and stage of one profiled step, by rank 0."""
    from models.data.sources import default_corpus

    corpus, found = default_corpus(CONFIG.data.max_corpus_bytes), {}
    programs = compiled(bed, names)
    bed.limits(TRAIN_RATE, CORES)
    of_steps = records()[1][routing]
    for name, program in programs.items():
        bed.times(program, corpus, STEPS, 1, of_steps, WARM_STEPS)
        operations = seconds_by_operation(partial(bed.times, program, corpus, STEPS, 1, of_steps, 0))
        text = program.program.as_text()
        found[name] = {"stages": seconds_by_stage(operations, text), "operations": operations, "text": text}
        _say(bed, f"{name}: {found[name]['stages']}")
    bed.limits(None, None)
    return found if bed.rank.index == 0 else {}


def _say(bed: Testbed, line: str) -> None:
    if bed.rank.index == 0:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def predict(number: int, folder: Path) -> dict[str, Table]:
    """Return the calibrated rates and the predictions of a round."""
    calibration = json.loads((folder / f"calibration_{number}.json").read_text())
    return {"calibrated": calibration_table(calibration), "predictions": predictions(number, calibration)}


def compare(number: int, folder: Path) -> dict[str, Table]:
    """Return the predictions of a round beside its measurements."""
    predicted = load_tables(RESULTS / f"network_training_predicted_{number}.json")["predictions"]
    of_ranks = json.loads((folder / f"measured_{number}.json").read_text())
    return compared(predicted, slowest([one["points"] for one in of_ranks]))


def tables(number: int, folder: Path) -> dict[str, Table]:
    """Return the training table, with losses by `bench_training_curves`."""
    of_ranks = json.loads((folder / f"measured_{number}.json").read_text())
    measured = slowest([one["trained"] for one in of_ranks])
    copies = CONFIG.tokens_per_step * CONFIG.model.experts_per_token * CONFIG.model.num_layers
    sizes = CONFIG.tokens_per_step, copies
    own = trained(measured, "own", *sizes)
    speeds = {str(row[0]): float(row[1][0]) for row in own.rows}  # type: ignore[index, arg-type]
    curves = json.loads((folder / "curves.json").read_text())
    profiled = json.loads((folder / "profiled.json").read_text())
    return {
        "own": own,
        "replayed": trained(measured, TRAIN_ROUTINGS[0], *sizes),
        "losses": losses(curves, speeds),
        "stages": stages(profiled),
        "memory": memory(of_ranks[0]["memory"]),
        "h100": on_h100s(),
    }


def on_h100s() -> Table:
    """Return predicted steps of whole models on a node of eight H100, with the preset's rates."""
    section = load_config("preset", "h100_node").cluster
    assert section is not None
    cluster, rows = section.build(), list[list[Value]]()
    for name in ("mixtral_8x7b", "qwen3_30b"):
        shape = load_config("preset", name).model
        assert shape is not None
        for imbalance in (1.5, 2.0):
            counts = skewed_counts(shape.build(), cluster.num_ranks, imbalance, 4, 0)
            found = [simulate(system, shape.build(), cluster, counts).step_s for system in (plain(), exact())]
            rows.append([name, imbalance, *(1e3 * seconds for seconds in found), found[0] / found[1]])
    columns = {"model": "", "imbalance": ".1f", "plain ms": ".0f", "exact ms": ".0f", "exact over plain": ".2f"}
    return Table(columns, rows, "Predicted for 8 H100")


def main() -> None:
    os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("calibrate", "predict", "measure", "compare", "table", "profile"))
    parser.add_argument("round", type=int, choices=ROUNDS)
    parser.add_argument("--passes", type=int, default=2, help="Interleaved passes over all points.")
    parser.add_argument("--folder", type=Path, default=RAW, help="Folder of raw measurements.")
    parser.add_argument("--runs", type=int, default=0, help="Interleaved runs of the training table.")
    out_option(parser)
    given = parser.parse_args()
    machine, measured = (given.folder / f"{name}_{given.round}.json" for name in ("calibration", "measured"))
    parts = {"predict": predict, "compare": compare, "table": tables}
    if given.part in parts:
        name = {"predict": f"_predicted_{given.round}", "compare": f"_measured_{given.round}", "table": ""}[given.part]
        report(parts[given.part](given.round, given.folder), given.out or RESULTS / f"network_training{name}.json")
        return
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
    load, start_s = os.getloadavg()[0], time.monotonic()
    if given.part == "calibrate":
        found: Any = calibrated(run(partial(calibrate, rates=ROUNDS[given.round].rates), 900))
        machine.write_text(json.dumps(found, indent=1))
    elif given.part == "profile":
        found = run(partial(profile, names=("plain", "exact", "feplb"), routing="recorded"), 1200)
        (given.folder / "profiled.json").write_text(json.dumps(found[0]))
    else:
        body = partial(measure, number=given.round, passes=given.passes, runs=given.runs, raw=str(measured.absolute()))
        found = run(body, 5400)
        measured.write_text(json.dumps(found))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
