"""Estimated step of one layer per system, target and skew: total, exposed communication and shares of stages.

Programs are compiled for absent GPUs and TPUs, and their times are estimated from the compiled program
(`jax_moe_lb/aot/timeline.py`); nothing runs. One compilation serves all skews, since only the plan differs. Column
"before" prices the same schedule with the lists of exchanges that the library had until commit 7df7308: one update per
slot of each peer, and whole experts as rows. It is priced, not compiled.

Requires the compilers: the extras `cuda` and `tpu`, as installed by `ci/accelerators.sh` into `.venv-accelerators`.
"""

import argparse
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.layer.dispatches import sending_copies
from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import LayerSizes, ProgramReport, Target, compile_layer, quiet_stderr, use_no_accelerators
from jax_moe_lb.aot.load import LayerLoad, counts_of
from jax_moe_lb.aot.schedule import Kind, ScheduledOperation
from jax_moe_lb.aot.timeline import Timeline, timeline
from jax_moe_lb.layer.systems import system_named

T = TypeVar("T")

SIZES = LayerSizes()
SKEWS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.2")
PROGRAMS = (
    *(("h100:1x8", system) for system in ("plain", "exact", "ultraep", "feplb")),
    *(("h100:2x8", system) for system in ("plain", "exact", "ultraep", "feplb")),
    *((target, system) for target in ("b200:1x8", "v5e:2x4") for system in ("plain", "exact")),
)
"""Targets and systems, all with gradients and with a loop for overflow rounds."""

TARGETS = tuple(dict.fromkeys(target for target, _ in PROGRAMS))

PARTS = {
    "experts %": ("experts",),
    "exchanges of tokens %": ("dispatch", "combine"),
    "replicas %": ("replicate",),
    "plan and addresses %": ("count", "plan", "address"),
    "router %": ("route",),
}
"""Stages of each column, forward and backward; the rest is not listed."""

COLUMNS = {
    "target": "",
    "system": "",
    "load": "",
    "rounds": "d",
    "step ms": ".2f",
    "exposed ms": ".2f",
    **dict.fromkeys(PARTS, ".0f"),
    "before: step ms": ".2f",
    "before: exposed ms": ".2f",
}


def before(schedule: tuple[ScheduledOperation, ...], load: LayerLoad) -> tuple[ScheduledOperation, ...]:
    """Return a schedule whose exchanges have one update per slot and unsplit rows, as before the one-shot lists."""
    home, slots = load.plan.num_home, load.replicas.shape[2]

    def old(one: ScheduledOperation) -> ScheduledOperation:
        shape = one.exchange
        body = tuple(map(old, one.body))
        if one.kind is not Kind.EXCHANGE or shape is None or shape.num_ranks != load.plan.num_ranks:
            return replace(one, body=body)
        if one.stage.endswith("replicate"):
            is_fetch = shape.nbytes * slots == shape.result_bytes * home
            shape = replace(shape, updates=slots, operand_rows=home if is_fetch else slots)
        else:
            shape = replace(shape, updates=load.waves[0].shape[2])
        return replace(one, exchange=shape)

    return tuple(map(old, schedule))


def row(target: Target, system_name: str, report: ProgramReport, skew: str) -> list[Value]:
    """Return one row of the table."""
    topology = target.topology()
    counts = counts_of(skew, SIZES, topology.num_ranks)
    load = LayerLoad.of(sending_copies(system_named(system_name)), SIZES, topology, counts, skew)
    now, then = report.timeline(load), timeline(before(report.schedule, load), target, load)
    is_gpu = target.platform == "cuda"
    # TPUs had the same lists.
    earlier = [then.total_s * 1e3, then.exposed_s * 1e3] if is_gpu else [None, None]
    first = [f"`{target.name}`", system_name, skew, load.rounds, now.total_s * 1e3, now.exposed_s * 1e3]
    return [*first, *_shares(now), *earlier]


def _shares(found: Timeline) -> Iterator[float]:
    stages = found.stages()
    for names in PARTS.values():
        seconds = sum(value for stage, value in stages.items() if stage.removeprefix("backward/") in names)
        yield 100 * seconds / found.total_s


def compiled(program: tuple[str, str], folder: Path) -> ProgramReport:
    """Return the report of a program, from the folder if it is there."""
    name, system_name = program
    path = folder / f"{name.replace(':', '_')}_{system_name}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    with quiet_stderr():
        report = compile_layer(sending_copies(system_named(system_name)), Target.parse(name), SIZES, gradients=True)
    path.write_bytes(pickle.dumps(report))
    return report


def rows_of(program: tuple[str, str], folder: Path) -> list[list[Value]]:
    """Return the rows of a program, one per skew."""
    name, system_name = program
    report = compiled(program, folder)
    return [row(Target.parse(name), system_name, report, skew) for skew in SKEWS]


def each(task: Callable[..., T], programs: Iterable[Any], keep: Path | None, processes: int = 1) -> list[T]:
    """Return `task(program, folder)` of all programs, in a process for each."""
    # Kernel compilers keep the architecture of the first program in a process and reject others.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(processes, context, use_no_accelerators, max_tasks_per_child=1) as pool,
    ):
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return list(pool.map(task, programs, repeat(folder)))


def keep_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--keep`."""
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Folder of compiled programs, kept and read again.")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2, help="Parallel compilations.")
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS, help="Targets to compile for.")
    keep_option(parser)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    programs = [program for program in PROGRAMS if program[0] in given.targets]
    found = [row for rows in each(rows_of, programs, given.keep, given.processes) for row in rows]
    title = "Step of a layer, forward and gradients, estimated from the compiled program"
    return {"steps": Table(COLUMNS, found, title)}
