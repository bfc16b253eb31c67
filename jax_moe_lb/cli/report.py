"""The commands print a table for people, or one JSON object for programs."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from jax_moe_lb.cli.errors import printing
from jax_moe_lb.cli.planning import Effect, mean_effect

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
