"""One command runs every benchmark, or reports why not."""

import argparse
import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.reliability import __main__ as reliability
from benchmarks.render.commands import names_of
from benchmarks.render.documents import RESULTS
from benchmarks.render.html_report import write_report
from benchmarks.render.results import Table, read, save
from benchmarks.reproduce import RUNS, Pace, Seconds, _compilers

HERE = Path(benchmarks.__file__).parent
PLAIN = argparse.Namespace(quick=False, loads=None, only=[])


def test_every_benchmark_is_in_the_list():
    subjects = [path.parent for path in HERE.glob("*/__main__.py") if names_of(path.parent)]
    found = {f"{folder.name}.{name}" for folder in subjects for name in names_of(folder)}
    assert {one.module for one in RUNS} == found | {f"reliability.{name}" for name in reliability.RUNS}


def test_no_two_results_have_one_name():
    names = [one.name for one in RUNS]
    assert len(names) == len(set(names))


def test_every_result_is_in_the_file_of_its_benchmark():
    runs = {one.name: one for one in RUNS}
    for path in RESULTS.glob("*.json"):
        for name in read(path):
            if one := runs.get(name):
                assert one.file == path.stem


def test_recorded_loads_are_asked_for():
    (relocation,) = (one for one in RUNS if one.name == "relocation")
    assert "--loads" in relocation.why_not(PLAIN)
    given = argparse.Namespace(quick=False, loads=Path("there"), only=[])
    assert relocation.why_not(given) is None
    assert relocation.command(given)[-4:] == ["--loads", "there", "--groups", "8"]


def test_what_takes_long_runs_if_it_is_named():
    (codec,) = (one for one in RUNS if one.name == "codec")
    assert "--only" in codec.why_not(PLAIN)
    assert codec.why_not(argparse.Namespace(quick=False, loads=None, only=["codec"])) is None


def test_all_benchmarks_without_a_name_end_in_forty_minutes():
    """Those with compilers of accelerators are left out of an installation for CPUs."""
    loads = argparse.Namespace(quick=False, loads=Path("there"), only=[])
    pace = Pace("full", [one.name for one in RUNS if one.refusal is not _compilers and one.why_not(loads) is None])
    assert set(pace.names) <= pace.known.keys()
    assert pace.left_s() < 40 * 60


def test_the_report_has_tables_plots_and_what_was_left_out(tmp_path):
    rows = [["a", 2.0, 2.2, 10.0], ["b", 4.0, 3.0, -25.0]]
    columns = {"": "", "published, s": ".4g", "simulated, s": ".4g", "deviation, %": "+.1f"}
    save(
        {"one": Table(columns, rows, "A & B"), "zipf": Table({"system": "", "imbalance": ".2f"}, [["x", [1.5, 1, 2]]])},
        tmp_path / "systems.json",
    )
    page = write_report(tmp_path, tmp_path / "report.html", {"bench_y": "left out: there is no GPU"}).read_text()
    # Two plots, and the logo.
    assert page.count("<svg") == 3
    assert "A &amp; B" in page
    assert "left out: there is no GPU" in page
    assert "1.50 (1.00-2.00)" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


@pytest.fixture
def pace(tmp_path):
    """Two benchmarks: one that waited for a busy machine, and one on two cores."""
    file = tmp_path / "seconds.json"
    file.write_text(json.dumps({"full": {"a": [100.0, 80.0], "b": [40.0, 90.0]}, "quick": {"a": [1.0, 1.0]}}))
    return Pace("full", ["a", "b"], file)


def test_the_time_left_follows_the_pace_of_this_run(pace):
    assert (pace.expected_s("a"), pace.expected_s("b"), pace.left_s()) == (80.0, 40.0, 120.0)
    pace.end("a", Seconds(160.0, 80.0))
    # Everything takes twice as long as before.
    assert pace.left_s() == 80.0
    pace.leave_out("b")
    assert pace.left_s() == 0.0


def test_the_times_of_a_run_are_kept_for_the_next_one(pace):
    pace.end("a", Seconds(60.0, 50.0))
    pace.end("b", None)
    again = Pace("full", ["a", "b", "new"], pace.file)
    assert again.known == {"a": (60.0, 50.0), "b": (40.0, 90.0)}
    assert Pace("quick", ["a"], pace.file).known == {"a": (1.0, 1.0)}
    assert again.table().rows[-1] == ["all of these", 100.0, 140.0]
    assert "new" in again.table().notes[0]
