"""Time of one layer in the simulator beside its estimate from the compiled program, for the layers of six models.

The simulator runs on its preset of a node of H100. Both read the rates of `core/devices/h100.toml`, which leaves
differences of the model. Times are simulated, or estimated from the compiled program; nothing
runs. Requires the compiler of the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path

from benchmarks.compiled.timeline import each, keep_option
from benchmarks.render.results import Table, Value
from jax_moe_lb import exact
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.core.types import Counts
from jax_moe_lb.sim import Cluster, ModelShape, simulate
from jax_moe_lb.sim.config import load_config

SIZES = {
    "Qwen3-30B-A3B": LayerSizes(),
    "Mixtral-8x7B": LayerSizes(hidden=4096, inner=14336, experts=8, tokens=8192, per_token=2),
    "Qwen3-235B-A22B": LayerSizes(hidden=4096, inner=1536, experts=128, tokens=8192, per_token=8),
    "DeepSeek-V3": LayerSizes(hidden=7168, inner=2048, experts=256, tokens=4096, per_token=8),
    "GLM-4.5": LayerSizes(hidden=5120, inner=1536, experts=160, tokens=4096, per_token=8),
    "gpt-oss-120b": LayerSizes(hidden=2880, inner=2880, experts=128, tokens=4096, per_token=4),
}
TARGET = Target.parse("h100:1x8")
SYSTEM = exact(dispatch="direct")

PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "experts": (("experts",), ("experts", "small operations")),
    "tokens": (("dispatch", "combine"), ("dispatch", "combine", "permutation", "sums of copies")),
    "replicas": (("replicate",), ("weights", "gradients", "sums of replicas")),
}
"""Stages of each part in the timeline and in the simulator; the rest is counts and plan."""

NO_LAYER = ("route", "other")
"""Stages of the timeline that the simulator leaves out: the router, and the loss behind the layer."""

COLUMNS = {
    "layer": "",
    "timeline ms": ".2f",
    "simulated ms": ".2f",
    "simulated %": "+.0f",
    **{f"{part}, timeline / simulated ms": "" for part in PARTS},
}


def simulated(sizes: LayerSizes, counts: Counts, cluster: Cluster) -> Mapping[str, float]:
    """Return the milliseconds of each stage on the critical path, without attention."""
    shape = ModelShape(
        1,
        sizes.hidden,
        sizes.inner,
        sizes.experts,
        sizes.per_token,
        sizes.tokens,
        gradient_itemsize=2,
        pre_expert_s=0.0,
    )
    stages = simulate(SYSTEM, shape, cluster, counts).stages
    return {name: 1e3 * stage.exposed_s for name, stage in stages.items()}


def compiled(name: str, folder: Path) -> ProgramReport:
    """Return the report of a layer, from the folder if it is there."""
    path = folder / f"{name}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    with quiet_stderr():
        found = compile_layer(SYSTEM, TARGET, SIZES[name], gradients=True)
    path.write_bytes(pickle.dumps(found))
    return found


def row(name: str, folder: Path) -> list[Value]:
    """Return the row of a layer."""
    sizes, topology = SIZES[name], TARGET.topology()
    counts = counts_of(DEFAULT_LOAD, sizes, topology.num_ranks)
    node = load_config("preset", "h100_node").cluster
    if node is None:
        raise RuntimeError("h100_node has no cluster; expected one")
    stages_ms = simulated(sizes, counts, node.build())
    found = compiled(name, folder).timeline(LayerLoad.of(SYSTEM, sizes, topology, counts))
    stages = {stage.removeprefix("backward/"): 0.0 for stage in found.stages()}
    for stage, seconds in found.stages().items():
        stages[stage.removeprefix("backward/")] += 1e3 * seconds
    total = 1e3 * found.total_s - sum(stages.get(one, 0.0) for one in NO_LAYER)
    parts = [
        f"{sum(stages.get(one, 0.0) for one in mine):.2f} / "
        f"{sum(ms for stage, ms in stages_ms.items() if stage.removesuffix(' (backward)') in theirs):.2f}"
        for mine, theirs in PARTS.values()
    ]
    found_ms = sum(stages_ms.values())
    return [name, total, found_ms, 100 * (found_ms / total - 1), *parts]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES), help="Models of the table.")
    keep_option(parser)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    found = each(row, given.models, given.keep)
    title = "A layer of `exact` with gradients at Zipf 1.0: simulated, and estimated from the compiled program"
    return {"layers": Table(COLUMNS, found, title)}
