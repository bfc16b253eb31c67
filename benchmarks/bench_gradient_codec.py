"""Training with encoded gradients of gathered experts: `python -m benchmarks.bench_gradient_codec --out FILE.json`.

A model of the tiny preset's kind, small enough for a thousand steps on a CPU: two layers of 8 experts, 64 wide, on 4
virtual devices in one expert domain. Three quarters of an expert's gradient thus come from other ranks. Every run has
the same batches, so gaps are of the codec alone.
"""

import argparse

import numpy as np

from benchmarks.bench_codec import train
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import Topology, use_virtual_cpu_devices
from jax_moe_lb.transport import Codec, CodecBase, ExpertDomains, GatherExpertDomain, hybrid_mesh
from models.config import TrainConfig, preset
from models.data.corpus import Corpus
from models.data.sources import default_corpus
from models.mesh import make_mesh
from models.settings import updated

NUM_DEVICES, AVERAGED_STEPS = 4, 50
CODECS = {
    "whole": Codec(),
    "gradients 5": Codec(gradient_ratio=5.0),
    "gradients 10": Codec(gradient_ratio=10.0),
    "gradients 50": Codec(gradient_ratio=50.0),
    "experts and gradients 50": Codec(50.0, CodecBase.REMEMBERED, gradient_ratio=50.0),
}
SIZES = {
    "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 2, "mlp_dim": 64, "num_experts": 8},
    "parallel": {"expert_parallel": NUM_DEVICES},
    "batch": {"size": 8, "sequence_length": 64},
}


def table(config: TrainConfig, codecs: list[str], corpus: Corpus) -> Table:
    """Train once with every codec and return the final losses, and their gaps to the first one in %."""
    whole = make_mesh(config.parallel)
    mesh = hybrid_mesh(whole, {"expert": NUM_DEVICES})
    domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(whole))
    rows: list[list[Value]] = []
    first: tuple[float, float] | None = None
    for name in codecs:
        migrate = GatherExpertDomain(domains, CODECS[name])
        losses, validation = train(config, mesh, migrate, corpus, upcycled=False)
        ends = float(np.mean(losses[-AVERAGED_STEPS:])), validation
        first = first or ends
        gaps = [100 * (end / base - 1) for end, base in zip(ends, first, strict=True)]
        rows.append([name, ends[0], gaps[0], ends[1], gaps[1]])
        print(rows[-1], flush=True)
    columns = {"codec": "", "training loss": ".4f", "training gap, %": "+.2f"}
    columns |= {"validation loss": ".4f", "validation gap, %": "+.2f"}
    return Table(columns, rows, f"Loss after {config.steps:,} steps, seed {config.seed}, in nats per byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--codecs", nargs="*", default=list(CODECS), choices=list(CODECS), help="The first is the base."
    )
    out_option(parser)
    given = parser.parse_args()
    use_virtual_cpu_devices(NUM_DEVICES)
    config = updated(preset("tiny"), {**SIZES, "steps": given.steps, "seed": given.seed})
    report({"losses": table(config, given.codecs, default_corpus(config.data.max_corpus_bytes))}, given.out)


if __name__ == "__main__":
    main()
