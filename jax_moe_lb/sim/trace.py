"""Output of a simulated step as a trace for Perfetto or Chrome, or as a PNG timeline."""

import json
from pathlib import Path
from typing import Any

from jax_moe_lb.recordings.trace_events import complete_event, name_event, trace
from jax_moe_lb.sim.events import Task, Timeline

SHOWN_RANKS = 8
"""Maximum number of ranks in a trace, because viewers cannot open a trace of every rank of a large cluster."""

DRAWN_LAYERS = 2
"""Maximum number of layers in a picture."""

LINKS = 1_000_000
"""Process number of the links, which all ranks share; above every rank number."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline to trace events for `ui.perfetto.dev` and `chrome://tracing`."""
    # Each rank is a process, and each of its streams a thread; the links are a process of their own. A trace of many
    # ranks has the first ones and the slowest one. Times are in microseconds, as the format requires.
    critical = {id(task): rank for task, rank in timeline.critical_path()}
    ranks = _shown(timeline)
    events: list[dict[str, Any]] = [name_event(rank, f"rank {rank}") for rank in ranks] + [name_event(LINKS, "links")]
    # The format numbers threads and names them in separate events.
    threads = {
        stream: number for number, stream in enumerate(dict.fromkeys(s for t in timeline.tasks for s in t.streams))
    }
    for stream, number in threads.items():
        processes = [LINKS] if stream.endswith("links") else ranks
        events += [name_event(process, stream, number) for process in processes]
    for task in timeline.tasks:
        for stream in task.streams:
            of_links = stream.endswith("links")
            # All ranks share the links, so show them once.
            for rank in ranks[:1] if of_links else ranks:
                process = LINKS if of_links else rank
                is_critical = id(task) in critical and (of_links or critical[id(task)] == rank)
                events.append(_event(task, threads[stream], rank, process, is_critical))
    return trace(events)


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write `chrome_trace` as JSON."""
    path.write_text(json.dumps(chrome_trace(timeline)))


def write_png(path: Path, timeline: Timeline, title: str) -> None:
    """Draw the forward and backward pass of the first layers on the slowest rank."""
    # matplotlib is optional, and slow to import.
    from matplotlib.figure import Figure

    tasks = [task for task in timeline.tasks if task.layer < DRAWN_LAYERS]
    rank = _slowest(timeline)
    streams = list(dict.fromkeys(stream for task in tasks for stream in task.streams))
    stages = list(dict.fromkeys(task.stage.split(" ")[0] for task in tasks))
    halves = [part for part in _halves(tasks) if part]
    figure = Figure(figsize=(12, 0.5 * len(streams) * len(halves) + 2.0), layout="constrained")
    for axes, part in zip(figure.subplots(len(halves), squeeze=False)[:, 0], halves, strict=True):
        for task in part:
            start, end = float(task.start[rank]) * 1e3, float(task.end[rank]) * 1e3
            color = f"C{stages.index(task.stage.split(' ')[0])}"
            for stream in task.streams:
                axes.barh(streams.index(stream), end - start, left=start, color=color, edgecolor="white", linewidth=0.5)
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
        axes.set_xlabel("ms")
    bars: list[Any] = [figure.axes[0].barh(0, 0, color=f"C{number}") for number in range(len(stages))]
    figure.legend(bars, stages, loc="outside lower center", ncols=len(stages))
    last = max(task.layer for task in tasks)
    figure.suptitle(f"{title}: layers 0 to {last} on rank {rank}, forward and backward")
    with path.open("wb") as file:
        # Write to an open file, because matplotlib appends a suffix to a path without one.
        figure.savefig(file, dpi=120, format=path.suffix.removeprefix(".") or "png")


def _halves(tasks: list[Task]) -> tuple[list[Task], list[Task]]:
    forward = [task for task in tasks if "backward" not in task.stage and task.layer >= 0]
    return forward, [task for task in tasks if "backward" in task.stage]


def _shown(timeline: Timeline) -> list[int]:
    first, slowest = list(range(min(timeline.num_ranks, SHOWN_RANKS))), _slowest(timeline)
    return first if slowest in first else [*first[:-1], slowest]


def _slowest(timeline: Timeline) -> int:
    busy = sum((task.end - task.start for task in timeline.tasks if "compute" in task.streams), start=0.0)
    return int(busy.argmax()) if timeline.tasks else 0  # type: ignore[union-attr]


def _event(task: Task, thread: int, rank: int, process: int, is_critical: bool) -> dict[str, Any]:
    start, end = float(task.start[rank]), float(task.end[rank])
    args: dict[str, Any] = {"layer": task.layer}
    if task.flow is not None:
        args["busiest_link_bytes"] = max(float(sent.max(initial=0)) for sent in task.flow.sent)
    if task.rows is not None:
        # A single entry stands for all ranks.
        rows = float(task.rows[min(rank, len(task.rows) - 1)])
        args |= {"rows": rows, "load_over_mean": rows / max(float(task.rows.mean()), 1e-9)}
    category = "critical" if is_critical else "hidden"
    return complete_event(task.stage, category, (process, thread), start, end, args)
