"""Training with encoded experts.

The tiny language model runs on 8 virtual devices in 2 domains of 4, so three of four experts served by a rank are
decoded. The codecs are plain (ratio 1), and ratios 10 and 50 with three bases: the shared expert, none, and the
remembered one. Each runs with several seeds. The table has the final gaps.

Mean and encoding use the weights of the current step. Encoding ahead, after the optimizer, gives the same bits
(`tests/transport/test_codec.py`).
"""

import argparse
import itertools
from collections.abc import Mapping

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
from models.training.step import Programs, make_programs

CODECS = {
    "ratio 1": Codec(),
    "ratio 10, shared": Codec(10.0, CodecBase.SHARED, 1.0),
    "ratio 10, alone": Codec(10.0, CodecBase.ZERO, 1.0),
    "ratio 10, remembered": Codec(10.0, CodecBase.REMEMBERED, 1.0),
    "ratio 50, shared": Codec(50.0, CodecBase.SHARED, 1.0),
    "ratio 50, alone": Codec(50.0, CodecBase.ZERO, 1.0),
    "ratio 50, remembered": Codec(50.0, CodecBase.REMEMBERED, 1.0),
}
DOMAIN = 4
"""Devices of an expert domain."""

AVERAGED_STEPS = 20
"""Number of last steps over which the final loss is averaged."""


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
    return losses, float(np.mean([float(programs.evaluate(state, place_batch(batch, mesh))) for batch in batches]))


def table(results: dict[tuple[str, int], tuple[list[float], float]], codecs: list[str], seeds: list[int]) -> Table:
    """Return final losses, and their gaps to the reference for the same seed."""
    columns = {"codec": "", "training loss": ".4f", "training gap": "+.4f"}
    columns |= {"validation loss": ".4f", "validation gap": "+.4f", "largest gap": "+.4f"}
    rows: list[list[Value]] = []
    ends = {key: (float(np.mean(losses[-AVERAGED_STEPS:])), last) for key, (losses, last) in results.items()}
    for name in codecs:
        mine = np.asarray([ends[name, seed] for seed in seeds])
        gaps = mine - np.asarray([ends[codecs[0], seed] for seed in seeds])
        (loss, validation), (gap, validation_gap) = mine.mean(0), gaps.mean(0)
        rows.append([name, *map(float, (loss, gap, validation, validation_gap, gaps[:, 1].max()))])
    return Table(columns, rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--codecs", nargs="*", default=list(CODECS), choices=list(CODECS), help="Codecs; the first is the reference."
    )


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_virtual_cpu_devices(8)
    base = PRESETS["tiny"]
    whole = make_mesh(base.parallel)
    mesh = hybrid_mesh(whole, {"expert": DOMAIN})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(whole))
    corpus, results = default_corpus(base.data.max_corpus_bytes), {}
    for seed, name in itertools.product(range(given.seeds), given.codecs):
        config = updated(base, {"steps": given.steps, "seed": seed})
        system = plain(Buffers(2.0)).replace(migrate=GatherExpertDomain(domains, CODECS[name]))
        programs = make_programs(config, mesh, system)
        losses, last = results[name, seed] = train_from(programs.init(), programs, config, mesh, corpus)
        print(f"{name}, seed {seed}: {losses[-1]:.4f}, validation {last:.4f}", flush=True)
    return {"codecs": table(results, given.codecs, list(range(given.seeds)))}
