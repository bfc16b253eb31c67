"""One command runs every benchmark, or reports why not."""

import argparse
import ast
from pathlib import Path

import benchmarks
from benchmarks.reliability import __main__ as reliability
from benchmarks.render.commands import names_of
from benchmarks.render.documents import RESULTS
from benchmarks.render.results import read
from benchmarks.reproduce import RUNS

HERE = Path(benchmarks.__file__).parent
OWN = ("benchmarks", "jax_moe_lb", "models", "tests")
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


def defined_in(path):
    """Return the names that a module defines or imports, without importing it."""
    tree = list(ast.walk(ast.parse(path.read_text())))
    names = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {one.asname or one.name for node in tree if isinstance(node, ast.ImportFrom) for one in node.names}


def test_every_import_of_a_benchmark_is_there():
    """Some benchmarks need absent packages, so no module is imported."""
    root, missing = HERE.parent, []
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module.partition(".")[0] not in OWN:
                continue
            module = root / node.module.replace(".", "/")
            # The names of a package may be its modules, or loaded on demand.
            absent = [] if module.is_dir() else ["the module"]
            if module.with_suffix(".py").exists():
                absent = sorted({one.name for one in node.names} - defined_in(module.with_suffix(".py")))
            missing += [f"{path.relative_to(HERE)}: {node.module}: {name}" for name in absent]
    assert missing == []
