"""Loss curves of dropless systems, of capacities that drop copies, and of two ways to balance the router.

    python -m benchmarks.bench_training_curves --minutes 200 --curves runs/training_curves.json

All runs start from the same parameters and take the same batches, a sixteenth of those of
`network.bench_training`, on four virtual CPU devices. They alternate by step, so a run that ends early has as many
steps of each. Runs that have all steps in the file of `--curves` are not repeated. Equal time takes the speeds over
`plain` of `network.bench_training`.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.network.testbed import CASES, CONFIG, DOMAIN_CASES, NUM_RANKS, Program, domain_mesh
from benchmarks.render import RESULTS
from benchmarks.results import Table, Value, load, out_option, report
from jax_moe_lb import use_virtual_cpu_devices
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch
from models.train import RELOCATE_INTERVAL

BATCH = BatchConfig(size=8, sequence_length=128)
DOMAIN_RUNS = {f"{name}, two domains": DOMAIN_CASES[name] for name in ("two_tier", "hybridep")}
"""Runs on two domains of two ranks."""
RUNS = CASES | DOMAIN_RUNS

WINDOW, EQUAL = 100, 1e-6
"""Steps of a mean loss, and the relative difference of equal losses."""

Curves = Mapping[str, Sequence[Sequence[float]]]
"""Loss, dropped copies, imbalance before and after, and rounds, of every step of each run."""


def losses(curves: Curves, speeds: Mapping[str, float]) -> Table:
    """Return the loss of each run at equal steps and at equal time.

    Args:
        curves: all curves.
        speeds: tokens per second over plain, with the router's own routing, of the measured runs.
    """
    steps = min(map(len, curves.values()))
    loss = {name: np.array(rows)[:steps, 0] for name, rows in curves.items()}
    equal = int(steps / max(speeds[name] for name in curves if name in speeds))
    rows: list[list[Value]] = []
    for name, of in loss.items():
        differences = np.abs(of / loss["plain"] - 1)
        apart = int(np.argmax(np.append(differences > EQUAL, True)))
        then: list[Value] = [None, None]
        if name in speeds:
            at = min(steps, round(equal * speeds[name]))
            then = [at, last_mean(of[:at])]
        rows.append([name, last_mean(of), apart, float(differences.max()), *then])
    columns = {"run": "", "loss after all steps": ".4f", "first steps equal to plain": "d"}
    columns |= {"largest difference from plain": ".1e"}
    columns |= {f"steps in the time of {equal} of plain": "d", "loss then": ".4f"}
    # Differences of adjacent steps do not contain the trend.
    error = float(np.diff(loss["plain"])[-WINDOW:].std() / np.sqrt(2 * WINDOW))
    notes = [
        f"{steps} steps of each run. Losses are means of the last {WINDOW} steps; equal is within {EQUAL}. The last "
        f"mean of plain has a standard error of {error:.3f} from its batches, the same in all runs at equal steps."
    ]
    return Table(columns, rows, notes=notes)


def last_mean(loss: np.ndarray) -> float:
    """Return the mean of the last losses."""
    return float(loss[-WINDOW:].mean())


BALANCE = {"run": "", "copies dropped %": ".2f", "imbalance before": ".2f", "after": ".2f", "most rounds": ".0f"}


def balance(curves: Curves) -> Table:
    """Return the balance of each run, over all steps."""
    copies = BATCH.size * BATCH.sequence_length * CONFIG.model.experts_per_token * CONFIG.model.num_layers
    rows: list[list[Value]] = []
    for name, of in curves.items():
        _, dropped, before, after, rounds = np.array(of)[: min(map(len, curves.values()))].T
        levels = 100 * dropped.mean() / copies, before.mean(), after.mean(), rounds.max()
        rows.append([name, *map(float, levels)])
    return Table(BALANCE, rows)


def train(names: Sequence[str], steps: int, minutes: float, curves: Curves, out: Path | None) -> Curves:
    """Train runs from their first step, and return their curves with the given ones.

    Args:
        names: runs to train.
        steps: steps of each.
        minutes: time limit of all.
        curves: curves of other runs.
        out: file of all curves, written every ten steps.
    """
    end_s = time.monotonic() + 60 * minutes
    config = dataclasses.replace(CONFIG, batch=BATCH)
    flat, corpus = make_mesh(config.parallel), default_corpus(config.data.max_corpus_bytes)
    none = np.zeros((1, NUM_RANKS, config.model.num_experts), np.int32)
    meshes = {name: domain_mesh() if name in DOMAIN_RUNS else flat for name in names}
    programs = {name: Program(RUNS[name], config, mesh, none) for name, mesh in meshes.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(1, steps + 1):
        batch = corpus.batch(config.seed, number, BATCH.size, BATCH.sequence_length)
        for name, program in programs.items():
            loss, stats = program.step(place_batch(batch, program.mesh))
            means = np.sum(stats.dropped), np.mean(stats.imbalance_before), np.mean(stats.imbalance_after)
            found[name].append([float(value) for value in (loss, *means, np.max(stats.rounds))])
            if number % RELOCATE_INTERVAL == 0:
                program.relocate_by_loads()
        if number % 10 == 0 and out:
            out.write_text(json.dumps({**curves, **found}))
            print(number, {name: round(rows[-1][0], 4) for name, rows in found.items()}, flush=True)
        if time.monotonic() > end_s:
            break
    return {**curves, **found}


def main() -> None:
    """Train all runs, and write curves and tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="Steps of each run.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Time limit of all runs.")
    parser.add_argument("--curves", type=Path, help="JSON file of all losses.")
    out_option(parser)
    given = parser.parse_args()
    if given.curves:
        given.curves.parent.mkdir(parents=True, exist_ok=True)
    use_virtual_cpu_devices(NUM_RANKS)
    known = json.loads(given.curves.read_text()) if given.curves and given.curves.exists() else {}
    whole: Curves = {name: rows for name, rows in known.items() if len(rows) >= given.steps}
    if names := [name for name in RUNS if name not in whole]:
        whole = train(names, given.steps, given.minutes, whole, given.curves)
    curves = {name: whole[name] for name in RUNS}
    own = load(RESULTS / "network_training.json")["own"]
    speeds = {str(row[0]): float(row[1][0]) for row in own.rows}  # type: ignore[index]
    report({"losses": losses(curves, speeds), "balance": balance(curves)}, given.out)


if __name__ == "__main__":
    main()
