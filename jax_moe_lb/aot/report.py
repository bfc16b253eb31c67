"""Report on one device's share of a compiled program, and its printed form."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.aot.collectives import ExchangeForm, ProgramCollective
from jax_moe_lb.aot.execution_counts import OperationCost
from jax_moe_lb.aot.hlo import Module
from jax_moe_lb.aot.load import LayerLoad
from jax_moe_lb.aot.memory import Buffer
from jax_moe_lb.aot.schedule import ScheduledOperation
from jax_moe_lb.aot.targets import Target
from jax_moe_lb.aot.timeline import Timeline, timeline


@dataclass(frozen=True)
class Operation:
    """One operation of a program, with its memory traffic.

    Args:
        name: Name in the compiled program.
        nbytes: Bytes read from and written to device memory, over all executions.
        times: Number of executions.
        shape: Shape of its first result.
        holds: Name in the traced program.
        source: Python line of its origin.
    """

    name: str
    nbytes: int
    times: int
    shape: str
    holds: str
    source: str

    @classmethod
    def of(cls, module: Module, cost: OperationCost) -> "Operation":
        """Create the entry of an operation from the cost in bytes."""
        one = cost.instruction
        shape = str(one.shapes[0]) if one.shapes else ""
        return cls(one.name, cost.total, cost.times, shape, module.op_name(one), module.source(one))


@dataclass(frozen=True)
class ProgramReport:
    """Memory, work and communication of one device of a target in one run of a program.

    `compile_for` and `compile_layer` return it. All fields are read from the compiled program, which does not run.
    Loops of unknown length count one round.

    Args:
        target: Name of the machine.
        devices: Number of its devices.
        argument_bytes: Bytes of the arguments.
        output_bytes: Bytes of the results, without those aliased with arguments.
        temp_bytes: Bytes of temporaries, including fragmentation.
        peak_bytes: Bytes of the temporaries that live at the peak; the rest of `temp_bytes` is fragmentation.
        memory_bytes: Memory of the device, in bytes; None if unknown.
        buffers: Temporaries that live at the peak, largest first.
        flops: Floating-point operations of all products.
        ideal_flops: Minimum floating-point operations for the program's result; None if unknown.
        hbm_bytes: Bytes read from and written to device memory by all operations.
        operations: Operations with the most memory traffic, largest first.
        collectives: Collectives by kind and mesh axes.
        custom_calls: Number of executions per custom call, by target.
        host_waits: Number of waits of a GPU's host for the GPU and of a GPU for a planner on its host, or of a TPU for
            its host; None if the compiler does not state it.
        compile_s: Seconds of tracing and compilation.
        schedule: Operations in the order of execution, for `timeline`.
    """

    target: str
    devices: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    peak_bytes: int
    memory_bytes: int | None
    buffers: tuple[Buffer, ...]
    flops: int
    ideal_flops: int | None
    hbm_bytes: int
    operations: tuple[Operation, ...]
    collectives: tuple[ProgramCollective, ...]
    custom_calls: dict[str, int]
    host_waits: int | None
    compile_s: float
    schedule: tuple[ScheduledOperation, ...] = field(repr=False, default=())

    @property
    def total_bytes(self) -> int:
        """Bytes of the program on one device: arguments, results and temporaries."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes

    @property
    def fits(self) -> bool | None:
        """True if the program fits into the device's memory; None if its size is unknown."""
        return None if self.memory_bytes is None else self.total_bytes <= self.memory_bytes

    @property
    def flops_over_ideal(self) -> float | None:
        """Ratio of the program's floating-point operations to the ideal; None if the ideal is unknown."""
        return self.flops / self.ideal_flops if self.ideal_flops else None

    def timeline(self, load: LayerLoad | None = None) -> Timeline:
        """Estimate the time of every operation and of the program, which did not run.

        Args:
            load: Load of the layer, which decides the bytes of exchanges. None (default) is a balanced load of full
                buffers.

        Raises:
            ValueError: There are no rates of the target's device in `core/devices`.

        Examples:
            >>> from jax_moe_lb import exact
            >>> from jax_moe_lb.aot import Target, compile_layer, use_no_accelerators
            >>> use_no_accelerators()  # doctest: +SKIP
            >>> compile_layer(exact(), Target.parse("h100:1x8")).timeline().exposed_s  # doctest: +SKIP
        """
        return timeline(self.schedule, Target.parse(self.target), load)

    def to_json(self) -> dict[str, Any]:
        """Convert all fields to a dictionary for `json.dumps`."""
        return asdict(self) | {"fits": self.fits, "flops_over_ideal": self.flops_over_ideal}


MOST_ROWS = 12
"""Maximum number of rows per table; JSON has more."""

LEAST_COLUMNS = 140
"""Minimum width of the console, as required by the widest row."""

NUMBERS = ("bytes", "runs", "ms", "start", "share", "other ms", "difference", "of it communication")
"""Headers of columns with numbers."""

LEAST_SHARE = 0.001
"""Minimum share of the total for a row in a table."""


def print_report(report: ProgramReport, title: str, console: Console | None = None) -> None:
    """Print a report as tables: totals, temporaries, operations and collectives of one device.

    Args:
        report: Report on a compiled program.
        title: Title of the first table.
        console: Console to print to; stdout by default, with at least 140 columns, so that numbers are not truncated.

    Examples:
        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.aot import Target, compile_layer, print_report, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> print_report(compile_layer(exact(), Target.parse("h100:1x8")), "exact")  # doctest: +SKIP
    """
    console = console_of(console, LEAST_COLUMNS)
    caption = f"per device ({report.devices} devices), compiled in {report.compile_s:.0f} s, not run"
    console.print(facts_table(title, _facts(report), caption))
    for table in (_buffers(report), _operations(report), _collectives(report)):
        console.print(table)


def console_of(console: Console | None, least_columns: int) -> Console:
    """Return a console, or that of stdout with at least some columns."""
    if console is None:
        console = Console()
        console.width = max(console.width, least_columns)
    return console


def facts_table(title: str, facts: Iterable[tuple[str, str]], caption: str) -> Table:
    """Return a table with a row per name and value."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.caption, table.caption_justify = caption, "left"
    for name, value in facts:
        table.add_row(name, escape(value))
    return table


def _facts(report: ProgramReport) -> Iterator[tuple[str, str]]:
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
    yield "host waits", "not reported by the compiler" if waits is None else str(waits)
    calls = ", ".join(f"{name} x {count}" for name, count in sorted(report.custom_calls.items()))
    yield "custom calls", calls or "none"


def _buffers(report: ProgramReport) -> Table:
    table = table_of(
        f"temporaries at the peak, {decimal(report.peak_bytes)}",
        ("bytes", "shape", "operation", "source", "instruction"),
    )
    for one in report.buffers[:MOST_ROWS]:
        if one.nbytes >= LEAST_SHARE * report.temp_bytes:
            table.add_row(decimal(one.nbytes), *map(escape, (one.shape, _short(one.holds), one.source, one.name)))
    return table


def _operations(report: ProgramReport) -> Table:
    table = table_of("operations by memory traffic", ("bytes", "runs", "shape", "operation", "source", "instruction"))
    for one in report.operations[:MOST_ROWS]:
        if one.nbytes >= LEAST_SHARE * report.hbm_bytes:
            row = (str(one.times), one.shape, _short(one.holds), one.source, one.name)
            table.add_row(decimal(one.nbytes), *map(escape, row))
    return table


def _collectives(report: ProgramReport) -> Table:
    headers = ("bytes", "runs", "collective", "mesh axes", "updates", "blocks", "path", "asynchronous", "overlaps")
    table = table_of("collectives, with updates and thread blocks per peer", headers)
    for one in report.collectives:
        beside = ", ".join(one.over[:3]) + (" ..." if len(one.over) > 3 else "")
        row = (str(one.count), one.kind, _axes(one), *_form(one.exchange), str(one.asynchronous or "none"), beside)
        table.add_row(decimal(one.nbytes), *map(escape, row))
    return table


def _form(exchange: ExchangeForm | None) -> tuple[str, str, str]:
    if exchange is None:
        return "", "", ""
    blocks = "" if exchange.blocks_per_peer is None else str(exchange.blocks_per_peer)
    return str(exchange.updates_per_peer), blocks, f"{exchange.path}: {exchange.reason}"


def _axes(one: ProgramCollective) -> str:
    if one.axes is None:
        return "other groups"
    return ", ".join(one.axes) or "none: local"


def table_of(title: str, headers: tuple[str, ...]) -> Table:
    """Return a table without rows."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header in NUMBERS else "left", overflow="fold")
    return table


def _short(name: str) -> str:
    """Return the end of a name, which contains the operation."""
    parts = [part for part in name.split("/") if part not in ("shard_map", "eval_jaxpr", "cond", "branch_0_fun")]
    return "/".join(parts[-3:])
