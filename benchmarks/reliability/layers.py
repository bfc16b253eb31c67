"""Random layers against a dense float64 reference, in processes of a few programs."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reliability.tries import ROOT, log_option, number_option, summary
from benchmarks.render.results import Table, Value
from tests.stress.programs import SEED, draw_programs

PER_PROCESS = 4
"""Programs of one process."""

AXES = ("system", "layout", "router", "losses", "dtype", "transformation", "transfer", "saved", "chunks")
"""Fields of a program in the table of a recorded run."""


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Inputs of all layers.")
    parser.add_argument("--per-program", type=int, default=40, help="Inputs of each compiled layer.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    number, per_program, log = given.number, given.per_program, given.log
    with tempfile.TemporaryDirectory() as folder:
        log = log or Path(folder) / "layers.jsonl"
        log.touch()
        total = number // per_program
        left = [at for at in range(total) if at not in finished(log, per_program)]
        for at in range(0, len(left), PER_PROCESS):
            run_layers(per_program, left[at : at + PER_PROCESS], log)
        done = finished(log, per_program)
    programs = draw_programs(total)
    rows: list[list[Value]] = []
    bad: list[str] = []
    for at, faults in sorted(done.items()):
        fields = [str(getattr(programs[at], name)) for name in AXES]
        rows.append([at, *fields, per_program, per_program - len(faults)])
        bad += faults
    tried = per_program * len(done)
    condition = "values and all gradients equal those of a dense float64 layer, counts exactly"
    notes = [f"Seed {SEED}; {len(done)} compiled layers of {per_program} inputs each.", *bad[:9]]
    columns = {"layer": "d", **dict.fromkeys(AXES, ""), "cases": "d", "held": "d"}
    return {
        "summary": summary("random layers", tried, tried - len(bad), condition, notes),
        "layers": Table(columns, rows),
    }


def finished(log: Path, per_program: int) -> dict[int, list[str]]:
    """Return the failed cases of each finished program of a log, one line each."""
    cases: dict[int, dict[int, dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        case = json.loads(line)
        # The last result counts: an interrupted program starts again.
        cases.setdefault(case["program"], {})[case["number"]] = case
    found = {}
    for program, ended in cases.items():
        if len(ended) >= per_program:
            failed = [case for case in ended.values() if case["faults"]]
            found[program] = [f"Case {program}.{case['number']}: {case['faults'][0][:200]}." for case in failed]
    return found


def run_layers(per_program: int, numbers: list[int], log: Path) -> None:
    """Run programs in one process and append the results to a log; all cases of a program that ends it have failed."""
    command = [sys.executable, "-m", "tests.stress.worker", str(per_program), *map(str, numbers)]
    with log.open("ab") as file:
        process = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE)
        if process.returncode == 0:
            return
        done = finished(log, per_program)
        fault = process.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        broken = next(number for number in numbers if number not in done)
        for number in range(per_program):
            case = {"program": broken, "number": number, "pattern": "", "faults": [fault]}
            file.write(json.dumps(case).encode() + b"\n")
    run_layers(per_program, numbers[numbers.index(broken) + 1 :], log)
