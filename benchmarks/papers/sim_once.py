"""Simulated times of `Direct`, `Once` and `Forward` on 4 nodes of 8 H800, beside DeepEP's published bandwidth.

The node has 8 links of 400 Gbit/s and 160 GB/s per rank inside, as DeepEP measured. Exchanges are those of one layer of
DeepSeek-V3 under uniform routing, fp8 with scales out and bfloat16 back. Steps are those of Qwen3-235B with synthetic
loads.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, System, exact, plain
from jax_moe_lb.sim import Cluster, Communication, Links, ModelShape, Step, simulate, skewed_counts
from jax_moe_lb.sim.config import load_config
from jax_moe_lb.transport import Direct, Forward, Once
from jax_moe_lb.transport.wave_rows import share_in_member

NODES, MEMBERS = 4, 8
H800 = Cluster(
    (Links("node", NODES, 50e9, links=MEMBERS, latency_s=10e-6), Links("gpu", MEMBERS, 160e9, latency_s=3e-6)),
    planner_s=100e-6,
)
FP8 = replace(H800, communication=Communication(dispatch_bytes=1.03125, combine_bytes=2.0))
"""One float32 scale per 128 elements."""

PUBLISHED_BYTES_PER_S = (58e9, 57e9)
"""DeepEP's bandwidth between nodes with 32 ranks, dispatch and combine: its README, normal kernels, H800."""

ONE_ROUND = Buffers(max_rounds=1)
CHUNKS = 8
DISPATCHES = {
    "Direct": Direct(ONE_ROUND),
    "Once": Once(ONE_ROUND),
    "Forward": Forward(ONE_ROUND),
    f"Forward, {CHUNKS} chunks": Forward(replace(ONE_ROUND, chunks=CHUNKS)),
}
IMBALANCE, LAYERS = 2.0, 4


def model(name: str) -> ModelShape:
    return load_config("preset", name, "model").model.build()


def exchanges() -> Iterator[list[Value]]:
    """Yield the milliseconds of dispatch and combine of each dispatch, and over those of DeepEP."""
    shape = model("deepseek_v3")
    even = np.full((NODES * MEMBERS, shape.experts), shape.tokens * shape.per_token // shape.experts, np.int32)
    rows = shape.tokens * NODES * share_in_member(shape.experts, shape.per_token, NODES)
    widths = 1.03125 * shape.hidden, 2.0 * shape.hidden
    published = [1e3 * rows * width / rate for width, rate in zip(widths, PUBLISHED_BYTES_PER_S, strict=True)]
    yield ["DeepEP, published", *published, 1.0, 1.0]
    layer, step = replace(shape, layers=1, pre_expert_s=0.0), Step(backward=False, exchange_counts=False)
    for name, dispatch in DISPATCHES.items():
        stages = simulate(System(dispatch=dispatch), layer, FP8, even, step=step).stages
        times = [1e3 * stages[stage].exposed_s for stage in ("dispatch", "combine")]
        yield [name, *times, *(mine / its for mine, its in zip(times, published, strict=True))]


def steps() -> Iterator[list[Value]]:
    """Yield the seconds of a step, forward and backward, of each system and dispatch, and their exposed exchanges."""
    shape = model("qwen3_235b")
    counts = skewed_counts(shape, NODES * MEMBERS, IMBALANCE, LAYERS, 0)
    for name, system in (("plain", plain()), ("exact", exact())):
        for kind, dispatch in DISPATCHES.items():
            found = simulate(replace(system, dispatch=dispatch), shape, H800, counts)
            exposed = sum(
                stage.exposed_s for name, stage in found.stages.items() if name.split()[0] in ("dispatch", "combine")
            )
            yield [name, kind, found.imbalance_after, found.step_s, exposed]


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    exchange_columns = {"dispatch of": "", "dispatch ms": ".2f", "combine ms": ".2f"}
    over = {"dispatch over published": ".2f", "combine over published": ".2f"}
    step_columns = {"system": "", "dispatch": "", "imbalance": ".3f", "step s": ".2f", "exposed exchanges s": ".2f"}
    return {
        "exchanges": Table(
            exchange_columns | over, list(exchanges()), "One layer of DeepSeek-V3, uniform routing, fp8 out"
        ),
        "steps": Table(step_columns, list(steps()), f"Qwen3-235B, imbalance {IMBALANCE:g} before balancing"),
    }
