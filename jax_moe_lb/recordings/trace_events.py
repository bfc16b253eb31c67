"""Events of the Trace Event Format, for `ui.perfetto.dev` and `chrome://tracing`. Times are in microseconds."""

from collections.abc import Mapping, Sequence
from typing import Any


def name_event(process: int, name: str, thread: int | None = None) -> dict[str, Any]:
    """Return the event that names a process, or one of the threads."""
    of = {"name": "process_name"} if thread is None else {"name": "thread_name", "tid": thread}
    return {"ph": "M", "pid": process, "args": {"name": name}} | of


def complete_event(
    name: str, category: str, place: tuple[int, int], start_s: float, end_s: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the event of an operation with start and end."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": place[0],
        "tid": place[1],
        "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6,
        "args": dict(args),
    }


def trace(events: Sequence[Mapping[str, Any]], other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a trace for `json.dumps`."""
    found: dict[str, Any] = {"traceEvents": list(events), "displayTimeUnit": "ms"}
    return found if other is None else found | {"otherData": dict(other)}
