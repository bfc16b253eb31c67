"""Find the smallest cluster that can train each published model: `python -m models.dry_run.smallest_cluster`.

The program compiles a training step for clusters of increasing size until one fits, without running it. It requires the
compilers installed by `ci/accelerators.sh`, and takes about a minute per compilation.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import jax
import typer

from jax_moe_lb.aot import ProgramReport, Target, quiet_stderr, use_no_accelerators
from jax_moe_lb.cli.output import CheckedCommand
from models.console import USER_ERRORS, say
from models.dry_run.step import PublishedRun, mesh_of
from models.mesh import make_system
from models.training.source import PUBLISHED_NAMES, source_of
from models.training.step import make_programs

NODES = (1, 2, 4, 8, 16, 32, 64)
"""Cluster sizes to try, in nodes of eight GPUs."""

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
"""Ratio of state with gradients to state without: parameters and two moments, plus gradients of the parameters'
size.
"""

MODEL = f"Published model: {', '.join(PUBLISHED_NAMES)}; repeatable."

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def smallest(preset: str, device: str, system: str) -> tuple[PublishedRun, ProgramReport] | None:
    """Return the smallest cluster on which a step fits, `None` if there is none."""
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
    """Return the bytes of parameters and optimizer state per device, without compiling."""
    source, parallel = source_of(run.train.model), run.train.parallel
    programs = make_programs(
        run.train, mesh_of(parallel, target), make_system(parallel), source.config if source else None
    )
    shapes = jax.tree.leaves(programs.state_shapes)
    return sum(math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize for one in shapes)


def row(run: PublishedRun, report: ProgramReport) -> tuple[str, ...]:
    """Format a result as the cells of `COLUMNS`."""
    parallel = run.train.parallel
    moved = dict.fromkeys((("data",), ("expert",), ("data", "expert")), 0)
    for one in report.collectives:
        if one.axes in moved:
            moved[one.axes] += one.nbytes
    return (
        run.name,
        report.target,
        parallel.sizes,
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


@app.command(cls=CheckedCommand)
def main(
    device: Annotated[list[str] | None, typer.Option(help="GPU name, such as h100 or h200; repeatable.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=MODEL)] = None,
    system: Annotated[str, typer.Option(help="Load-balancing system.")] = "exact",
) -> None:
    """Print a Markdown table for one sequence of 4096 tokens per device."""
    try:
        if unknown := set(model or ()) - PUBLISHED_NAMES.keys():
            raise ValueError(f"model is {min(unknown)!r}; expected one of {', '.join(PUBLISHED_NAMES)}")
        use_no_accelerators()
        print(_line(COLUMNS), _line("---" for _ in COLUMNS), sep="\n", flush=True)
        for kind in device or ("h100", "h200"):
            for preset in model or PUBLISHED_NAMES:
                found = smallest(preset, kind, system)
                none = (PUBLISHED_NAMES[preset], f"none up to {kind}:{NODES[-1]}x8", *[""] * (len(COLUMNS) - 2))
                print(_line(row(*found) if found else none), flush=True)
    except ValueError as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERRORS) from error


if __name__ == "__main__":
    app()
