"""Training on four ranks with CPU quotas and shaped links: predicted by the simulator, then measured.

    python -m benchmarks.network training calibrate 2    # rates of the testbed, from other sizes
    python -m benchmarks.network training predict 2      # predictions; commit them
    python -m benchmarks.network training measure 2      # the same points
    python -m benchmarks.network training compare 2      # predictions beside measurements

Run it as root, or with user namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.network import sandbox
from benchmarks.network.testbed import (
    CONFIG,
    CORES,
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
from benchmarks.render.results import Table, Value, merge, read, save, spread
from jax_moe_lb import System
from jax_moe_lb.balancers import Exact
from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, ragged_all_to_all
from jax_moe_lb.sim import Cluster, Links, Migration, Report, mean_report, replay
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.sim.measure import HIDDEN, median_s

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


ROWS = (2, 2048)
"""Rows for each peer: few and many."""

MORE = 3
"""Exchanges in one program after the first one."""

REPEATS = 5


def level_rates(mesh: Mesh) -> dict[str, float]:
    """Return the bytes per second of the link between domains, and of a rank inside its domain.

    All ranks of a domain send at once. The few rows give the latency, which is subtracted.
    """
    peers = {"node": mesh.devices.shape[1], "gpu": mesh.devices.shape[1] - 1}
    # The link carries the rows of all ranks of a domain.
    senders = {"node": mesh.devices.shape[1], "gpu": 1}
    found = {}
    for level in peers:
        few_s, many_s = (_exchange_s(mesh, level == "node", rows) for rows in ROWS)
        sent = senders[level] * peers[level] * (ROWS[1] - ROWS[0]) * HIDDEN * 4
        found[level] = sent / max(many_s - few_s, 1e-9)
    return found


def _exchange_s(mesh: Mesh, across: bool, rows: int) -> float:
    """Time one exchange of `rows` rows for every rank of the other domain, or of the own one."""
    return (_seconds(mesh, across, rows, 1 + MORE) - _seconds(mesh, across, rows, 1)) / MORE


def _seconds(mesh: Mesh, across: bool, rows: int, times: int) -> float:
    axes, size = mesh.axis_names, mesh.devices.shape[1]

    def one_rank(x: jax.Array) -> jax.Array:
        me, peer = jax.lax.axis_index(axes), jnp.arange(mesh.size, dtype=jnp.int32)
        is_far = peer // size != me // size
        sizes = jnp.where(is_far if across else ~is_far & (peer != me), rows, 0).astype(jnp.int32)
        starts, lands = peer * rows, jnp.full(mesh.size, rows, jnp.int32) * me
        starts = starts + jnp.zeros_like(lands)

        def exchange(_: jax.Array | int, x: jax.Array) -> jax.Array:
            return ragged_all_to_all(x, jnp.zeros_like(x), Slices(starts, sizes, lands, sizes), Group(axes))

        return jax.lax.fori_loop(0, times, exchange, x)

    spec = PartitionSpec(axes)
    run = jax.jit(jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec))
    whole = np.ones((mesh.size * mesh.size * rows, HIDDEN), np.float32)
    x = jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])
    return median_s(lambda: run(x), REPEATS)


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


def predicted_step(case: Case, routing: str, steps: int, calibration: dict[str, Any]) -> Report:
    assert case.system is not None
    counts = counts_of(routing)[:steps]
    if case.system.relocates:
        counts = np.take_along_axis(counts, relocation(routing, steps)[None, :, None], 3)
    return replayed_step(case, counts, calibration)


def replayed_step(case: Case, counts: np.ndarray, calibration: dict[str, Any]) -> Report:
    """Return the predicted mean step of counts `[steps, layers, R, E]`."""
    tokens, (level, *inner) = int(counts[0, 0, 0].sum()) // MODEL.per_token, cluster_of(calibration).levels[::-1]
    num_ranks = counts.shape[2]
    if not inner:
        level = replace(level, size=num_ranks)
    cluster = replace(cluster_of(calibration), levels=(*inner[::-1], level))
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


PREDICTED = {
    "Mbit/s": ".0f",
    "routing": "",
    "system": "",
    "imbalance before": ".2f",
    "after": ".2f",
    "predicted ms": ".0f",
    "exchanges %": ".0f",
}


def predictions(number: int, calibration: dict[str, Any]) -> Table:
    rows: list[list[Value]] = []
    for part in ROUNDS[number].parts:
        for rate, routing, name in itertools.product(part.rates, part.routings, part.cases):
            step = predicted_step(part.cases[name], routing, ROUNDS[number].steps, calibration[str(rate)])
            times = [step.imbalance_before, step.imbalance_after, 1e3 * step.step_s, exchange_share(step)]
            rows.append([rate / 1e6, routing, name, *times])
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


def measured_points(number: int, folder: Path) -> list[dict[str, Any]]:
    """Return the measurements of a round on all networks, with the seconds of the slowest rank."""
    files = [folder / f"measured_{number}_{at}.json" for at in range(len(ROUNDS[number].parts))]
    found = [[one["points"] for one in json.loads(file.read_text())] for file in files]
    return [point for of_ranks in found for point in slowest(of_ranks)]


REPORTS = {"predict": predict, "compare": compare}
NAMES = {"predict": "predicted", "compare": "measured"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("calibrate", "measure", *REPORTS))
    parser.add_argument("round", type=int, choices=ROUNDS)
    parser.add_argument("--passes", type=int, default=2, help="Interleaved passes over all points.")
    parser.add_argument("--folder", type=Path, default=RAW, help="Folder of raw measurements.")
    parser.add_argument("--networks", type=int, nargs="+", help="Networks of the round to measure; all by default.")
    parser.add_argument("--after", type=Path, help="File to wait for between compilation and measurement.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    """Return the tables of a report, after saving them beside the other rounds unless `--out` is given."""
    os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    if given.part in REPORTS:
        tables = REPORTS[given.part](given.round, given.folder)
        if given.out is None:
            out = RESULTS / f"network_training_{NAMES[given.part]}_{given.round}.json"
            save(tables, out)
            merge(out, ALL_ROUNDS)
        return tables
    sandbox.enter()
    given.folder.mkdir(parents=True, exist_ok=True)
    measured(given)
    return {}


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
