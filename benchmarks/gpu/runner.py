"""Check claims of one part at a time in processes of its own, and keep the outcomes in a file of the part.

A check that raises, or that ends its process, makes its claim false; the next one starts in a new process. If it left
a mark of `once`, it is checked once more, without the marked work. Claims that are true or false are not checked again
by a later run; the others are.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import once
from benchmarks.gpu.claims import PARTS
from benchmarks.gpu.findings import DRY_RUN_FAILED, FALSE, NOT_REACHED, TRUE, Row, now, read_rows, write_row
from benchmarks.gpu.worker import RUNNING
from benchmarks.render.results import Table

LIMIT_S = 480.0
"""Time limit of a part."""

KILLED_S = 10.0
"""Seconds that a killed worker has to end."""

MEMORY_FRACTION = 0.45
"""Share of the GPU's memory for the process of a part, which starts others beside it."""

MEMORY_FRACTIONS = {"comparison": 0.9, "steps": 0.8, "products": 0.7, "counters": 0.1, "training": 0.05}
"""Shares of parts that start no other processes or small ones, and of those that use none themselves."""


def start(arguments: list[str], limit_s: float) -> int | None:
    """Run a worker; return its exit status, or `None` if it was stopped at the limit, with all processes it started."""
    fraction = MEMORY_FRACTIONS.get(arguments[0], MEMORY_FRACTION) if arguments else MEMORY_FRACTION
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(fraction)}
    command = [sys.executable, "-m", "benchmarks.gpu.worker", *arguments]
    worker = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return worker.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Processes of a check may outlive the worker and hold memory of the GPU.
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        # The driver may take long to end a kernel; the other parts have little time.
        with suppress(subprocess.TimeoutExpired):
            worker.wait(KILLED_S)


def run_part(part: str, names: list[str], path: Path, *, dry_run: bool, limit_s: float = LIMIT_S) -> None:
    """Check claims of a part in as many processes as needed, and write their outcomes."""
    run, deadline = now(), time.monotonic() + limit_s
    options = ["--run", run, *(["--dry-run"] if dry_run else [])]
    while names:
        marks = once.marks()
        status = start([part, str(path), *names, *options], max(deadline - time.monotonic(), 0.0))
        rows, is_marked = read_rows(path), bool(once.marks() - marks)
        if status is None:
            # Work that began just before the limit is not at fault.
            once.forget(mark for mark in once.marks() - marks if not mark.startswith(once.LOAD))
            reason = f"the part reached its limit of {limit_s:.0f} s"
            write_ends(path, [name for name in names if not is_complete(rows.get(name), run)], run, reason)
            return
        left = [
            name
            for name in names
            if name not in rows or rows[name].run != run or (is_marked and rows[name].found == RUNNING)
        ]
        for row in rows.values():
            if row.run == run and row.found == RUNNING and row.claim not in left:
                why = f"the check ended its process with status {status}"
                failed = replace(row, outcome=NOT_REACHED, found=f"{DRY_RUN_FAILED}{why}")
                write_row(path, failed if dry_run else replace(row, outcome=FALSE, found=why))
        if left == names and not is_marked:
            write_ends(path, names, run, f"{DRY_RUN_FAILED}the process of the part ended with status {status}")
            return
        names = left


def is_complete(row: Row | None, run: str) -> bool:
    """Return whether a claim was checked to its end in this run."""
    return row is not None and row.run == run and row.found != RUNNING


def write_ends(path: Path, names: list[str], run: str, reason: str) -> None:
    """Write that claims were not reached in this run."""
    for name in names:
        write_row(path, Row(name, NOT_REACHED, reason, 0.0, "", "", run))


def remaining(part: str, path: Path, again: list[str]) -> list[str]:
    """Return the claims of a part without an outcome, and those to check again."""
    rows = read_rows(path)
    names = [claim.name for claim in PARTS[part]]
    known = {name for name in names if name in rows and rows[name].outcome in (TRUE, FALSE)}
    return [name for name in names if name not in known or part in again or name in again]


def summary(folder: Path) -> tuple[Table, Counter[str]]:
    """Return the table of all claims with the stored outcomes, and the number of claims of each outcome."""
    rows = []
    for part, claims in PARTS.items():
        stored = read_rows(folder / f"{part}.json")
        for claim in claims:
            row = stored.get(claim.name)
            outcome, found = (row.outcome, row.found) if row else (NOT_REACHED, "not run")
            rows.append([part, claim.name, claim.text, outcome, found])
    columns = dict.fromkeys(("part", "name", "claim", "outcome", "found"), "")
    return Table(columns, rows), Counter(row[3] for row in rows)
