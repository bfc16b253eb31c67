"""Whole runs of a language model on four ranks, with CPU quotas and shaped links, in alternate blocks of ten steps.

Runs have their own routing and the loader, and a quarter of the batch of `training`. Run it as root, or with user
namespaces and writable control groups (see `testbed.py`).
"""

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import sandbox
from benchmarks.network import training_runs as runs
from benchmarks.network.jax_ranks import barrier
from benchmarks.network.testbed import CONFIG, CORES, KEEP_MEMORY, NUM_RANKS, Testbed, run
from benchmarks.network.training_speed import RATE
from benchmarks.render.results import Table, Value
from models.data.corpus import Batches, place_rows, rows_here
from models.mesh import batch_sharding

BLOCK = 10
"""Steps of a run before the next one continues."""

RUNS = runs.BASE, runs.ROOMY, runs.EXACT

COLUMNS = {"run": "", "steps": "d", "tokens/s over plain with the loss": ".2f", "tokens/s": ",.0f"}
COLUMNS |= {"seconds": ",.0f", "loss": ".4f", "imbalance before": ".2f", "after": ".2f"}

RAW = Path("runs/whole_runs.json")
"""File of raw measurements."""

Blocks = dict[str, Any]
"""Seconds of the blocks of a run, and loss and imbalance of its steps."""


def table(blocks: Mapping[str, Blocks]) -> Table:
    """Return the speed of whole runs, with the middle half of the ratios of consecutive blocks."""
    rows: list[list[Value]] = []
    times = {name: np.array(of["seconds"]) for name, of in blocks.items()}
    for name, of in blocks.items():
        steps, total_s = len(of["loss"]), float(times[name].sum())
        low, high = np.quantile(times[runs.BASE] / times[name], [0.25, 0.75])
        gain = [float(times[runs.BASE].sum()) / total_s, float(low), float(high)]
        mean = [float(np.mean(of[part])) for part in ("before", "after")]
        speed = runs.SMALL.tokens_per_step * steps / total_s
        rows.append([name, steps, gain, speed, total_s, runs.last_mean(np.array(of["loss"])), *mean])
    return Table(COLUMNS, rows)


def measure(bed: Testbed) -> dict[str, Blocks]:
    """Train all runs, and return the blocks of each on this rank; rank 0 also writes them after each block."""
    no_records = np.zeros((1, NUM_RANKS, CONFIG.model.num_experts), np.int32)
    programs = bed.compiled({name: runs.CASES[name] for name in RUNS}, no_records, runs.SMALL)
    corpus, sharding, size = runs.usual_text(), batch_sharding(bed.mesh), runs.SMALL.batch.size
    loading = {"seed": CONFIG.seed, "batch_size": size, "sequence_length": runs.SMALL.batch.sequence_length}
    batches = {name: Batches(corpus, **loading, rows=rows_here(sharding, size)) for name in programs}
    found: dict[str, Blocks] = {name: defaultdict(list) for name in programs}
    bed.limits(RATE, CORES)
    for _ in range(runs.STEPS // BLOCK):
        for name, program in programs.items():
            of = found[name]
            barrier("block")
            start_s = time.perf_counter()
            for _ in range(BLOCK):
                loss, stats = program.step(place_rows(next(batches[name]), sharding, size))
                of["loss"].append(float(loss))
                of["before"].append(float(np.mean(stats.imbalance_before)))
                of["after"].append(float(np.mean(stats.imbalance_after)))
            of["seconds"].append(time.perf_counter() - start_s)
            bed.say(f"{name}: {len(of['loss'])} steps, {of['seconds'][-1] / BLOCK:.3f} s")
        if bed.rank.index == 0:
            RAW.write_text(json.dumps(found))
    bed.limits(None, None)
    return found


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    """Return the speed and loss of all runs."""
    os.environ["GLIBC_TUNABLES"] = KEEP_MEMORY
    sandbox.enter()
    RAW.parent.mkdir(parents=True, exist_ok=True)
    ranks = run(measure, 4 * 3600)
    slowest = {name: np.max([of[name]["seconds"] for of in ranks], 0).tolist() for name in RUNS}
    return {"runs": table({name: {**ranks[0][name], "seconds": slowest[name]} for name in RUNS})}
