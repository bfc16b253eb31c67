"""The preset `small`, trained with several systems from the same parameters on the same batches, interleaved by step.

Run it with `python -m benchmarks.bench_training`. Plain expert parallelism is the lower bound of throughput and the
reference for losses; forced balance is the upper bound of throughput. Systems alternate by step, so that other load on
the machine slows all of them alike. At intervals it writes all rows as JSON, and the loss curves in one PNG.
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
"""Plain expert parallelism with round-robin routing: it learns little and needs no balancing."""

SLOTS = {"hybridep": 4}
"""Replica slots of systems whose default has no effect here; these cover expert domains of two ranks."""

WARM_STEPS = 2
"""Number of first steps to exclude from times, as they allocate memory."""


@dataclass(eq=False)
class Training:
    """Training run of one system."""

    programs: Programs
    state: nnx.State
    compile_s: float
    program: Any
    rows: list[dict[str, float]] = field(default_factory=list)


def config_of(base: TrainConfig, name: str) -> TrainConfig:
    """Return the config with a system, or with the ideal."""
    system = "plain" if name == IDEAL else name
    model = dataclasses.replace(base.model, force_balanced=name == IDEAL)
    parallel = dataclasses.replace(base.parallel, system=system, replica_slots=SLOTS.get(name))
    return dataclasses.replace(base, model=model, parallel=parallel)


def start(base: TrainConfig, name: str) -> Training:
    """Compile the step of a system and create its first state; parameters do not depend on the system."""
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
    """Run one step and record loss, seconds and balance."""
    tokens = jax.block_until_ready(place_batch(batch, make_mesh(config.parallel)))
    started = time.perf_counter()
    training.state, loss, _, stats = training.program(training.state, tokens)
    loss, stats = jax.device_get((loss, stats))
    seconds = time.perf_counter() - started
    raise_on_fault(stats)
    before, after = (float(np.mean(value)) for value in (stats.imbalance_before, stats.imbalance_after))
    training.rows.append({"loss": float(loss), "step_s": seconds, "before": before, "after": after})


def summarised(trainings: dict[str, Training], config: TrainConfig) -> dict[str, dict[str, float]]:
    """Return for each system: tokens per second, also relative to plain and ideal, and losses relative to plain."""
    times = {name: np.array([row["step_s"] for row in t.rows[WARM_STEPS:]]) for name, t in trainings.items()}
    losses = {name: np.array([row["loss"] for row in t.rows]) for name, t in trainings.items()}
    found = {}
    for name, training in trainings.items():
        found[name] = {
            "tokens_per_s": config.tokens_per_step / float(np.median(times[name])),
            # Use ratios of consecutive steps, which ran under similar load.
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
    """Plot the losses over steps; all systems except the ideal should coincide."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    widest = len(trainings) + 1
    for i, (name, training) in enumerate(trainings.items()):
        # Draw the first curves widest, so that later ones do not hide them.
        losses = [row["loss"] for row in training.rows]
        axes.plot(np.arange(1, len(losses) + 1), losses, lw=0.8 * (widest - i), alpha=0.7, label=name)
    axes.set(xlabel="step", ylabel="training loss in nats per byte")
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=150)


def written(trainings: dict[str, Training], config: TrainConfig, path: Path) -> None:
    """Write all rows and their summary."""
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
"""Keys and formats of the summary, by column title."""


def table_of(summary: dict[str, dict[str, float]], steps: int) -> Table:
    """Return one row for each system."""
    rows: list[list[Value]] = [[name, *(found[key] for key, _ in COLUMNS.values())] for name, found in summary.items()]
    columns = {"system": ""} | {title: form for title, (_, form) in COLUMNS.items()}
    return Table(columns, rows, f"{steps} steps of each system, in turn")


def main() -> None:
    """Train all systems and report the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--systems", nargs="+", default=list(system_names()), choices=system_names())
    parser.add_argument(
        "--rows",
        type=Path,
        default=Path("training.json"),
        help="JSON file of all steps; the PNG is written next to it.",
    )
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
