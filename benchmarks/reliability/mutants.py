"""Mutants of C++ with a wrong operand, counted by `ci/mutants.py --record`."""

import argparse
import json
from pathlib import Path

from benchmarks.reliability.tries import ROOT, summary
from benchmarks.render.results import Table, Value

RECORDED = ROOT / "tests" / "mutation" / "operands.json"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="Counts of ci/mutants.py --record.")


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    operators = json.loads(given.recorded.read_text())["operators"]
    rows: list[list[Value]] = []
    for name, counts in operators.items():
        built = sum(counts.values()) - counts.get("does not build", 0)
        rows.append([name, built, counts.get("killed", 0)])
    tried, killed = (sum(int(str(row[at])) for row in rows) for at in (1, 2))
    return {
        "summary": summary("mutants with a wrong operand", tried, killed, "a test fails"),
        "operators": Table({"change": "", "mutants": "d", "killed": "d"}, rows),
    }
