"""Loss curves of dropless layers, of capacities that drop copies, and of two ways to balance the router.

    python -m benchmarks.bench_training_curves --steps 1000 --minutes 40

All runs start from the same parameters and take the same batches, a sixteenth of those of
`network.bench_training`, on four virtual CPU devices. They alternate by step, so a run that ends early has as many
steps of each.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.network.testbed import CASES, CONFIG, NUM_RANKS, Program
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import use_virtual_cpu_devices
from models.config import BatchConfig
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch

BATCH = BatchConfig(size=8, sequence_length=128)
CURVES = ("plain", "exact", "capacity 1.0", "capacity 1.25", "capacity 2.0", "router bias", "aux loss")
LAST = 50
"""Steps of a mean loss."""


def table_of(losses: dict[str, np.ndarray], dropped: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> Table:
    """Return one row per run."""
    steps = min(map(len, losses.values()))
    rows: list[list[Value]] = []
    for name, loss in losses.items():
        apart = float(np.abs(loss[:steps] / losses["plain"][:steps] - 1).max())
        copies = BATCH.size * BATCH.sequence_length * CONFIG.model.experts_per_token * CONFIG.model.num_layers
        share = 100 * float(dropped[name][:steps].mean()) / copies
        level = float(before[name][:steps].mean())
        rows.append([name, float(loss[steps - LAST : steps].mean()), apart, share, level])
    columns = {"run": "", f"loss of the last {LAST} steps": ".4f", "largest difference from plain": ".1e"}
    return Table(
        columns | {"copies dropped %": ".2f", "imbalance before": ".2f"}, rows, notes=[f"{steps} steps of each run."]
    )


def main() -> None:
    """Train all runs, and write curves and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="Steps of each run.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Time limit of all runs.")
    parser.add_argument("--curves", type=Path, help="JSON file of all losses.")
    out_option(parser)
    given = parser.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    use_virtual_cpu_devices(NUM_RANKS)
    config = dataclasses.replace(CONFIG, batch=BATCH, steps=given.steps)
    mesh, corpus = make_mesh(config.parallel), default_corpus(config.data.max_corpus_bytes)
    none = np.zeros((1, NUM_RANKS, config.model.num_experts), np.int32)
    programs = {name: Program(CASES[name], config, mesh, none) for name in CURVES}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CURVES}
    for number in range(1, config.steps + 1):
        tokens = place_batch(corpus.batch(config.seed, number, BATCH.size, BATCH.sequence_length), mesh)
        for name, program in programs.items():
            loss, stats = program.step(tokens)
            found[name].append((float(loss), float(np.sum(stats.dropped)), float(np.mean(stats.imbalance_before))))
        if number % 10 == 0 and given.curves:
            given.curves.write_text(json.dumps(found))
            print(number, {name: round(rows[-1][0], 4) for name, rows in found.items()}, flush=True)
        if time.monotonic() > end_s:
            break
    losses, dropped, before = ({name: np.array(rows)[:, at] for name, rows in found.items()} for at in range(3))
    report({"curves": table_of(losses, dropped, before)}, given.out)


if __name__ == "__main__":
    main()
