"""One command runs every benchmark, or reports why not."""

import argparse
from pathlib import Path

import benchmarks
from benchmarks.reliability import __main__ as reliability
from benchmarks.render.commands import names_of
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import read
from benchmarks.reproduce import RUNS

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
