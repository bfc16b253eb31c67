"""`print_report` prints a report for people."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.compiled.collectives import Collective
from jax_moe_lb.compiled.report import Report

MOST_ROWS = 12
"""A table shows so many of the largest; JSON has more."""

LEAST_COLUMNS = 140
"""The widest row needs so many."""

LEAST_SHARE = 0.001
"""What takes less than this share of the whole is left out of a table."""


def print_report(report: Report, title: str, console: Console | None = None) -> None:
    """Prints a report as tables: sums, temporaries, operations and collectives of one device.

    Args:
        report: what was compiled.
        title: what it was, in words.
        console: where to print; stdout by default, in at least 140 columns, so that no number is cut.

    Examples:
        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.compiled import Target, compile_layer, print_report, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> print_report(compile_layer(exact(), Target.parse("h100:1x8")), "exact")  # doctest: +SKIP
    """
    if console is None:
        console = Console()
        console.width = max(console.width, LEAST_COLUMNS)
    for table in (_sums(report, title), _buffers(report), _operations(report), _collectives(report)):
        console.print(table)


def _sums(report: Report, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.caption = f"of each of {report.devices} devices, compiled in {report.compile_s:.0f} s, not run"
    table.caption_justify = "left"
    for name, value in _facts(report):
        table.add_row(name, escape(value))
    return table


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "arguments", decimal(report.argument_bytes)
    yield "results", decimal(report.output_bytes)
    yield "temporaries", decimal(report.temp_bytes)
    if report.memory_bytes is not None:
        parts = f"{decimal(report.total_bytes)} of {decimal(report.memory_bytes)}"
        yield "fits", f"{'yes' if report.fits else 'NO'}: {parts}"
    over = report.flops_over_ideal
    yield "FLOPs", f"{report.flops / 1e12:.3f} T" + (f", {over:.3f} of the ideal" if over is not None else "")
    yield "memory traffic", decimal(report.hbm_bytes)
    waits = report.host_waits
    yield "host waits", "the compiler does not say" if waits is None else str(waits)
    calls = ", ".join(f"{name} x {count}" for name, count in sorted(report.custom_calls.items()))
    yield "custom calls", calls or "none"


def _buffers(report: Report) -> Table:
    table = _table(f"temporaries at the peak, {decimal(report.peak_bytes)}", ("size", "array", "holds", "line", "name"))
    for one in report.buffers[:MOST_ROWS]:
        if one.nbytes >= LEAST_SHARE * report.temp_bytes:
            table.add_row(decimal(one.nbytes), *map(escape, (one.shape, _short(one.holds), one.source, one.name)))
    return table


def _operations(report: Report) -> Table:
    table = _table("operations that move most", ("moved", "runs", "result", "does", "line", "name"))
    for one in report.operations[:MOST_ROWS]:
        if one.nbytes >= LEAST_SHARE * report.hbm_bytes:
            row = (str(one.times), one.shape, _short(one.holds), one.source, one.name)
            table.add_row(decimal(one.nbytes), *map(escape, row))
    return table


def _collectives(report: Report) -> Table:
    table = _table("collectives", ("moved", "runs", "collective", "mesh axes", "asynchronous", "over"))
    for one in report.collectives:
        beside = ", ".join(one.over[:3]) + (" ..." if len(one.over) > 3 else "")
        row = (str(one.count), one.kind, _axes(one), str(one.asynchronous or "none"), beside)
        table.add_row(decimal(one.nbytes), *map(escape, row))
    return table


def _axes(one: Collective) -> str:
    if one.axes is None:
        return "other groups"
    return ", ".join(one.axes) or "none: local"


def _table(title: str, headers: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header in ("size", "moved", "runs") else "left", overflow="fold")
    return table


def _short(name: str) -> str:
    """Leaves the end of a name, where the operation stands."""
    parts = [part for part in name.split("/") if part not in ("shard_map", "eval_jaxpr", "cond", "branch_0_fun")]
    return "/".join(parts[-3:])
