"""The trace of a step contains all tasks, and its plot can be drawn."""

import json

import numpy as np
import pytest

from jax_moe_lb.layer import systems
from jax_moe_lb.sim import Cluster, Links, ModelShape, simulate
from jax_moe_lb.sim.trace import LINKS, SHOWN_RANKS, write_png, write_trace


@pytest.fixture
def timeline():
    counts = np.full((16, 16), 8, np.int32)
    counts[1:, 5] = 136
    cluster = Cluster((Links("gpu", 16, 1e9),), planner_s=1e-4)
    return simulate(systems.greedy(), ModelShape(3, 64, 32, 16, 2, 128), cluster, counts).timeline


def test_every_task_is_there_on_every_stream(tmp_path, timeline):
    write_trace(tmp_path / "trace.json", timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    ranks = {event["pid"] for event in spans} - {LINKS}
    assert len(ranks) == SHOWN_RANKS
    computing = [task for task in timeline.tasks if task.streams == ("compute",)]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all(type(event["tid"]) is int and (event["pid"], event["tid"]) in names for event in spans)
    on_compute = [event for event in spans if names[event["pid"], event["tid"]] == "compute"]
    assert len(on_compute) == SHOWN_RANKS * len(computing)
    served = [event["args"] for event in on_compute if event["name"] == "experts"]
    assert {args["rows"] > 0 for args in served} == {True}
    assert max(args["load_over_mean"] for args in served) >= 1
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.end_s * 1e6)
    links = [event for event in spans if event["pid"] == LINKS]
    assert {names[LINKS, event["tid"]] for event in links} == {"gpu links"}
    assert all(event["args"]["busiest_link_bytes"] > 0 for event in links)
    assert {event["cat"] for event in spans} == {"critical", "hidden"}


@pytest.mark.slow
def test_the_picture_is_a_png(tmp_path, timeline):
    write_png(tmp_path / "timeline.png", timeline, "greedy")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
