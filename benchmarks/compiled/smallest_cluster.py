"""The smallest cluster of 8-GPU nodes on which a training step of each published model fits, compiled.

Requires the compiler: the extra `cuda`, as installed by `ci/accelerators.sh` into `.venv-accelerators`. Each device has
one sequence of 4096 tokens. Steps are compiled for clusters of increasing size until one fits, a minute each. The last
columns are bytes of a device's collectives by mesh axes, and host waits in loops of rounds.
"""

import argparse
import math
from collections.abc import Mapping

import jax

from benchmarks.render.results import Table, Value
from jax_moe_lb.aot import ProgramReport, Target, quiet_stderr, use_no_accelerators
from models.config import TrainConfig
from models.dry_run.step import dry_run, mesh_of, published_run
from models.mesh import make_system
from models.training.source import PUBLISHED_NAMES, source_of
from models.training.step import make_programs

NODES = (1, 2, 4, 8, 16, 32, 64)

WITH_GRADIENTS = 4 / 3
"""Ratio of parameters, two moments and gradients to the state without gradients."""

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "glm-4.5", "gpt-oss-120b")
"""Models of the table; the others take minutes more."""

COLUMNS = {"model": "", "smallest cluster": "", "data x expert": "", "arguments GB": ".1f", "temporaries GB": ".1f"}
COLUMNS |= {"of GB": ".1f", "FLOPs / ideal": ".2f", "over `data` GB": ".1f", "over `expert` GB": ".1f"}
COLUMNS |= {"over both GB": ".1f", "host waits": "d"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", nargs="*", default=("h100", "h200"), metavar="GPU", help="GPUs (default h100 h200)")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    use_no_accelerators()
    rows: list[list[Value]] = []
    for device in given.device:
        for preset in MODELS:
            found = smallest(preset, device)
            none = [PUBLISHED_NAMES[preset], f"none up to {device}:{NODES[-1]}x8", *[None] * (len(COLUMNS) - 2)]
            rows.append(row(*found) if found else none)
            print(rows[-1], flush=True)
    return {"clusters": Table(COLUMNS, rows)}


def smallest(preset: str, device: str) -> tuple[TrainConfig, ProgramReport] | None:
    """Return the smallest cluster on which a step fits, `None` if there is none."""
    for nodes in NODES:
        target = Target.parse(f"{device}:{nodes}x8")
        run = published_run(preset, target, {"parallel": {"system": "exact"}})
        if target.device is None or state_bytes(run, target) * WITH_GRADIENTS > target.device.memory_bytes:
            continue
        with quiet_stderr():
            report = dry_run(run, target)
        if report.fits:
            return run, report
    return None


def state_bytes(run: TrainConfig, target: Target) -> int:
    """Return the bytes of parameters and optimizer state per device, without compiling."""
    source, system = source_of(run.model), make_system(run.parallel)
    programs = make_programs(run, mesh_of(run.parallel, target), system, source.config if source else None)
    shapes = jax.tree.leaves(programs.state_shapes)
    return sum(math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in shapes)


def row(run: TrainConfig, report: ProgramReport) -> list[Value]:
    moved = dict.fromkeys((("data",), ("expert",), ("data", "expert")), 0)
    for one in report.collectives:
        if one.axes in moved:
            moved[one.axes] += one.nbytes
    memory = [nbytes / 1e9 for nbytes in (report.argument_bytes, report.temp_bytes, report.memory_bytes or 0)]
    named = [PUBLISHED_NAMES[run.model.checkpoint or ""], report.target, run.parallel.sizes]
    exchanged = [nbytes / 1e9 for nbytes in moved.values()]
    return [*named, *memory, report.flops_over_ideal or 0, *exchanged, report.host_waits]
