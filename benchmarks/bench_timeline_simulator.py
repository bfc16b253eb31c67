"""Time of one layer in the simulator beside its estimate from the compiled program, for the layers of six models.

The simulator runs twice: on its preset of a node of H100, and with the rates of the timeline (link, products, memory,
planner), which leaves differences of the model. Times are simulated, or estimated from the compiled program; nothing
runs. Requires the compiler of the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
import multiprocessing
import pickle
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import exact
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.aot.operation_time import TILE, rates_of
from jax_moe_lb.aot.targets import GPUS
from jax_moe_lb.core.types import Counts
from jax_moe_lb.kernels.recorded_rates import recorded_tflops
from jax_moe_lb.recordings.device_rates import GpuRates
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, ModelShape, simulate
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

PRODUCTS = {"product": 3 + 2 + 3, "outer": 3}
"""Products of a layer by kind: three forward, two for rematerialized hidden rows, three for rows, three for weights.

The backward pass transposes weights and multiplies with the forward kernel."""

UNITS = 12
"""Products of the same layer in the simulator: three forward, and three times as many backward."""

HIDDEN_ARRAYS = 9
"""Hidden activations read or written between products, as in `sim.memory.traffic_of`: three forward, six backward."""

PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "experts": (("experts",), ("experts",)),
    "tokens": (("dispatch", "combine"), ("dispatch", "combine", "permutation", "sums of copies")),
    "replicas": (("replicate",), ("weights", "gradients")),
}
"""Stages of each part in the timeline and in the simulator; the rest is counts and plan."""

NO_LAYER = ("route", "other")
"""Stages of the timeline that the simulator leaves out: the router, and the loss behind the layer."""

COLUMNS = {
    "layer": "",
    "timeline ms": ".2f",
    "preset ms": ".2f",
    "preset %": "+.0f",
    "same rates ms": ".2f",
    "same rates %": "+.0f",
    **{f"{part}, timeline / same rates ms": "" for part in PARTS},
}


def same_rates(sizes: LayerSizes) -> Cluster:
    """Return a node with the rates of the timeline.

    The curve of the experts includes the operations between products, as a measured curve does.
    """
    rates, gpu = rates_of(TARGET), GPUS[TARGET.kind]
    if not isinstance(rates, GpuRates):
        raise TypeError(f"rates are {type(rates).__name__}; expected GpuRates")
    # Tokamax's kernels, as `choose_backend` takes them: the faster record of each kind.
    speeds = {kind: max(recorded_tflops("9.0", kind, one) or 0.0 for one in ("Mosaic", "Triton")) for kind in PRODUCTS}
    seconds = sum(number / (1e12 * speeds[kind]) for kind, number in PRODUCTS.items())
    # Per operation of a product: a row has `F` hidden activations of two bytes, and a product `2 H F` operations.
    seconds += HIDDEN_ARRAYS / (sizes.hidden * gpu.bytes_per_s)
    return Cluster(
        (Links("gpu", 8, rates.link * rates.link_share, latency_s=rates.one_shot),),
        # Half a tile is empty at the end of each group.
        gemm=AnalyticGemm(UNITS / seconds, half_rows=TILE / 2, launch_s=0.0),
        copy_bytes_per_s=rates.copy_engines,
        planner_s=rates.planner_kernel[TARGET.topology().num_ranks],
        hbm_bytes_per_s=gpu.bytes_per_s,
    )


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
    preset, same = (simulated(sizes, counts, cluster) for cluster in (node.build(), same_rates(sizes)))
    found = compiled(name, folder).timeline(LayerLoad.of(SYSTEM, sizes, topology, counts))
    stages = {stage.removeprefix("backward/"): 0.0 for stage in found.stages()}
    for stage, seconds in found.stages().items():
        stages[stage.removeprefix("backward/")] += 1e3 * seconds
    total = 1e3 * found.total_s - sum(stages.get(one, 0.0) for one in NO_LAYER)
    parts = [
        f"{sum(stages.get(one, 0.0) for one in mine):.2f} / "
        f"{sum(ms for stage, ms in same.items() if stage.removesuffix(' (backward)') in theirs):.2f}"
        for mine, theirs in PARTS.values()
    ]
    times = [sum(preset.values()), sum(same.values())]
    return [name, total, *(value for ms in times for value in (ms, 100 * (ms / total - 1))), *parts]


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES), help="Models of the table.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Folder of compiled programs, kept and read again.")
    out_option(parser)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(1, context, use_no_accelerators, max_tasks_per_child=1) as pool,
    ):
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = list(pool.map(row, given.models, repeat(folder)))
    title = "A layer of `exact` with gradients at Zipf 1.0: simulated, and estimated from the compiled program"
    report({"layers": Table(COLUMNS, found, title)}, given.out)


if __name__ == "__main__":
    main()
