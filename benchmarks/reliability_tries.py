"""Parts of `bench_reliability` that are programs of the tests printing one JSON object per try."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.render.results import Table, Value

ROOT = Path(__file__).parents[1]
COLUMNS = {"input or fault": "", "tried": "d", "held": "d", "condition": ""}
"""Columns of every table `summary`."""


def summary(name: str, tried: int, held: int, condition: str, notes: Sequence[str] = ()) -> Table:
    """Return the summary of a run."""
    return Table(COLUMNS, [[name, tried, held, condition]], notes=notes)


def run_into(log: Path | None, *command: str) -> list[dict[str, Any]]:
    """Run a module, append its output to a log, and return all objects; without a log, return its own."""
    process = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if log is None:
        return _objects(process.stdout)
    with log.open("a") as file:
        file.write(process.stdout)
    return logged(log)


def logged(log: Path | None) -> list[dict[str, Any]]:
    """Return the objects of a log; none if it does not exist."""
    return _objects(log.read_text()) if log is not None and log.exists() else []


def _objects(text: str) -> list[dict[str, Any]]:
    # A killed run may end in the middle of a line.
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def signatures(number: int, inputs: int, log: Path | None) -> dict[str, Table]:
    """Compare layers drawn from the public signatures with a float64 reference."""
    layers = logged(log)
    first = 1 + max((one["layer"] for one in layers), default=-1)
    if first < number:
        layers = run_into(log, "tests.stress.modules", str(first), str(number), str(inputs))
    bad = [one for one in layers if one["faults"]]
    tried = sum(one["cases"] for one in layers)
    held = tried - sum(one["cases"] for one in bad)
    refused = sum(bool(one["refused"]) for one in layers)
    notes = [f"{len(layers) - refused} layers, and {refused} refused combinations of options."]
    notes += [f"Layer {one['layer']}: {one['faults'][0][:200]}." for one in bad[:9]]
    condition = "values and gradients of all parameters equal those of a dense float64 layer"
    return {"summary": summary("inputs of layers drawn from signatures", tried, held, condition, notes)}


PATHS = ("convert", "calibrate", "train")
"""Commands whose system calls fail."""


def calls(step: int, log: Path | None) -> dict[str, Table]:
    """Fail system calls of commands; every `step`-th call of training, and all of others."""
    tries = logged(log)
    for path in PATHS:
        if path not in {one["path"] for one in tries}:
            new = run_into(log, "tests.faults.run", path, str(step if path == "train" else 1))
            tries = new if log is not None else tries + new
    tried = Counter((one["path"], one["kind"]) for one in tries)
    held = Counter((one["path"], one["kind"]) for one in tries if not one["faults"])
    rows: list[list[Value]] = [[path, kind, tried[path, kind], held[path, kind]] for path, kind in tried]
    condition = "nothing lost, one line, and the next command has the right result"
    bad = [f"{one['path']}, {one['kind']} {one['number']}: {one['faults'][0][:200]}." for one in tries if one["faults"]]
    notes = [f"Every {step}th call of training, every call of others.", *bad[:9]]
    return {
        "summary": summary("failed system calls", tried.total(), held.total(), condition, notes),
        "paths": Table({"command": "", "call": "", "tried": "d", "held": "d"}, rows),
    }


CONDITIONS = {
    "interrupts": "at most one line, and the resumed run has the losses of an uninterrupted run, bit for bit",
    "writers": "one run is refused in one line, or starts after the other; the losses are right",
}
NAMES = {"interrupts": "SIGINT of a training run", "writers": "two runs of one folder"}


def stops(kind: str, number: int, log: Path | None) -> dict[str, Table]:
    """Interrupt training runs, or start two in one folder."""
    tries = logged(log)
    if len(tries) < number:
        tries = run_into(log, "tests.faults.stops", kind, str(number - len(tries)), str(len(tries)))
    bad = [one for one in tries if one["faults"]]
    notes = [f"Try {at}: {one['faults'][0][:200]}." for at, one in enumerate(tries) if one["faults"]]
    return {"summary": summary(NAMES[kind], len(tries), len(tries) - len(bad), CONDITIONS[kind], notes[:9])}


def mutants(file: Path) -> dict[str, Table]:
    """Tabulate the mutants with wrong operands that `ci/mutants.py --record` has counted."""
    operators = json.loads(file.read_text())["operators"]
    rows: list[list[Value]] = []
    for name, counts in operators.items():
        built = sum(counts.values()) - counts.get("does not build", 0)
        rows.append([name, built, counts.get("killed", 0)])
    tried, killed = (sum(int(str(row[at])) for row in rows) for at in (1, 2))
    return {
        "summary": summary("mutants with a wrong operand", tried, killed, "a test fails"),
        "operators": Table({"change": "", "mutants": "d", "killed": "d"}, rows),
    }
