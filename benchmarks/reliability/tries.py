"""Tables and options of all benchmarks here, and programs of the tests that print one JSON object per try.

Each benchmark has a table `summary` with the same columns: the input or fault, the number tried, the number held, and
the condition for holding. `--log FILE` appends the results to a file, and continues after those in it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.render.results import Table, Value

ROOT = Path(__file__).parents[2]
COLUMNS = {"input or fault": "", "tried": "d", "held": "d", "condition": ""}
"""Columns of every table `summary`."""


def number_option(parser: argparse.ArgumentParser, default: int, counted: str) -> None:
    """Add the option `--number`."""
    parser.add_argument("--number", type=int, default=default, help=counted)


def seed_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--seed`."""
    parser.add_argument("--seed", type=int, default=0, help="Seed of the first input.")


def log_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--log`."""
    parser.add_argument("--log", type=Path, help="File of finished tries, appended to and not repeated.")


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


def stops(kind: str, name: str, condition: str, number: int, log: Path | None) -> Table:
    """Return the summary of tries of `tests.faults.stops`."""
    tries = logged(log)
    if len(tries) < number:
        tries = run_into(log, "tests.faults.stops", kind, str(number - len(tries)), str(len(tries)))
    return summary_of(tries, name, condition)


def by_processes(kind: str, number: int, log: Path | None) -> list[dict[str, Any]]:
    """Run a program of `tests.faults.processes` with two and with four processes."""
    tries = logged(log)
    for processes in (2, 4):
        done = sum(one["processes"] == processes for one in tries)
        # A process is stopped in two phases.
        total = 2 * processes * number if kind == "stalls" else number
        if done < total:
            new = run_into(log, "tests.faults.processes", kind, *map(str, (processes, total - done, done)))
            tries = new if log is not None else tries + new
    return tries


def summary_of(tries: list[dict[str, Any]], name: str, condition: str) -> Table:
    """Return the summary of tries."""
    bad = [f"Try {at}: {one['faults'][0][:200]}." for at, one in enumerate(tries) if one["faults"]]
    notes = bad[:9]
    if stalls := sum(one.get("stalls", 0) for one in tries):
        notes += [f"{stalls} times a run ended in one line, as no step ended although all processes responded."]
    return summary(name, len(tries), len(tries) - len(bad), condition, notes)


def longest(tries: list[dict[str, Any]], keys: Sequence[str]) -> Table:
    """Return the longest time until the others have named a process, for each value of some keys."""
    rows: list[list[Value]] = []
    for key in sorted({tuple(str(one[name]) for name in keys) for one in tries}):
        of_key = [one for one in tries if tuple(str(one[name]) for name in keys) == key]
        rows.append([*key, len(of_key), max(one["seconds"] for one in of_key)])
    return Table({**dict.fromkeys(keys, ""), "tried": "d", "longest until named, s": ".1f"}, rows)
