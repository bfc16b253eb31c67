"""Training of dropless systems, of capacities that drop copies, and of two ways to balance the router.

All runs start from the same parameters and take the same batches, a sixteenth of those of
`network training_speed`, on four virtual CPU devices: once with the model's own routing, and once with the
counts of a recording. The files of `--curves` have every step and its counts; an existing file is not trained again.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.testbed import CONFIG, NUM_RANKS, Program, domain_mesh
from benchmarks.network.training_runs import (
    BATCH_TOKENS,
    DOMAINS,
    OWN,
    REPLAYED,
    RUNS,
    STEPS,
    WINDOW,
    Curve,
    Curves,
    last_mean,
    load_curves,
    recorded_counts,
    runs,
    save_curves,
)
from benchmarks.render.results import Table, Value
from jax_moe_lb import use_virtual_cpu_devices
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch
from models.train import RELOCATE_INTERVAL

LENGTH = 128
BATCH = BatchConfig(size=BATCH_TOKENS * NUM_RANKS // LENGTH, sequence_length=LENGTH)

EQUAL = 1e-6
"""Relative difference of equal losses."""

COLUMNS = {
    "run": "",
    "loss after all steps": ".4f",
    "first steps equal to plain": "d",
    "largest difference from plain": ".1e",
    "most rounds": "d",
}


def table(curves: Curves) -> Table:
    """Return the loss of each run beside that of `plain` at equal steps, and its most rounds."""
    plain, rows = curves["plain"].loss, list[list[Value]]()
    for name, of in curves.items():
        differences = np.abs(of.loss / plain - 1)
        apart = int(np.argmax(np.append(differences > EQUAL, True)))
        rows.append([name, last_mean(of.loss), apart, float(differences.max()), int(of.rounds.max())])
    # Differences of adjacent steps do not contain the trend.
    error = float(np.diff(plain)[-WINDOW:].std() / np.sqrt(2 * WINDOW))
    note = (
        f"{len(plain)} steps of each run. Losses are means of the last {WINDOW} steps; equal is within {EQUAL}. The "
        f"last mean of plain has a standard error of {error:.3f} from its batches, the same in all runs at equal steps."
    )
    return Table(COLUMNS, rows, notes=[note])


def programs_of(cases: Sequence[tuple[str, str]]) -> dict[str, Program]:
    """Compile the programs of runs, each with the counts of the whole recording."""
    config = dataclasses.replace(CONFIG, batch=BATCH)
    meshes = {network: domain_mesh() if network == DOMAINS else make_mesh(config.parallel) for network in RUNS}
    records = recorded_counts(BATCH_TOKENS).reshape(-1, NUM_RANKS, config.model.num_experts)
    return {name: Program(RUNS[network][name], config, meshes[network], records) for name, network in cases}


def train(programs: dict[str, Program], routing: str, steps: int) -> Curves:
    """Train runs from their first step and return their curves."""
    corpus = default_corpus(CONFIG.data.max_corpus_bytes)
    layers, recorded_steps = CONFIG.model.num_layers, len(recorded_counts(BATCH_TOKENS))
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in programs}
    for number in range(steps):
        batch = corpus.batch(CONFIG.seed, 1 + number, BATCH.size, BATCH.sequence_length)
        first = number % recorded_steps * layers
        records = None if routing == OWN else [float(first + layer) for layer in range(layers)]
        for name, program in programs.items():
            loss, stats = program.step(place_batch(batch, program.mesh), records)
            means = np.sum(stats.dropped), np.mean(stats.imbalance_before), np.mean(stats.imbalance_after)
            counts = np.asarray(stats.counts).reshape(layers, NUM_RANKS, -1)
            found[name].append((float(loss), *means, np.max(stats.rounds), counts))
            if (1 + number) % RELOCATE_INTERVAL == 0:
                program.relocate_by_loads(routing)
        if number % 10 == 9:
            last = {name: round(rows[-1][0], 4) for name, rows in found.items()}
            print(routing, 1 + number, last, flush=True)
    return {name: Curve(*map(np.stack, zip(*rows, strict=True))) for name, rows in found.items()}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help="Steps of each run.")
    parser.add_argument("--curves", type=Path, default=Path("runs/training_curves"), help="Folder of all curves.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    given.curves.mkdir(parents=True, exist_ok=True)
    use_virtual_cpu_devices(NUM_RANKS)
    tables, programs = {}, dict[str, Program]()
    for routing in (OWN, REPLAYED):
        path = given.curves / f"{routing}.npz"
        # `plain` trains equally on both networks.
        cases = [(name, network) for network in RUNS for name in runs(routing, network) if name != f"plain{DOMAINS}"]
        if not (curves := load_curves(path)):
            missing = [case for case in cases if case[0] not in programs]
            programs |= programs_of(missing)
            curves = dict(train({name: programs[name] for name, _ in cases}, routing, given.steps))
            save_curves(curves, path)
            for name, _ in cases:
                programs[name].states.clear()
        tables[routing] = table(curves)
    return tables
