"""The tiny preset, trained with every system from the same parameters on the same batches.

For every plan the losses equal plain expert parallelism up to
float32 rounding, which accumulates over steps.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.render.results import Table, spread
from jax_moe_lb import System, use_virtual_cpu_devices
from jax_moe_lb.layer.systems import system_named, system_names
from jax_moe_lb.transport import QuantizedTransfer
from models.config import PRESETS, TrainConfig
from models.data.corpus import Corpus
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch
from models.training.step import make_programs

STEPS = 50
WIRES = {"rows in fp8": jnp.float8_e4m3fn, "rows in int8": jnp.int8}

BLOCK = 32
"""Block size of the scales; the model is 128 wide."""


def system_of(name: str) -> System:
    """Return the system of a name, optionally followed by a row precision."""
    name, _, wire = name.partition(", ")
    system = system_named(name)
    return system.replace(transfer=QuantizedTransfer(WIRES[wire], BLOCK)) if wire else system


def train(config: TrainConfig, corpus: Corpus, system: str) -> dict[str, np.ndarray]:
    """Return per step: loss, mean imbalance over layers before and after, maximum rounds, seconds, and counts."""
    mesh = make_mesh(config.parallel)
    programs = make_programs(config, mesh, system_of(system))
    state, rows, counts = programs.init(), [], []
    for step in range(1, config.steps + 1):
        tokens = place_batch(corpus.batch(config.seed, step, config.batch.size, config.batch.sequence_length), mesh)
        start_s = time.perf_counter()
        state, loss, _, stats = programs.step(state, tokens)
        loss, stats = jax.device_get((loss, stats))
        seconds = time.perf_counter() - start_s
        rows.append((loss, stats.imbalance_before.mean(), stats.imbalance_after.mean(), stats.rounds.max(), seconds))
        counts.append(stats.counts)
    names = ("loss", "before", "after", "rounds", "step_s")
    return dict(zip(names, np.asarray(rows, np.float64).T, strict=True)) | {"counts": np.stack(counts)}


COLUMNS = {"system": "", "last loss": ".6f", "steps within 1e-6": "d", "with the same counts": "d"}
COLUMNS |= {"largest difference": ".1e", "imbalance before": ".2f", "after": ".2f", "most rounds": ".0f"}
COLUMNS |= {"step ms": ".0f"}
"""Columns of the table; systems run one after the other."""


def steps_before(wrong: np.ndarray) -> int:
    """Return the number of steps before the first wrong one."""
    return int(np.argmax(np.append(wrong, True)))


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    config = dataclasses.replace(PRESETS["tiny"], steps=STEPS)
    use_virtual_cpu_devices(config.parallel.num_shards)
    corpus = default_corpus(config.data.max_corpus_bytes)
    plain = train(config, corpus, "plain")
    rows = []
    systems = [*system_names(), *(f"exact, {wire}" for wire in WIRES)]
    for name in ["plain", *(name for name in systems if name != "plain")]:
        run = plain if name == "plain" else train(config, corpus, name)
        apart = np.abs(run["loss"] / plain["loss"] - 1)
        other = (run["counts"] != plain["counts"]).reshape(len(apart), -1).any(1)
        alike = steps_before(apart > 1e-6), steps_before(other)
        level = run["before"].mean(), run["after"].mean(), run["rounds"].max()
        # The first step includes compilation.
        times_ms = spread(run["step_s"][1:] * 1e3)
        rows.append([name, float(run["loss"][-1]), *alike, float(apart.max()), *map(float, level), times_ms])
    return {"systems": Table(COLUMNS, rows)}
