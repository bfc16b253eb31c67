"""Parts of `bench_reliability` that are programs of the tests printing one JSON object per try."""

import json
import re
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
    whole = [sys.executable, "-m", *command]
    if log is None:
        return _objects(subprocess.run(whole, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout)
    with log.open("a") as file:
        subprocess.run(whole, cwd=ROOT, stdout=file)
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


PATHS = ("convert", "calibrate", "train", "resume")
"""Commands whose system calls fail."""


def calls(step: int, log: Path | None) -> dict[str, Table]:
    """Fail every `step`-th system call of commands, with each error."""
    tries = logged(log)
    for path in PATHS:
        if path not in {one["path"] for one in tries}:
            new = run_into(log, "tests.faults.run", path, str(step))
            tries = new if log is not None else tries + new
    tried = Counter((one["path"], one["kind"]) for one in tries)
    numbers = {key: {one["number"] for one in tries if (one["path"], one["kind"]) == key} for key in tried}
    held = Counter((one["path"], one["kind"]) for one in tries if not one["faults"])
    rows: list[list[Value]] = [[*key, len(numbers[key]), tried[key], held[key]] for key in tried]
    condition = "nothing lost, one line, and the next command has the right result"
    bad = [f"{one['path']}, {one['kind']} {one['number']}: {one['faults'][0][:200]}." for one in tries if one["faults"]]
    which = "Every call" if step == 1 else f"Every {step}th call"
    return {
        "summary": summary(
            "failed system calls", tried.total(), held.total(), condition, [f"{which}, with five errors.", *bad[:9]]
        ),
        "paths": Table({"command": "", "call": "", "calls": "d", "tried": "d", "held": "d"}, rows),
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


def process_kills(number: int, log: Path | None) -> dict[str, Table]:
    """Kill one of two and of four processes, `number` times each."""
    tries = by_processes("kills", number, log)
    name, condition = "SIGKILL of one process of several", "all others end in one line that names it"
    return {"summary": summary_of(tries, name, condition), "processes": longest(tries, ("processes",))}


def training_kills(number: int, log: Path | None) -> dict[str, Table]:
    """Kill one of two training processes, and resume."""
    tries = logged(log) or run_into(log, "tests.faults.processes", "trainings", "2", str(number))
    condition = "the other names it in one line, and the resumed run has the losses of an uninterrupted one"
    name = "SIGKILL of one of two training processes"
    return {"summary": summary_of(tries, name, condition), "processes": longest(tries, ("processes",))}


def stalls(number: int, log: Path | None) -> dict[str, Table]:
    """Stop each of two and of four processes, `number` times."""
    tries = by_processes("stalls", number, log)
    condition = "all others name it in 30 s, and the run continues"
    return {
        "summary": summary_of(tries, "SIGSTOP of one process of several", condition),
        "processes": longest(tries, ("processes", "phase", "stopped")),
    }


def by_processes(kind: str, number: int, log: Path | None) -> list[dict[str, Any]]:
    """Run a program of `tests.faults.processes` with two and with four processes."""
    tries = logged(log)
    for processes in (2, 4):
        if processes not in {one["processes"] for one in tries}:
            new = run_into(log, "tests.faults.processes", kind, str(processes), str(number))
            tries = new if log is not None else tries + new
    return tries


def summary_of(tries: list[dict[str, Any]], name: str, condition: str) -> Table:
    """Return the summary of tries."""
    bad = [f"Try {at}: {one['faults'][0][:200]}." for at, one in enumerate(tries) if one["faults"]]
    return summary(name, len(tries), len(tries) - len(bad), condition, bad[:9])


def longest(tries: list[dict[str, Any]], keys: Sequence[str]) -> Table:
    """Return the longest time until the others have named a process, for each value of some keys."""
    rows: list[list[Value]] = []
    for key in sorted({tuple(str(one[name]) for name in keys) for one in tries}):
        of_key = [one for one in tries if tuple(str(one[name]) for name in keys) == key]
        rows.append([*key, len(of_key), max(one["seconds"] for one in of_key)])
    return Table({**dict.fromkeys(keys, ""), "tried": "d", "longest until named, s": ".1f"}, rows)


def sockets(program: Path) -> dict[str, Table]:
    """Fail or kill at each send and receive of peer copies, with the C++ test `sockets_test`."""
    rows: list[list[Value]] = []
    for part, pattern in (("fail 1", r"failed (\d+) calls"), ("die 0", r"killed before each of (\d+) sends")):
        done = subprocess.run([program, *part.split()], stderr=subprocess.PIPE, text=True)
        found = re.search(pattern, done.stderr)
        if found is None:
            raise RuntimeError(f"{program} {part} printed {done.stderr[-200:]!r}; expected a number of calls")
        number = int(found[1])
        rows.append([FAULTS[part], number, number * (done.returncode == 0)])
    tried, held = (sum(int(str(row[at])) for row in rows) for at in (1, 2))
    condition = "all four processes continue, or all end in one line that names the error or the process"
    return {
        "summary": summary("faults of sockets of peer copies", tried, held, condition),
        "faults": Table({"fault in one of four processes": "", "tried": "d", "held": "d"}, rows),
    }


FAULTS = {"fail 1": "a send or a receive fails, with each of five errors", "die 0": "SIGKILL before a send"}
"""Faults of the parts of `sockets_test`."""


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
