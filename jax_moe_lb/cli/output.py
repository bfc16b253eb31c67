"""Output, errors and shared options of the commands.

Commands print a table or one JSON object. Bad input prints one line on stderr and sets the exit code. Numeric options
are parsed from text here, because the messages of typer depend on the version.
"""

import errno
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperCommand

from jax_moe_lb.cli.planning import Effect, mean_effect
from jax_moe_lb.core.checks import Least, shown
from jax_moe_lb.core.file_limits import MOST_FACTOR, FileLimits
from jax_moe_lb.core.topology import INT32_MAX

BAD_INPUT, CANNOT_PRINT = 2, 1

MOST_CHARACTERS = 500
"""Maximum characters of a line on stderr; a longer message loses its middle, since file contents have any length."""


@contextmanager
def one_line_errors(**options: str | None) -> Iterator[None]:
    """Report a ValueError or OSError as one line on stderr and exit with `BAD_INPUT`."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
        field = message.partition(" is ")[0].rpartition(".")[2]  # such as Topology.ranks_per_domain
        # Options of sizes have their unit in the value.
        name = field.removesuffix("_bytes")
        if options.get(name) is not None:
            message = f"--{name.replace('_', '-')}{message.partition(field)[2]}"
        print_error(message)
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def printing() -> Iterator[None]:
    """Exit with `CANNOT_PRINT` if stdout cannot be written: silently after a broken pipe, else with one line."""
    try:
        yield
    except OSError as error:
        # Redirect stdout, or the interpreter's final flush fails on buffered output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print_error(f"standard output cannot be written: {error.strerror}; expected room for the answer")
        raise typer.Exit(CANNOT_PRINT) from error


def print_error(message: str) -> None:
    """Print one line on stderr, with control characters escaped and the middle of a long message removed."""
    line = " ".join(message.split())
    if len(line) > MOST_CHARACTERS:
        # Keep the end, which has the expected value.
        line = f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"
    typer.echo(f"error: {''.join(map(_printable, line))}", err=True)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


KINDS = {
    ".npz": (b"PK",),
    ".png": (b"\x89PNG",),
    ".json": (b'{"traceEvents"', b'{"displayTimeUnit"'),
    ".yaml": (b"# Measured by `jax-moe-lb calibrate`",),
    ".py": (b"# Written by `jax-moe-lb advise`",),
}
"""First bytes of the output files that a command replaces, by suffix; it replaces no file of another suffix."""


@dataclass(frozen=True)
class OutputPath:
    """Mark of an option with the path of an output, in the annotation; all other options are inputs."""

    suffix: str = ""  # suffix of the file; empty (default) for a folder


class CheckedCommand(TyperCommand):
    """Command that refuses outputs which are inputs, or which would replace a file of another kind, before it runs."""

    # Every value of an option without `OutputPath` that names a file is an input.

    @property
    def outputs(self) -> dict[str, OutputPath]:
        """Marks of the options with paths of outputs, by parameter."""
        function: Any = self.callback
        annotations = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
        marks = ((name, mark) for name, kind in annotations.items() for mark in getattr(kind, "__metadata__", ()))
        return {name: mark for name, mark in marks if isinstance(mark, OutputPath)}

    def invoke(self, ctx: Any) -> Any:
        """Check the paths, then run the command."""
        inputs, outputs, marks = [], [], self.outputs
        for parameter in self.params:
            name = parameter.opts[-1]
            name = name if name.startswith("-") else (parameter.metavar or name).partition(".")[0]
            value = ctx.params.get(parameter.name)
            texts = [str(text) for text in (value if isinstance(value, list | tuple) else [value]) if text is not None]
            if mark := marks.get(parameter.name):
                outputs += [(name, Path(text), mark.suffix) for text in texts]
            else:
                inputs += [(name, Path(part)) for text in texts for part in path_texts(text)]
        try:
            check_outputs(inputs, outputs)
        except (OSError, ValueError) as error:
            print_error(str(error))
            raise typer.Exit(BAD_INPUT) from error
        return super().invoke(ctx)


def path_texts(text: str) -> list[str]:
    """Return the parts of a value that may be a path: the whole, PATH:WEIGHT and KEY=PATH."""
    parts = {text, text.rpartition(":")[0], text.partition("=")[2]} - {""}
    return [part for part in sorted(parts) if os.path.lexists(part)]


def check_outputs(inputs: Sequence[tuple[str, Path]], outputs: Sequence[tuple[str, Path, str]]) -> None:
    """Check that outputs are no inputs, differ, have a folder, and replace no file of another kind."""
    # Call it before any input is read.
    for at, (name, path, suffix) in enumerate(outputs):
        for other, given in [*inputs, *((other, earlier) for other, earlier, _ in outputs[:at])]:
            if _is_same_file(path, given):
                raise ValueError(
                    f"{name} is {path}; expected another path than {other} {given}, which it would replace"
                )
        if suffix and os.path.isfile(path) and not _is_of_kind(path, suffix):
            raise ValueError(f"{name} is {path}, an existing file; expected a new file, or a {suffix} file to replace")
        # A command may take minutes before it writes.
        if suffix and (os.path.isdir(path) or not os.path.isdir(path.absolute().parent)):
            reason = os.strerror(errno.EISDIR if os.path.isdir(path) else errno.ENOENT)
            raise ValueError(f"{name} is {path}: {reason}; expected a writable file")


def _is_same_file(path: Path, given: Path) -> bool:
    # The functions of `os.path` return False for a name that is too long, where those of `Path` raise.
    if not os.path.exists(path) or not os.path.exists(given):
        return os.path.realpath(path) == os.path.realpath(given)
    if path.samefile(given):
        return path.is_file() or path.is_dir()  # A device may be both.
    if not (path.is_file() and given.is_dir()):
        return False
    inside = Path(os.path.realpath(given)) in Path(os.path.realpath(path)).parents
    # A hard link has its other names anywhere.
    is_linked = path.stat().st_nlink > 1
    return inside or (is_linked and any(file.samefile(path) for file in given.rglob("*") if file.is_file()))


def _is_of_kind(path: Path, suffix: str) -> bool:
    """Return whether an existing file is empty, or has the suffix and the first bytes of an output."""
    with path.open("rb") as file:
        begin = file.read(64)
    is_named = path.suffix in ("", suffix, suffix.replace(".yaml", ".yml"))
    return not begin or (is_named and begin.startswith(KINDS.get(suffix, ())))


def option(name: str, metavar: str, text: str, default: str | None = None) -> Any:
    """Return the declaration of an option with a value, and with the text shown as the default."""
    return typer.Option(name, metavar=metavar, help=text, show_default=default or True)


BalancerOption = Annotated[
    str,
    option(
        "--balancer",
        "NAME[:KEY=VALUE]",
        "Balancer with options, such as exact:eps=0.05 or ultraep+rails; doctor lists the names.",
    ),
]
RanksPerDomain = Annotated[
    str | None, option("--ranks-per-domain", "M", "Ranks per replication domain.", "all ranks in one domain")
]
ReplicaSlots = Annotated[str | None, option("--replica-slots", "N", "Replica slots per rank.", "2")]
SystemReplicaSlots = Annotated[str | None, option("--replica-slots", "N", "Replica slots per rank.", "from the system")]
ExpertBytes = Annotated[str | None, option("--expert-bytes", "N", "Bytes of one expert, to show the weights moved.")]
Out = Annotated[
    Path | None, option("--out", "PLAN.npz", "Output file of all plans, for Plan.load."), OutputPath(".npz")
]
FileLimitsOption = Annotated[str | None, option("--file-limits", "N", "Factor on the size limits of input files.", "1")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


MAX_INTEGER = 10**18
"""Largest integer of an option: the bytes of one expert."""


def parse_integer(argument: str, text: str | None, most: int = MAX_INTEGER, *, least: int = 1) -> int | None:
    """Parse the integer of an option."""
    if text is None:
        return None
    # Python refuses to convert thousands of digits, so count them without leading zeros first.
    digits = (text.lstrip("0") or "0") if text.isdecimal() else ""
    if not digits or len(digits) > len(str(most)) or not least <= int(digits) <= most:
        wanted = f"from {least} to {most}" if digits not in ("", "0") else f"at least {least}"
        raise ValueError(f"{argument} is {shown(text)}; expected an integer, {wanted}")
    return int(digits)


def parse_number(argument: str, text: str, least: Least) -> float:
    """Parse the finite number of an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least.admits(value) and value < math.inf):
        raise ValueError(f"{argument} is {shown(text)}; expected a number{' ' if least.excluded else ', '}{least}")
    return value


def parse_limits(text: str | None) -> FileLimits:
    """Return the limits of input files, multiplied by the factor of `--file-limits` if it is given."""
    return FileLimits().scaled(parse_integer("--file-limits", text, MOST_FACTOR) or 1)


def parse_replica_slots(text: str | None, given: int | None, num_experts: int, num_home: int) -> int | None:
    """Parse the replica slots per rank of the option, or check those of a configuration file."""
    name, wanted = "replica_slots", given
    if text is not None:
        name = "--replica-slots"
        wanted = parse_integer(name, text, INT32_MAX, least=0)
    most = num_experts - num_home
    if wanted is not None and wanted > most:
        raise ValueError(f"{name} is {wanted}; expected at most {most}, the experts without a home on the rank")
    return wanted


BAR_AFTER_S = 2.0
"""Seconds before a progress bar appears."""

MOST_COLUMNS = 1000
"""Upper bound of the width of a table, in characters."""

Head = dict[str, str | int]
"""Balancer and sizes common to all rows."""

Item = TypeVar("Item")


def print_effects(
    index: str,
    numbers: Sequence[int],
    effects: Sequence[Effect],
    head: Head,
    no_op_reason: str | None,
    expert_bytes: int | None,
    as_json: bool,
) -> None:
    """Print one row per layer or step, and the mean."""
    mean = mean_effect(effects)
    if as_json:
        rows = [_effect_json(effect, expert_bytes) for effect in effects]
        if index == "step":
            rows = [{"step": number, **row} for number, row in zip(numbers, rows, strict=True)]
        mean_row = _effect_json(mean, expert_bytes)
        print_json({**head, "no_op_reason": no_op_reason, f"{index}s": rows, "mean": mean_row})
        return
    title = ", ".join(f"{name} {value}" for name, value in head.items())
    table = _effect_table(title, index, expert_bytes is not None, no_op_reason)
    for number, effect in zip(numbers, effects, strict=True):
        table.add_row(str(number), *_cells(effect, expert_bytes))
    table.add_section()
    table.add_row("mean", *_cells(mean, expert_bytes))
    print_table(table)


def print_json(value: dict) -> None:
    """Print one JSON object on one line of stdout."""
    print_text(json.dumps(value, allow_nan=False))


def print_text(text: str) -> None:
    """Print text on stdout."""
    with printing():
        typer.echo(text)


def print_table(table: Table) -> None:
    """Print a table on stdout; columns without wrapping keep their width on a narrow terminal."""
    console = Console()
    if all(column.no_wrap for column in table.columns):
        needed = Measurement.get(console, console.options.update_width(MOST_COLUMNS), table).maximum
        console.width = max(console.width, needed)
    with printing():
        console.print(table)


def note(message: str | None) -> None:
    """Print a note on stderr, such as the expected duration, unless it is `None`."""
    if message is not None:
        typer.echo(f"note: {message}", err=True)


@contextmanager
def working(label: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr while the block runs, if stderr is a terminal; yield a function adding text to it."""
    # The text appears after `BAR_AFTER_S` seconds.
    console, start = Console(stderr=True), time.monotonic()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(label) as status:

        def tell(text: str) -> None:
            if time.monotonic() - start > BAR_AFTER_S:
                status.update(f"{label}: {text}")

        yield tell


def with_progress(items: Iterable[Item], num_items: int, label: str = "planning") -> Iterator[Item]:
    """Yield the items, with a progress bar on stderr after `BAR_AFTER_S` seconds if stderr is a terminal."""
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True)
    task, start, shown = progress.add_task(label, total=num_items), time.monotonic(), False
    try:
        for item in items:
            yield item
            progress.advance(task)
            # Files and pipes get no bar.
            if not shown and console.is_terminal and time.monotonic() - start > BAR_AFTER_S:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()


def _effect_json(effect: Effect, expert_bytes: int | None) -> dict[str, int | float]:
    fields = asdict(effect)
    return fields if expert_bytes is None else {**fields, "weight_bytes": effect.replicas * expert_bytes}


def _effect_table(title: str, index: str, with_bytes: bool, no_op_reason: str | None) -> Table:
    headers = ("imbalance\nbefore", "\nafter", "straggler\nbefore", "\nafter", "\nreplicas", "max\nfan-out")
    weights = ("weights\nmoved",) if with_bytes else ()
    caption = "imbalance: max / mean of the ranks' load; straggler: max - mean, in token copies"
    caption += f"\nno plan changes the load: {no_op_reason}" if no_op_reason else ""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.box, table.pad_edge = SIMPLE_HEAD, False
    for header in (f"\n{index}", *headers, *weights, "planner\n(us)"):
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _cells(effect: Effect, expert_bytes: int | None) -> list[str]:
    cells = [
        f"{effect.imbalance_before:.3f}",
        f"{effect.imbalance_after:.3f}",
        f"{effect.straggler_before:.1f}",
        f"{effect.straggler_after:.1f}",
        f"{effect.replicas:.1f}".removesuffix(".0"),
        f"{effect.max_fan_out:.1f}".removesuffix(".0"),
    ]
    if expert_bytes is not None:
        cells.append(decimal(round(effect.replicas * expert_bytes)))
    return [*cells, f"{effect.planner_us:.0f}"]
