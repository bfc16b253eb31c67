"""Output, errors and shared options of the commands.

Commands print a table, or one JSON object. Bad input gives one line on stderr and an exit code. Numeric options arrive
as text: the message of typer about a bad number depends on its version.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from jax_moe_lb.cli.planning import Effect, mean_effect
from jax_moe_lb.recordings.yaml_file import shown

BAD_INPUT, CANNOT_PRINT = 2, 1

MOST_CHARACTERS = 500
"""A line on stderr has so many characters of a longer message: names and lists of strangers may have any length."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the errors of bad input into one line and `BAD_INPUT`."""
    try:
        yield
    except (ValueError, OSError) as error:
        print_error(str(error))
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def printing() -> Iterator[None]:
    """Ends a command whose stdout takes no more with `CANNOT_PRINT`: in one line, or in none if its reader has gone."""
    try:
        yield
    except OSError as error:
        # The interpreter's last flush must not complain of what is still to be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print_error(f"standard output cannot be written: {error.strerror}; expected room for the answer")
        raise typer.Exit(CANNOT_PRINT) from error


def print_error(message: str) -> None:
    """Prints one line on stderr: without its middle if it is long, and without what a terminal would obey."""
    line = " ".join(message.split())
    if len(line) > MOST_CHARACTERS:
        # What was expected stands at the end.
        line = f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"
    typer.echo(f"error: {''.join(map(_printable, line))}", err=True)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


BalancerOption = Annotated[
    str,
    typer.Option(
        "--balancer",
        metavar="NAME[:KEY=VALUE,...]",
        help="It plans: plain, greedy, exact:eps=0.05, ultraep+rails or another file of balancers/.",
    ),
]
RanksPerDomain = Annotated[
    str | None,
    typer.Option("--ranks-per-domain", metavar="M", help="Ranks among which experts may move; R by default."),
]
SlotsOption = Annotated[
    str | None, typer.Option("--slots", metavar="S", help="Slots per rank; home experts + 2 by default.")
]
ExpertBytes = Annotated[
    str | None, typer.Option("--expert-bytes", metavar="N", help="Show weights moved, at N bytes per expert.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="PLAN.npz", help="Write all plans there, for Plan.load.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


MOST = 10**18
"""No number of an option is larger: an expert of so many bytes, which is the largest that anybody may ask for."""


def positive(argument: str, text: str | None, most: int = MOST) -> int | None:
    """Parses the number of an option, `None` if the option was not given.

    Args:
        argument: the option's name, for the message.
        text: what the user wrote.
        most: the largest number that the option takes.

    Raises:
        ValueError: it is no integer, below 1, or above `most`.
    """
    if text is None:
        return None
    # Without leading zeros; Python refuses to read thousands of digits.
    digits = text.lstrip("0") if text.isdecimal() else ""
    if not digits or len(digits) > len(str(most)) or not 1 <= int(digits) <= most:
        wanted = f"from 1 to {most}" if digits else "at least 1"
        raise ValueError(f"{argument} is {shown(text)}; expected an integer, {wanted}")
    return int(digits)


BAR_AFTER_S = 2.0
"""A user is asked to bear so many seconds without a word."""

MOST_COLUMNS = 1000
"""No table needs more."""

Head = dict[str, str | int]
"""It has the balancer and the sizes, which hold for all rows."""

Item = TypeVar("Item")


def print_effects(
    index: str,
    numbers: Sequence[int],
    effects: Sequence[Effect],
    head: Head,
    expert_bytes: int | None,
    as_json: bool,
) -> None:
    """Prints a row per layer or step, and their mean.

    Args:
        index: what the rows are, "layer" or "step".
        numbers: the number of each row.
        effects: the effect of each row.
        head: what holds for all rows.
        expert_bytes: the bytes of one expert's weights; `None` leaves out what replicas cost.
        as_json: whether to print one object instead of a table.
    """
    mean = mean_effect(effects)
    if as_json:
        rows = [_effect_json(effect, expert_bytes) for effect in effects]
        if index == "step":
            rows = [{"step": number, **row} for number, row in zip(numbers, rows, strict=True)]
        print_json({**head, f"{index}s": rows, "mean": _effect_json(mean, expert_bytes)})
        return
    table = _effect_table(", ".join(f"{name} {value}" for name, value in head.items()), index, expert_bytes is not None)
    for number, effect in zip(numbers, effects, strict=True):
        table.add_row(str(number), *_cells(effect, expert_bytes))
    table.add_section()
    table.add_row("mean", *_cells(mean, expert_bytes))
    print_table(table)


def print_json(value: dict) -> None:
    """Prints one object on one line of stdout."""
    print_text(json.dumps(value))


def print_text(text: str) -> None:
    """Prints a line on stdout, or several."""
    with printing():
        typer.echo(text)


def print_table(table: Table) -> None:
    """Prints a table on stdout, however narrow the terminal: what does not wrap, as numbers, is not cut."""
    console = Console()
    if all(column.no_wrap for column in table.columns):
        needed = Measurement.get(console, console.options.update_width(MOST_COLUMNS), table).maximum
        console.width = max(console.width, needed)
    with printing():
        console.print(table)


def note(message: str | None) -> None:
    """Prints a line on stderr, for what a user should know before a long wait; nothing for `None`."""
    if message is not None:
        typer.echo(f"note: {message}", err=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal's stderr that something is being done, and elsewhere nothing."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


def with_progress(items: Iterable[Item], num_items: int, what: str = "planning") -> Iterator[Item]:
    """Yields the same items, with a bar on a terminal's stderr once they take longer than `BAR_AFTER_S`."""
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True)
    task, start, shown = progress.add_task(what, total=num_items), time.monotonic(), False
    try:
        for item in items:
            yield item
            progress.advance(task)
            # A bar in a file or a pipe would be noise.
            if not shown and console.is_terminal and time.monotonic() - start > BAR_AFTER_S:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()


def _effect_json(effect: Effect, expert_bytes: int | None) -> dict[str, int | float]:
    fields = asdict(effect)
    return fields if expert_bytes is None else {**fields, "weight_bytes": effect.replicas * expert_bytes}


def _effect_table(title: str, index: str, with_bytes: bool) -> Table:
    headers = ("imbalance\nbefore", "\nafter", "straggler\nbefore", "\nafter", "\nreplicas", "max\nfan-out")
    weights = ("weights\nmoved",) if with_bytes else ()
    caption = "imbalance: max / mean of the load; straggler: max - mean, in token copies"
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
