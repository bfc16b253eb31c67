"""Training with encoded gradients of gathered experts.

A model of the tiny preset's kind, small enough for many runs on a CPU: two layers of 8 experts, 64 wide, on 4 virtual
devices in one expert domain. Three quarters of an expert's gradient thus come from other ranks. The learning rate warms
up for 5 % of the steps, then decays to a tenth by a cosine. For each seed, all codecs start with the same parameters
and have the same batches. Gaps are to the first codec with the same seed.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from benchmarks.papers.codec import train_from
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, Topology, plain, use_virtual_cpu_devices
from jax_moe_lb.transport import Codec, ExpertDomains, GatherExpertDomain, hybrid_mesh
from models.config import PRESETS, TrainConfig
from models.data.corpus import Corpus
from models.data.sources import default_corpus
from models.mesh import make_mesh
from models.settings import updated
from models.training.step import make_programs

NUM_DEVICES, AVERAGED_STEPS = 4, 100
CODECS = {
    "whole": Codec(),
    "gradients 5": Codec(gradient_ratio=5.0),
    "gradients 10": Codec(gradient_ratio=10.0),
    "gradients 50": Codec(gradient_ratio=50.0),
}
SIZES = {
    "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 2, "mlp_dim": 64, "num_experts": 8},
    "parallel": {"expert_parallel": NUM_DEVICES},
    "batch": {"size": 16, "sequence_length": 64},
    "validation": {"batches": 64},
}


def ends(config: TrainConfig, mesh: Mesh, name: str, domains: ExpertDomains, corpus: Corpus, seeds: int) -> np.ndarray:
    """Train with one codec and return the final training and validation loss of each seed, `[seeds, 2]`."""
    system = plain(Buffers(2.0)).replace(migrate=GatherExpertDomain(domains, CODECS[name]))
    # The seed is no part of a step, so all seeds run one compiled program.
    programs = make_programs(config, mesh, system)
    found = []
    for seed in range(seeds):
        seeded = replace(config, seed=seed)
        state = make_programs(seeded, mesh, system).init()
        losses, validation = train_from(state, programs, seeded, mesh, corpus)
        found.append((float(np.mean(losses[-AVERAGED_STEPS:])), validation))
        print(f"{name}, seed {seed}: {found[-1][0]:.4f}, validation {validation:.4f}", flush=True)
    return np.asarray(found)


def table(config: TrainConfig, codecs: list[str], corpus: Corpus, seeds: int) -> Table:
    """Return the final losses of each codec as means over seeds, and their gaps to the first codec in %."""
    whole = make_mesh(config.parallel)
    mesh = hybrid_mesh(whole, {"expert": NUM_DEVICES})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(whole))
    results = {name: ends(config, mesh, name, domains, corpus, seeds) for name in codecs}
    rows: list[list[Value]] = []
    for name, losses in results.items():
        gaps = 100 * (losses / results[codecs[0]] - 1)
        row = zip(losses.mean(0), gaps.mean(0), gaps.min(0), gaps.max(0), strict=True)
        rows.append([name, *(float(value) for split in row for value in split)])
    columns = {"codec": ""}
    for split in ("training", "validation"):
        columns |= {f"{split} loss": ".4f", f"{split} gap, %": "+.2f"}
        columns |= {f"smallest {split} gap, %": "+.2f", f"largest {split} gap, %": "+.2f"}
    return Table(columns, rows, f"Loss after {config.steps:,} steps in nats per byte, mean of {seeds} seeds")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--codecs", nargs="*", default=list(CODECS), choices=list(CODECS), help="The first is the base."
    )


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(NUM_DEVICES)
    sizes = {**SIZES, "steps": given.steps, "optimizer": {"warmup_steps": given.steps // 20}}
    config = updated(PRESETS["tiny"], sizes)
    corpus = default_corpus(config.data.max_corpus_bytes)
    return {"losses": table(config, given.codecs, corpus, given.seeds)}
