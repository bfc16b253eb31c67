"""Training of systems with and without router losses, from several seeds, and of workloads that no loss balances.

    python -m benchmarks.training curves train    # all runs, weights of the auxiliary loss first
    python -m benchmarks.training curves table    # tables of the runs that exist

Runs of a seed start from the same parameters and take the same batches, a sixteenth of those of
`network training_speed`, on virtual CPU devices. The files of `--curves` have every step and its counts; an existing
file is not trained again.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network.testbed import NUM_RANKS, Case, Program
from benchmarks.network.training_runs import (
    BASE,
    FREE,
    QUARTER,
    ROLLOUT,
    RUNS,
    SEEDS,
    STEPS,
    SWEEP,
    TEXT,
    TIMED,
    TWICE,
    USUAL,
    WINDOW,
    WORKLOADS,
    Curve,
    Key,
    Workload,
    dropped_percent,
    imbalance,
    last_mean,
    load_curve,
    save_curve,
    seeds_of,
)
from benchmarks.render.results import Table, Value, spread
from jax_moe_lb import plain, use_virtual_cpu_devices
from models.mesh import make_mesh, place_batch
from models.pretrained.generation import Generator, Sampling
from models.training.loop import mean_loss

LOSSES = {"run": "", "seeds": "d", "validation loss": ".4f", "loss of the last steps": ".4f", "imbalance": ".2f"}
LOSSES |= {"95 % of steps and layers below": ".2f", "after": ".2f", "copies dropped %": ".2f", "most rounds": "d"}


def losses(curves: Mapping[str, Sequence[Curve]]) -> Table:
    """Return loss and balance of each run: medians of seeds with their range, and means of seeds."""
    rows: list[list[Value]] = []
    for name, seeds in curves.items():
        levels = np.concatenate([imbalance(of.counts).ravel() for of in seeds])
        after = float(np.mean([of.after.mean() for of in seeds]))
        dropped = float(np.mean([dropped_percent(of) for of in seeds]))
        validation = spread(np.array([of.validation for of in seeds]))
        last = float(np.mean([last_mean(of.loss) for of in seeds]))
        balance = float(levels.mean()), float(np.quantile(levels, 0.95)), after
        rows.append([name, len(seeds), validation, last, *balance, dropped, max(int(of.rounds.max()) for of in seeds)])
    note = f"{STEPS} steps of each run. Losses of the last steps are means of {WINDOW} steps."
    return Table(LOSSES, rows, notes=[note])


def balances(curves: Mapping[tuple[str, str], Curve]) -> Table:
    """Return the imbalance over the steps and layers of the second half of each run."""
    columns = {"workload": "", "run": "", "imbalance": ".2f", "95 % of steps and layers below": ".2f", "most": ".2f"}
    rows: list[list[Value]] = []
    for (workload, name), of in curves.items():
        levels = imbalance(of.counts[len(of.counts) // 2 :])
        rows.append([workload, name, float(levels.mean()), float(np.quantile(levels, 0.95)), float(levels.max())])
    return Table(columns, rows)


def sweep_table(folder: Path) -> Table:
    """Return the losses of all weights of the auxiliary loss."""
    rows: list[list[Value]] = []
    for weight in SWEEP:
        of = load_curve(Key(f"plain + aux {weight:g}", SWEPT).path(folder))
        rows.append([weight, float(of.validation), float(imbalance(of.counts[-WINDOW:]).mean())])
    columns = {"weight": "g", "validation loss": ".4f", "imbalance of the last steps": ".2f"}
    return Table(columns, rows, notes=[f"{SWEEP_STEPS} steps of `plain` with one seed."])


SWEPT = "sweep"

VALIDATION = 16
"""Validation batches."""

SWEEP_STEPS = 400


def program_of(case: Case, workload: Workload) -> Program:
    """Compile the program of a run with its own routing."""
    config = workload.config
    none = np.zeros((1, workload.num_ranks, config.model.num_experts), np.int32)
    return Program(case, config, make_mesh(config.parallel), none)


def train(program: Program, workload: Workload, seed: int) -> Curve:
    """Train a run from its first step and return its curve."""
    config, rows = program.config, list[tuple[Any, ...]]()
    shape = config.model.num_layers, workload.num_ranks, config.model.num_experts
    sizes = config.batch.size, config.batch.sequence_length
    states = program.states = {"own": program.initial(seed)}
    for step in range(workload.steps):
        if workload.ends_loss and step == workload.change:
            program = program_of(RUNS["plain"], workload)
            program.states = states
        batch = workload.corpus(step).batch(seed, 1 + step, *sizes)
        loss, stats = program.step(place_batch(batch, program.mesh))
        means = np.sum(stats.dropped), np.mean(stats.imbalance_before), np.mean(stats.imbalance_after)
        rows.append((float(loss), *means, np.max(stats.rounds), np.asarray(stats.counts).reshape(shape)))
    held_out = workload.corpus(workload.steps - 1).validation_batches(VALIDATION, *sizes)
    validation = mean_loss(program.evaluate, held_out, program.mesh)(states["own"])
    return Curve(*map(np.stack, zip(*rows, strict=True)), validation=np.float64(validation))


PROMPT, SAMPLES, ROLLOUT_STEPS = 32, 4, 20
"""Tokens of a prompt, samples of each prompt, and steps of a rollout."""


def rollout(program: Program, workload: Workload) -> Curve:
    """Return the counts of steps that train on samples of the model with the routing of their generation."""
    config = program.config
    size, length = config.batch.size, config.batch.sequence_length
    (held_out,) = workload.corpus(0).validation_batches(1, size * ROLLOUT_STEPS // SAMPLES, length)
    prompts = np.repeat(held_out[:, :PROMPT], SAMPLES, 0).tolist()
    generate = Generator(program.model(program.states["own"]))
    # The last token of a sample is not read.
    _, experts = generate(prompts, length + 1 - PROMPT, Sampling(temperature=1.0), return_routing=True)
    of_ranks = np.stack(experts).reshape(ROLLOUT_STEPS, workload.num_ranks, -1, *experts[0].shape)
    counts = (of_ranks[..., None] == np.arange(config.model.num_experts)).sum((2, 4, 5), np.int32).swapaxes(1, 2)
    before, none = imbalance(counts).mean(1), np.zeros(ROLLOUT_STEPS)
    return Curve(none, none, before, before, none, counts, np.float64(np.nan))


def all_keys() -> list[Key]:
    """Return all runs, the most needed first."""
    timed, rest = [Key(run) for run in TIMED if run in RUNS], [Key(run) for run in RUNS if run not in TIMED]
    others = [Key(run, workload) for workload in (TEXT, QUARTER, TWICE) for run in ("plain", BASE)] + [Key(BASE, FREE)]
    # Systems without dropped copies have one curve up to rounding, so `ultraep` has one seed.
    more = [Key(run, seed=seed) for seed in range(1, SEEDS) for run in RUNS if not run.startswith("ultraep")]
    return [*timed, *others, *sorted(rest, key=lambda key: key.run.startswith("ultraep")), *more]


def train_missing(keys: list[Key], folder: Path) -> None:
    """Train the runs without a file; consecutive runs of one program compile it once."""
    missing = [key for key in keys if not key.path(folder).exists()]
    for (run, name), same in groupby(missing, key=lambda key: key[:2]):
        program = program_of(RUNS[run], WORKLOADS[name])
        for key in same:
            curve = train(program, WORKLOADS[name], key.seed)
            save_curve(curve, key.path(folder))
            if key in (Key("plain"), Key(BASE)):
                save_curve(rollout(program, WORKLOADS[name]), Key(key.run, ROLLOUT).path(folder))
            print(*key, round(float(curve.validation), 4), round(float(curve.before.mean()), 3), flush=True)


def sweep(folder: Path) -> None:
    """Train the runs of all weights of the auxiliary loss."""
    workload = dataclasses.replace(WORKLOADS[USUAL], steps=SWEEP_STEPS)
    for weight in SWEEP:
        path = Key(f"plain + aux {weight:g}", SWEPT).path(folder)
        if not path.exists():
            save_curve(train(program_of(Case(plain(), aux_loss=weight), workload), workload, 0), path)
            print(weight, float(load_curve(path).validation), flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=("train", "table"))
    parser.add_argument("--curves", type=Path, default=Path("runs/training_curves"), help="Folder of all curves.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    folder = given.curves
    folder.mkdir(parents=True, exist_ok=True)
    use_virtual_cpu_devices(2 * NUM_RANKS)
    if given.part == "table":
        usual = {run: seeds for run in RUNS if (seeds := seeds_of(folder, run))}
        cases = [Key(run, name) for name in (USUAL, TEXT, FREE, QUARTER, TWICE, ROLLOUT) for run in ("plain", BASE)]
        curves = {(key.workload, key.run): load_curve(path) for key in cases if (path := key.path(folder)).exists()}
        return {"losses": losses(usual), "balance": balances(curves), "sweep": sweep_table(folder)}
    sweep(folder)
    train_missing(all_keys(), folder)
    return {}
