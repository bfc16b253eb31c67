"""Traces contain every span, and two timelines are compared by stage and by operation."""

import io
import json
import os

import pytest
from rich.console import Console

from jax_moe_lb.aot import Target
from jax_moe_lb.aot.timeline import timeline
from jax_moe_lb.aot.timeline_report import print_difference, print_timeline, read_timeline, write_timeline
from jax_moe_lb.cli.output import print_json
from jax_moe_lb.collectives.exchange_paths import ExchangePath
from tests.aot.scheduled import even_counts, load_of, schedule

TARGET = Target.parse("h100:1x8")


@pytest.fixture(scope="module")
def found():
    return timeline(schedule(), TARGET, load_of(even_counts()))


def printed(print_it, *args):
    console = Console(width=140, file=io.StringIO())
    print_it(*args, console)
    return console.file.getvalue()


@pytest.fixture
def step(found, tmp_path):
    write_timeline(tmp_path / "step.json", found, "a program")
    return tmp_path / "step.json"


def test_a_trace_has_every_span_on_its_stream(found, step):
    events = json.loads(step.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and "tid" in event}
    done = [(names[event["tid"]], event["dur"]) for event in events if event["ph"] == "X"]
    assert done == [(span.stream, pytest.approx(span.seconds * 1e6)) for span in found.spans]
    assert sum(us for stream, us in done if stream == "compute") == pytest.approx(found.total_s * 1e6)


def test_a_timeline_is_read_back(found, step):
    read = read_timeline(step)
    assert (read["title"], read["total_s"], read["stages"]) == ("a program", found.total_s, found.stages())
    assert sum(read["kernels"].values()) == pytest.approx(found.total_s)


def test_tables_tell_total_exposed_and_bounds(found):
    text = printed(print_timeline, found, "a program")
    assert f"{found.total_s * 1e3:.3f} ms" in text
    assert f"{found.exposed_s * 1e3:.3f} ms" in text
    for part in ("a program", "not run", "given", "dispatch", "combine", "launch", "wait for start"):
        assert part in text


def test_a_difference_names_the_stage_and_operation(found, step):
    text = printed(print_difference, found, read_timeline(step))
    differences = [line.split()[-1] for line in text.splitlines() if "+" in line or "-0." in line]
    assert {float(one) for one in differences} == {0.0}
    other = timeline(schedule(path=ExchangePath.SEND_RECEIVE), TARGET, load_of(even_counts()))
    lines = printed(print_difference, other, read_timeline(step)).splitlines()
    combine = other.stages()["combine"] - found.stages()["combine"]
    rows = [line for line in lines if line.strip().startswith("combine")]
    assert [row.split()[-1] for row in rows] == [f"{combine * 1e3:+.3f}"] * 2


OTHERS = ["", "{", "[]", "null", "{}", '{"otherData": {"title": "x"}}', "[" * 10**5, '{"otherData": 1}', "\xff"]


@pytest.mark.parametrize("text", OTHERS)
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"^--against is .*, no timeline; expected a file of --timeline$"):
        read_timeline(path)


@pytest.mark.parametrize("number", ["NaN", "true", "9" * 5000])
def test_sums_that_are_no_numbers_are_refused(number, step):
    found = json.loads(step.read_text())
    found["otherData"]["total_s"] = "number"
    step.write_text(json.dumps(found).replace('"number"', number))
    with pytest.raises(ValueError, match=r"^--against is .*, no timeline; expected a file of --timeline$"):
        read_timeline(step)


def test_json_has_finite_numbers_alone(step):
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"mine": float("nan")})
    # `compile --json` prints other keys of a file, too.
    found = json.loads(step.read_text())
    found["otherData"]["mine"] = [float("inf")]
    step.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"^--against is .*, no timeline; expected a file of --timeline$"):
        read_timeline(step)


def test_a_pipe_and_a_missing_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^--against is .*: not a regular file; expected"):
        read_timeline(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"^--against is .*: No such file or directory; expected a file of --timeline"):
        read_timeline(tmp_path / "nothing.json")
