"""This program finds the smallest cluster that trains each published model: `python -m
models.dry_run.smallest_cluster`.

It compiles a step for one cluster after the other until one fits. Nothing is run; it needs the compilers that
`ci/accelerators.sh` installs, and takes about a minute for each program.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import jax
import typer

from jax_moe_lb.aot import ProgramReport, Target, quiet_stderr, use_no_accelerators
from models.config import USER_ERRORS, say
from models.dry_run.step import PRESETS, PublishedRun, mesh_of

NODES = (1, 2, 4, 8, 16, 32, 64)
"""Clusters have so many nodes of eight GPUs."""

COLUMNS = (
    "model",
    "smallest cluster",
    "data x expert",
    "arguments",
    "temporaries",
    "of",
    "FLOPs / ideal",
    "over `data`",
    "over `expert`",
    "over both",
    "host waits",
)

WITH_GRADIENTS = 4 / 3
"""Parameters and two moments are the arguments; gradients, which are as large as the parameters, are temporaries."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def smallest(preset: str, device: str, system: str) -> tuple[PublishedRun, ProgramReport] | None:
    """Find the first of the clusters on which a step fits, `None` if there is none.

    Args:
        preset: a key of `PRESETS`.
        device: what its GPUs are, such as `h100`.
        system: the name of the system.

    Raises:
        ValueError: there is no such device or system, or its compiler is not installed.
    """
    for nodes in NODES:
        target = Target.parse(f"{device}:{nodes}x8")
        run = PublishedRun.on(preset, target, {"parallel": {"system": system}})
        if target.device is None or state_bytes(run, target) * WITH_GRADIENTS > target.device.memory_bytes:
            continue
        with quiet_stderr():
            report = run.compile(target)
        if report.fits:
            return run, report
    return None


def state_bytes(run: PublishedRun, target: Target) -> int:
    """Count what a device holds of parameters and optimizer state, compiling nothing."""
    shapes = jax.tree.leaves(run.programs(mesh_of(run.train.parallel, target)).state_shapes)
    return sum(math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in shapes)


def row(run: PublishedRun, report: ProgramReport) -> tuple[str, ...]:
    """Write what came out as the cells of `COLUMNS`."""
    parallel = run.train.parallel
    moved = dict.fromkeys((("data",), ("expert",), ("data", "expert")), 0)
    for one in report.collectives:
        if one.axes in moved:
            moved[one.axes] += one.nbytes
    return (
        run.name,
        report.target,
        f"{parallel.data_parallel} x {parallel.expert_parallel}",
        _gb(report.argument_bytes),
        _gb(report.temp_bytes),
        _gb(report.memory_bytes or 0),
        f"{report.flops_over_ideal or 0:.2f}",
        *map(_gb, moved.values()),
        str(report.host_waits),
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


@app.command()
def main(
    device: Annotated[list[str] | None, typer.Option(help="h100, h200 or the like; may be repeated.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PRESETS)}; may be repeated.")] = None,
    system: Annotated[str, typer.Option(help="Who balances the load.")] = "exact",
) -> None:
    """Print a table in Markdown, of one sequence of 4096 tokens per device."""
    try:
        if unknown := set(model or ()) - PRESETS.keys():
            raise ValueError(f"model is {min(unknown)!r}; expected one of {', '.join(PRESETS)}")
        use_no_accelerators()
        print(_line(COLUMNS), _line("---" for _ in COLUMNS), sep="\n", flush=True)
        for kind in device or ("h100", "h200"):
            for preset in model or PRESETS:
                found = smallest(preset, kind, system)
                none = (PRESETS[preset], f"none up to {kind}:{NODES[-1]}x8", *[""] * (len(COLUMNS) - 2))
                print(_line(row(*found) if found else none), flush=True)
    except ValueError as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
