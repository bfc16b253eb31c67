"""Estimated steps of one layer: by system, target and skew; by options; and on TPUs by form, with their memory.

Programs are compiled for absent GPUs and TPUs, and their times are estimated from the compiled program
(`jax_moe_lb/aot/timeline.py`); nothing runs. One compilation serves all skews, since only the plan differs. Options and
forms are those of `exact` at Zipf 1.0.

Requires the compilers: the extras `cuda` and `tpu`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
import hashlib
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product, repeat
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.compiled.peer_products import products_by
from benchmarks.layer.dispatches import sending_copies
from benchmarks.render.results import Table, Value
from jax_moe_lb import Buffers, ExpertConfig, MoE, Precision, System, TopK, exact, plain
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.compiler_options import LATENCY_HIDING
from jax_moe_lb.aot.layer import LayerProgram
from jax_moe_lb.aot.load import DEFAULT_LOAD, LayerLoad, counts_of
from jax_moe_lb.aot.timeline import Timeline
from jax_moe_lb.layer.systems import system_named
from jax_moe_lb.transport import PeerCopy, Saved

SIZES = LayerSizes()
Key = tuple[str, str]
"""A target, and a system, form or options."""


def compiled(target: str, system: System, folder: Path, sizes: LayerSizes = SIZES, **options: Any) -> ProgramReport:
    """Return the report of a program with gradients, from the folder if it is there."""
    name = f"{target}, {system}, {sizes}, {options}"
    path = folder / f"{target.replace(':', '_')}_{hashlib.sha256(name.encode()).hexdigest()[:12]}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    with quiet_stderr():
        report = compile_layer(system, Target.parse(target), sizes, gradients=True, **options)
    path.write_bytes(pickle.dumps(report))
    return report


def load_of(target: str, system: System, skew: str = DEFAULT_LOAD, sizes: LayerSizes = SIZES) -> LayerLoad:
    topology = Target.parse(target).topology()
    return LayerLoad.of(system, sizes, topology, counts_of(skew, sizes, topology.num_ranks), skew)


def each(task: Callable[[Key, Path], Any], keys: Iterable[Key], given: argparse.Namespace) -> list[Any]:
    """Return `task(key, folder)` of all programs, in a process for each."""
    # Kernel compilers keep the architecture of the first program in a process and reject others.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(given.processes, context, use_no_accelerators, max_tasks_per_child=1) as pool,
    ):
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return list(pool.map(task, keys, repeat(folder)))


# ---- systems and skews ----------------------------------------------------------------

SKEWS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.2")
SYSTEMS: tuple[Key, ...] = (
    *product(("h100:1x8", "h100:2x8"), ("plain", "exact", "ultraep", "feplb")),
    *product(("b200:1x8", "v5e:2x4"), ("plain", "exact")),
)
"""Targets and systems, with a loop for overflow rounds."""

PARTS = {
    "experts %": ("experts",),
    "exchanges of tokens %": ("dispatch", "combine"),
    "replicas %": ("replicate",),
    "plan and addresses %": ("count", "plan", "address"),
    "router %": ("route",),
}
"""Stages of each column, forward and backward; the rest is not listed."""


def rows_of_system(key: Key, folder: Path) -> list[list[Value]]:
    """Return the rows of a program, one per skew."""
    target, system = key[0], sending_copies(system_named(key[1]))
    report, rows = compiled(target, system, folder), list[list[Value]]()
    for skew in SKEWS:
        load = load_of(target, system, skew)
        found = report.timeline(load)
        times = found.total_s * 1e3, found.exposed_s * 1e3
        rows.append([f"`{target}`", key[1], skew, load.rounds, *times, *shares(found)])
    return rows


def shares(found: Timeline) -> list[float]:
    """Return the percentages of `PARTS`."""
    stages = found.stages().items()
    return [
        100 * sum(seconds for stage, seconds in stages if stage.removeprefix("backward/") in names) / found.total_s
        for names in PARTS.values()
    ]


def of_systems(given: argparse.Namespace) -> Table:
    columns = {"target": "", "system": "", "load": "", "rounds": "d", "step ms": ".2f", "exposed ms": ".2f"}
    rows = [row for rows in each(rows_of_system, SYSTEMS, given) for row in rows]
    title = "Step of a layer, forward and gradients, estimated from the compiled program"
    return Table(columns | dict.fromkeys(PARTS, ".0f"), rows, title)


# ---- options --------------------------------------------------------------------------

DIRECT, SAVED = exact(dispatch="direct"), Saved(rows=True, replicas=True)
BY_PEERS, ALL = replace(DIRECT, replicate=PeerCopy()), {"buffers": Buffers(chunks=2), "saved": SAVED}
OPTIONS: dict[str, tuple[System, bool]] = {
    "none, `plain`": (plain(dispatch="direct"), False),
    "none": (DIRECT, False),
    "peer copies of weights": (BY_PEERS, False),
    "latency hiding": (DIRECT, True),
    "latency hiding, 2 chunks, saved rows and replicas": (DIRECT.replace(**ALL), True),
    "the same, peer copies of weights": (BY_PEERS.replace(**ALL), True),
}
"""System of each row, and whether the latency-hiding scheduler is on."""

TERMS = {
    "tokens, forward": ("dispatch", "combine"),
    "tokens, backward": ("backward/dispatch", "backward/combine"),
    "replicas": ("replicate", "backward/replicate"),
}
"""Stages of each term of exposed communication; the rest is "others": counts, addresses and all-reduces."""


def row_of_options(key: Key, folder: Path) -> list[Value]:
    target, (system, hides) = key[0], OPTIONS[key[1]]
    program = compiled(target, system, folder, fused=True, options={LATENCY_HIDING: hides})
    found = program.timeline(load_of(target, system))
    uniform_s = program.timeline(load_of(target, system, "uniform")).total_s
    terms = dict.fromkeys((*TERMS, "others"), 0.0)
    for span in found.compute:
        if span.is_communication:
            terms[next((term for term, stages in TERMS.items() if span.stage in stages), "others")] += span.seconds
    times = uniform_s, found.total_s, found.exposed_s, *terms.values(), found.hidden_s
    return [key[1], program.temp_bytes / 1e6, *(1e3 * seconds for seconds in times)]


def of_options(given: argparse.Namespace) -> Table:
    """Return the steps of `exact` by options of XLA and of the layer, with the terms of exposed communication."""
    columns = {"options": "", "temporary MB": ".0f"}
    columns |= dict.fromkeys(("step ms, uniform load", "step ms", "exposed ms", *TERMS, "others", "hidden ms"), ".2f")
    title = "`exact` with fused gates on `h100:1x8`, forward and gradients, estimated from the compiled program"
    return Table(columns, each(row_of_options, product(("h100:1x8",), OPTIONS), given), title)


# ---- TPUs -----------------------------------------------------------------------------

TPUS = ("v5e:2x4", "v6e:2x4", "v5p:2x2x2")
ONCE, CHUNKS = exact(max_rounds=1, dispatch="once"), Buffers(max_rounds=1, chunks=2)
CHUNKED, CHUNKED_ONCE = exact(buffers=CHUNKS, dispatch="direct"), exact(buffers=CHUNKS, dispatch="once")
PRODUCTS_BY = {
    "direct, two chunks, products by Megablox": "Megablox",
    "direct, two chunks, products by tokamax": "tokamax",
    "direct, two chunks, products by XLA": "lax.ragged_dot",
}
FORMS = {
    "once": ONCE,
    "once, two chunks": CHUNKED_ONCE,
    "once, two chunks, saved rows and replicas": CHUNKED_ONCE.replace(saved=SAVED),
    "direct": exact(max_rounds=1, dispatch="direct"),
    "direct, two chunks": CHUNKED,
    "direct, two chunks, saved rows and replicas": CHUNKED.replace(saved=SAVED),
    **dict.fromkeys(PRODUCTS_BY, CHUNKED),
}
"""System of each form. The rule chooses two chunks, of `Once` on v5e and v6e and of `Direct` on v5p."""


def residual_bytes(target: Target, system: System) -> int:
    """Return the bytes that a layer saves for its backward pass on one device."""
    with quiet_stderr():
        mesh = target.mesh()

    def make() -> MoE:
        router, experts, precision = TopK(SIZES.per_token), ExpertConfig(SIZES.inner), Precision(None, jnp.bfloat16)
        sizes = (SIZES.hidden, SIZES.experts)
        return MoE(*sizes, router, mesh=mesh, system=system, experts=experts, precision=precision, rngs=nnx.Rngs(0))

    x = jax.ShapeDtypeStruct((mesh.size * SIZES.tokens, SIZES.hidden), jnp.bfloat16)
    layer = nnx.eval_shape(make)
    return LayerProgram(layer, x, DEFAULT_LOAD).residual_bytes(layer.system)


def row_of_form(key: Key, folder: Path) -> list[Value]:
    (target, form), system = key, FORMS[key[1]]
    if form in PRODUCTS_BY:
        folder = folder / PRODUCTS_BY[form]
        folder.mkdir(exist_ok=True)
    with products_by(PRODUCTS_BY[form]) if form in PRODUCTS_BY else nullcontext():
        found = compiled(target, system, folder)
    timeline = found.timeline(load_of(target, system))
    bounds = timeline.bounds()
    memory = found.temp_bytes / 1e6, found.peak_bytes / 1e6, residual_bytes(Target.parse(target), system) / 1e6
    times = timeline.total_s, timeline.exposed_s, *(bounds.get(name, 0.0) for name in ("HBM", "rows", "FLOPs"))
    return [f"`{target}`", form, *memory, *(1e3 * seconds for seconds in times)]


def of_tpus(given: argparse.Namespace) -> Table:
    """Return the steps of `exact` in one round on TPUs."""
    memory = ("temporaries MB", "at the peak MB", "residuals of a layer MB")
    times = ("step ms", "exposed ms", "memory-bound ms", "rows ms", "FLOPs-bound ms")
    columns = {"target": "", "form": ""} | dict.fromkeys(memory, ".0f") | dict.fromkeys(times, ".2f")
    title = "`exact` in one round on TPUs, forward and gradients, estimated from the compiled program"
    return Table(columns, each(row_of_form, product(TPUS, FORMS), given), title)


LARGE = {"v6e:8x8": 128, "v6e:8x16": 128, "v6e:16x16": 256}
"""Experts of each large slice."""


def row_of_slice(key: Key, folder: Path) -> list[Value]:
    system, sizes = exact(max_rounds=1), replace(SIZES, experts=LARGE[key[0]])
    load, report = load_of(key[0], system, sizes=sizes), compiled(key[0], system, folder, sizes)
    found = report.timeline(load)
    plan = found.stages()["plan"]
    times = found.total_s * 1e3, plan * 1e3, 100 * plan / found.total_s
    return [f"`{key[0]}`", report.devices, sizes.experts, int(load.replicas.sum()), report.temp_bytes / 1e6, *times]


def of_slices(given: argparse.Namespace) -> Table:
    """Return the time of the planner of `exact` on large slices."""
    columns = {"target": "", "ranks": "d", "experts": "d", "replicas": "d", "temporaries MB": ".0f"}
    columns |= {"step ms": ".2f", "planner ms": ".2f", "planner %": ".1f"}
    title = "Planner of `exact` on large slices, Zipf 1.0, estimated from the compiled program"
    return Table(columns, each(row_of_slice, product(LARGE, ("exact",)), given), title)


TABLES = {"steps": of_systems, "options": of_options, "forms": of_tpus, "planner": of_slices}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", choices=TABLES, help="Table of systems, of options, of forms on TPUs, or of their planner."
    )
    parser.add_argument("--processes", type=int, default=1, help="Parallel compilations.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Folder of compiled programs, kept and read again.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {given.table: TABLES[given.table](given)}
