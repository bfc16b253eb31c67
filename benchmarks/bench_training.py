"""The preset `small`, trained with several systems from the same parameters on the same batches, step by step in turn.

Run it with `python -m benchmarks.bench_training`. Plain expert parallelism and forced balance, the ideal, are beside
all others: the first of what a system is to beat in tokens per second, the second of what it can reach, and the losses
of plain are those that it shall have. Systems take turns, so that what else a machine does slows all of them alike.
Every so many steps it writes all rows as JSON, and the loss curves laid over each other as PNG.
"""

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import raise_on_fault, use_virtual_cpu_devices
from jax_moe_lb.layer.systems import system_names
from models.config import TrainConfig, preset
from models.data.sources import default_corpus
from models.mesh import make_mesh, make_system, place_batch
from models.training.step import Programs, make_programs

IDEAL = "forced balance"
"""Plain expert parallelism with tokens sent round robin: it learns little, and nothing is to be balanced."""

SLOTS = {"hybridep": 4}
"""Replica slots where the default is too few to do anything here: those for expert domains of two ranks."""

WARM_STEPS = 2
"""So many steps are not timed: the first allocate."""


@dataclass(eq=False)
class Training:
    """One system's training, under way."""

    programs: Programs
    state: nnx.State
    compile_s: float
    program: Any
    rows: list[dict[str, float]] = field(default_factory=list)


def config_of(base: TrainConfig, name: str) -> TrainConfig:
    """The config with a system, or that of the ideal."""
    system = "plain" if name == IDEAL else name
    model = dataclasses.replace(base.model, force_balanced=name == IDEAL)
    parallel = dataclasses.replace(base.parallel, system=system, replica_slots=SLOTS.get(name))
    return dataclasses.replace(base, model=model, parallel=parallel)


def start(base: TrainConfig, name: str) -> Training:
    """Compile the step of a system, and makes its first state: parameters do not depend on the system."""
    config = config_of(base, name)
    mesh = make_mesh(config.parallel)
    programs = make_programs(config, mesh, make_system(config.parallel))
    shape = (config.batch.size, config.batch.sequence_length + 1)
    tokens = place_batch(np.zeros(shape, np.int32), mesh)
    started = time.perf_counter()
    program = programs.step.lower(programs.state_shapes, tokens).compile()
    compile_s = time.perf_counter() - started
    return Training(programs, programs.init(), compile_s, program)


def advance(training: Training, batch: np.ndarray, config: TrainConfig) -> None:
    """Run one step and notes loss, seconds and balance."""
    tokens = jax.block_until_ready(place_batch(batch, make_mesh(config.parallel)))
    started = time.perf_counter()
    training.state, loss, stats = training.program(training.state, tokens)
    loss, stats = jax.device_get((loss, stats))
    seconds = time.perf_counter() - started
    raise_on_fault(stats)
    before, after = (float(np.mean(value)) for value in (stats.imbalance_before, stats.imbalance_after))
    training.rows.append({"loss": float(loss), "step_s": seconds, "before": before, "after": after})


def summarised(trainings: dict[str, Training], config: TrainConfig) -> dict[str, dict[str, float]]:
    """Of each system: tokens per second, also beside plain and the ideal, and its losses beside those of plain."""
    times = {name: np.array([row["step_s"] for row in t.rows[WARM_STEPS:]]) for name, t in trainings.items()}
    losses = {name: np.array([row["loss"] for row in t.rows]) for name, t in trainings.items()}
    found = {}
    for name, training in trainings.items():
        found[name] = {
            "tokens_per_s": config.tokens_per_step / float(np.median(times[name])),
            # Of pairs of steps that ran one after the other, on a machine that was as busy.
            "over_plain": float(np.median(times["plain"] / times[name])),
            "of_ideal": float(np.median(times[IDEAL] / times[name])),
            "last_loss": float(losses[name][-10:].mean()),
            "largest_difference": float(np.abs(losses[name] / losses["plain"] - 1).max()),
            "before": float(np.mean([row["before"] for row in training.rows])),
            "after": float(np.mean([row["after"] for row in training.rows])),
            "compile_s": training.compile_s,
        }
    return found


def draw(trainings: dict[str, Training], path: Path) -> None:
    """Draw the losses over steps; those of all systems but the ideal should lie on each other."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    widest = len(trainings) + 1
    for i, (name, training) in enumerate(trainings.items()):
        # The first are drawn widest, so that those on top do not hide them.
        losses = [row["loss"] for row in training.rows]
        axes.plot(np.arange(1, len(losses) + 1), losses, lw=0.8 * (widest - i), alpha=0.7, label=name)
    axes.set(xlabel="step", ylabel="training loss in nats per byte")
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=150)


def written(trainings: dict[str, Training], config: TrainConfig, path: Path) -> None:
    """Write all rows and what they come to."""
    result = {
        "config": dataclasses.asdict(config),
        "summary": summarised(trainings, config),
        "rows": {name: training.rows for name, training in trainings.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


COLUMNS = {
    "tokens/s": ("tokens_per_s", ",.0f"),
    "over plain": ("over_plain", ".2f"),
    "of forced balance": ("of_ideal", ".2f"),
    "last loss": ("last_loss", ".4f"),
    "largest difference": ("largest_difference", ".1e"),
    "imbalance before": ("before", ".2f"),
    "after": ("after", ".2f"),
}
"""Titles of what was summed up, and how it is written."""


def table_of(summary: dict[str, dict[str, float]], steps: int) -> Table:
    """One row for each system."""
    rows: list[list[Value]] = [[name, *(found[key] for key, _ in COLUMNS.values())] for name, found in summary.items()]
    columns = {"system": ""} | {title: form for title, (_, form) in COLUMNS.items()}
    return Table(columns, rows, f"{steps} steps of each system, in turn")


def main() -> None:
    """Train all systems, and reports the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--systems", nargs="+", default=list(system_names()), choices=system_names())
    parser.add_argument("--rows", type=Path, default=Path("training.json"), help="every step; the PNG goes beside it")
    out_option(parser)
    given = parser.parse_args()
    config = dataclasses.replace(preset(given.preset), steps=given.steps)
    use_virtual_cpu_devices(config.parallel.num_shards)
    corpus = default_corpus(config.data.max_corpus_bytes)
    names = ["plain", IDEAL, *(name for name in given.systems if name != "plain")]
    trainings = {}
    for name in names:
        trainings[name] = start(config, name)
        print(f"{name}: compiled in {trainings[name].compile_s:.0f} s", flush=True)
    for step in range(1, config.steps + 1):
        batch, began = (
            corpus.batch(config.seed, step, config.batch.size, config.batch.sequence_length),
            time.perf_counter(),
        )
        for training in trainings.values():
            advance(training, batch, config)
        if step == WARM_STEPS + 1:
            left_s = (config.steps - step) * (time.perf_counter() - began)
            print(f"about {left_s / 60:.0f} minutes to go", flush=True)
        if step > WARM_STEPS and (step % 10 == 0 or step == config.steps):
            written(trainings, config, given.rows)
            draw(trainings, given.rows.with_suffix(".png"))
    report({"systems": table_of(summarised(trainings, config), given.steps)}, given.out)


if __name__ == "__main__":
    main()
