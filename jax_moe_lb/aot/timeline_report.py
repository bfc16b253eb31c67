"""Timelines as tables and as trace files, and the difference of two timelines."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_moe_lb.aot.report import console_of, facts_table, table_of
from jax_moe_lb.aot.timeline import WAIT, Span, Timeline
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import LimitError, open_regular
from jax_moe_lb.recordings.trace_events import complete_event, name_event, trace

MOST_KERNELS = 16
"""Rows of the table of operations; the trace has all."""

MOST_BYTES = 2**28
"""Maximum size of a trace file to read."""

COLUMNS = 120

NOTE = "estimated from the compiled program, not run"


def write_timeline(path: Path, timeline: Timeline, title: str) -> None:
    """Write a trace for `ui.perfetto.dev` and `chrome://tracing`; `read_timeline` reads it.

    Args:
        path: JSON file to write.
        timeline: Timeline of a program.
        title: Name of the program.

    Examples:
        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.aot import Target, compile_layer, write_timeline, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> found = compile_layer(exact(), Target.parse("h100:1x8")).timeline()  # doctest: +SKIP
        >>> write_timeline(Path("step.json"), found, "exact")  # doctest: +SKIP
    """
    streams = {stream: number for number, stream in enumerate(dict.fromkeys(span.stream for span in timeline.spans))}
    events = [name_event(0, title), *(name_event(0, stream, number) for stream, number in streams.items())]
    for span in timeline.spans:
        args = {"stage": span.stage, "kind": span.kind.value, "bound": span.bound, "times": span.times}
        events.append(
            complete_event(
                f"{span.stage}: {span.name}", span.kind.value, (0, streams[span.stream]), span.start_s, span.end_s, args
            )
        )
    path.write_text(json.dumps(trace(events, summary(timeline, title))))


def summary(timeline: Timeline, title: str) -> dict[str, Any]:
    """Return the sums of a timeline for `json.dumps`, which `--against` compares."""
    return {
        "title": title,
        "note": NOTE,
        "load": timeline.load,
        "total_s": timeline.total_s,
        "exposed_s": timeline.exposed_s,
        "stages": timeline.stages(),
        "kernels": kernels(timeline),
    }


def kernels(timeline: Timeline) -> dict[str, float]:
    """Sum the seconds of the compute stream by stage and operation, without the numbers of instructions."""
    found: dict[str, float] = {}
    for span in timeline.compute:
        name = _label(span)
        found[name] = found.get(name, 0.0) + span.seconds
    return found


def _label(span: Span) -> str:
    # Numbers of instructions differ between programs.
    return f"{span.stage}: {re.sub(r'[._]?[0-9.]+$', '', span.name)}"


def read_timeline(path: Path) -> dict[str, Any]:
    """Read the sums of a file of `write_timeline`."""
    expected = "expected a file of --timeline"
    try:
        # Opening a pipe would wait for a writer.
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise LimitError(f"more than {MOST_BYTES} bytes")
        found = json.loads(content)["otherData"]
        sums = [found["total_s"], found["exposed_s"], *found["stages"].values(), *found["kernels"].values()]
        if not all(type(one) in (int, float) and math.isfinite(one) for one in sums):
            raise TypeError
        if not isinstance(found["title"], str):
            raise TypeError
        json.dumps(found, allow_nan=False)
    except OSError as error:
        raise ValueError(f"--against is {path}: {error.strerror or error}; {expected}") from error
    except LimitError as error:
        raise ValueError(f"--against is {path}: {error}; {expected}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"--against is {shown(str(path))}, no timeline; {expected}") from error
    return found


def print_timeline(timeline: Timeline, title: str, console: Console | None = None) -> None:
    """Print total, exposed communication, stages and the longest operations.

    Args:
        timeline: Timeline of a program.
        title: Title of the first table.
        console: Console to print to; stdout by default, with at least 120 columns.

    Examples:
        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.aot import Target, compile_layer, print_timeline, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> found = compile_layer(exact(), Target.parse("h100:1x8")).timeline()  # doctest: +SKIP
        >>> print_timeline(found, "exact")  # doctest: +SKIP
    """
    console = console_of(console, COLUMNS)
    console.print(facts_table(f"timeline: {title}", _sums(timeline), NOTE))
    for table in (_stages(timeline), _operations(timeline)):
        console.print(table)


def print_difference(timeline: Timeline, other: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the difference of a timeline to another one, by stage and by operation."""
    console = console_of(console, COLUMNS)
    title = f"against {other['title']}"
    sums = {"total": timeline.total_s, "exposed communication": timeline.exposed_s}
    before = {"total": other["total_s"], "exposed communication": other["exposed_s"]}
    console.print(_compared(title, "time", sums, before, sums))
    stages = timeline.stages()
    console.print(_compared("stages", "stage", stages, other["stages"], _largest(stages, other["stages"])))
    mine = kernels(timeline)
    changed = list(_largest(mine, other["kernels"]))[:MOST_KERNELS]
    console.print(_compared("operations that differ most", "operation", mine, other["kernels"], changed))


def _largest(mine: Mapping[str, float], others: Mapping[str, float]) -> list[str]:
    """Return the names by the size of the difference."""
    names = dict.fromkeys((*mine, *others))
    return sorted(names, key=lambda name: -abs(mine.get(name, 0.0) - others.get(name, 0.0)))


def _compared(
    title: str, column: str, mine: Mapping[str, float], others: Mapping[str, float], names: Iterable[str]
) -> Table:
    table = table_of(title, (column, "ms", "other ms", "difference"))
    for name in names:
        here, there = mine.get(name, 0.0), others.get(name, 0.0)
        table.add_row(escape(name), _ms(here), _ms(there), f"{(here - there) * 1e3:+.3f}")
    return table


def _sums(timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield "total", f"{_ms(timeline.total_s)} ms"
    share = timeline.exposed_s / max(timeline.total_s, 1e-12)
    yield "exposed communication", f"{_ms(timeline.exposed_s)} ms, {share:.0%}"
    yield "hidden communication", f"{_ms(timeline.hidden_s)} ms"
    yield "load", f"{timeline.load}, rounds of the receive buffer: {timeline.rounds}"
    bounds = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in timeline.bounds().items())
    yield "bound by, in ms", bounds or "nothing"


def _stages(timeline: Timeline) -> Table:
    table = table_of("stages of the compute stream", ("stage", "ms", "share", "of it communication"))
    exposed: dict[str, float] = {}
    for span in timeline.compute:
        if span.is_communication:
            exposed[span.stage] = exposed.get(span.stage, 0.0) + span.seconds
    for stage, seconds in timeline.stages().items():
        row = (_ms(seconds), f"{seconds / timeline.total_s:.1%}", _ms(exposed.get(stage, 0.0)))
        table.add_row(escape(stage), *row)
    return table


def _operations(timeline: Timeline) -> Table:
    table = table_of("longest operations", ("ms", "runs", "start", "stream", "bound", "stage", "operation"))
    longest = sorted(timeline.spans, key=lambda span: -span.seconds)[:MOST_KERNELS]
    for span in longest:
        stream = "compute, waits" if span.name.startswith(WAIT) else span.stream
        row = (_ms(span.seconds), str(span.times), _ms(span.start_s), stream, span.bound, span.stage, span.name)
        table.add_row(*map(escape, row))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
