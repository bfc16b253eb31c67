"""Training with encoded experts, or with encoded gradients of gathered experts.

The tiny language model runs on 8 virtual devices in 2 domains of 4, so three of four experts served by a rank are
decoded. The codecs are plain (ratio 1), and ratios 10 and 50 with three bases: the shared expert, none, and the
remembered one. Each runs with several seeds. The table has the final gaps.

With `--gradients`, gradients of gathered experts are encoded instead, in a model small enough for many runs on a CPU:
two layers of 8 experts, 64 wide, on 4 virtual devices in one expert domain. Three quarters of an expert's gradient thus
come from other ranks. The learning rate warms up for 5 % of the steps, then decays to a tenth by a cosine. All codecs
start with the same parameters and have the same batches, for each seed.

Mean and encoding use the weights of the current step. Encoding ahead, after the optimizer, gives the same bits
(`tests/transport/test_codec.py`).
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, Topology, plain, use_virtual_cpu_devices
from jax_moe_lb.transport import Codec, CodecBase, ExpertDomains, GatherExpertDomain, hybrid_mesh
from models.config import PRESETS, TrainConfig
from models.data.corpus import Corpus
from models.data.sources import default_corpus
from models.mesh import make_mesh, place_batch
from models.settings import updated
from models.training.loop import mean_loss
from models.training.step import Programs, make_programs

BASES = {"shared": CodecBase.SHARED, "alone": CodecBase.ZERO, "remembered": CodecBase.REMEMBERED}
CODECS = {"ratio 1": Codec()}
CODECS |= {f"ratio {r:g}, {name}": Codec(r, base, 1.0) for r in (10.0, 50.0) for name, base in BASES.items()}
GRADIENT_CODECS = {"whole": Codec()} | {f"gradients {r:g}": Codec(gradient_ratio=r) for r in (5.0, 10.0, 50.0)}
DOMAIN = 4
"""Devices of an expert domain."""

AVERAGED_STEPS, AVERAGED_GRADIENT_STEPS = 20, 100
"""Last steps over which the final loss is averaged."""

SIZES = {
    "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 2, "mlp_dim": 64, "num_experts": 8},
    "parallel": {"expert_parallel": DOMAIN},
    "batch": {"size": 16, "sequence_length": 64},
    "validation": {"batches": 64},
}
"""Sizes of the model with encoded gradients."""


def final_losses(
    config: TrainConfig, codecs: Mapping[str, Codec], seeds: int, averaged_steps: int
) -> dict[str, np.ndarray]:
    """Train with each codec, and return the final training and validation loss of each seed, `[seeds, 2]`."""
    corpus, whole = default_corpus(config.data.max_corpus_bytes), make_mesh(config.parallel)
    mesh = hybrid_mesh(whole, {"expert": DOMAIN})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(whole))
    found: dict[str, np.ndarray] = {}
    for name, codec in codecs.items():
        system = plain(Buffers(2.0)).replace(migrate=GatherExpertDomain(domains, codec))
        # The seed is no part of a step, so all seeds run one compiled program.
        programs, losses = make_programs(config, mesh, system), []
        for seed in range(seeds):
            seeded = replace(config, seed=seed)
            state = make_programs(seeded, mesh, system).init()
            steps, validation = train_from(state, programs, seeded, mesh, corpus)
            losses.append((float(np.mean(steps[-averaged_steps:])), validation))
            print(f"{name}, seed {seed}: {losses[-1][0]:.4f}, validation {validation:.4f}", flush=True)
        found[name] = np.asarray(losses)
    return found


def train_from(
    state: nnx.State, programs: Programs, config: TrainConfig, mesh: Mesh, corpus: Corpus
) -> tuple[list[float], float]:
    """Return the loss of every step, and the final validation loss; programs of another seed may run the steps."""
    losses = []
    for number in range(1, config.steps + 1):
        tokens = corpus.batch(config.seed, number, config.batch.size, config.batch.sequence_length)
        state, loss, *_ = programs.step(state, place_batch(tokens, mesh))
        losses.append(float(loss))
    batches = corpus.validation_batches(config.validation.batches, config.batch.size, config.batch.sequence_length)
    return losses, mean_loss(programs.evaluate, batches, mesh)(state)


def table(results: Mapping[str, np.ndarray]) -> Table:
    """Return final losses, and their gaps to the first codec for the same seed."""
    columns = {"codec": "", "training loss": ".4f", "training gap": "+.4f"}
    columns |= {"validation loss": ".4f", "validation gap": "+.4f", "largest gap": "+.4f"}
    rows: list[list[Value]] = []
    for name, losses in results.items():
        gaps = losses - results["ratio 1"]
        (loss, validation), (gap, validation_gap) = losses.mean(0), gaps.mean(0)
        rows.append([name, *map(float, (loss, gap, validation, validation_gap, gaps[:, 1].max()))])
    return Table(columns, rows)


def gradient_table(results: Mapping[str, np.ndarray], title: str) -> Table:
    """Return the final losses of each codec as means over seeds, and their gaps to the first codec in %."""
    rows: list[list[Value]] = []
    for name, losses in results.items():
        gaps = 100 * (losses / results["whole"] - 1)
        row = zip(losses.mean(0), gaps.mean(0), gaps.min(0), gaps.max(0), strict=True)
        rows.append([name, *(float(value) for split in row for value in split)])
    columns = {"codec": ""}
    for split in ("training", "validation"):
        columns |= {f"{split} loss": ".4f", f"{split} gap, %": "+.2f"}
        columns |= {f"smallest {split} gap, %": "+.2f", f"largest {split} gap, %": "+.2f"}
    return Table(columns, rows, title)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gradients", action="store_true", help="Encode gradients, by all codecs.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    config = updated(PRESETS["tiny"], {"steps": given.steps})
    if given.gradients:
        config = updated(config, {**SIZES, "optimizer": {"warmup_steps": given.steps // 20}})
    use_virtual_cpu_devices(config.parallel.num_shards)
    if given.gradients:
        losses = final_losses(config, GRADIENT_CODECS, given.seeds, AVERAGED_GRADIENT_STEPS)
        title = f"Loss after {given.steps:,} steps in nats per byte, mean of {given.seeds} seeds"
        return {"losses": gradient_table(losses, title)}
    return {"codecs": table(final_losses(config, CODECS, given.seeds, AVERAGED_STEPS))}
