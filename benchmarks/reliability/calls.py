"""Failed system calls of commands on their files, with each error; then the command runs again."""

import argparse
from collections import Counter

from benchmarks.reliability.tries import log_option, logged, run_into, summary
from benchmarks.render.results import Table, Value

PATHS = ("convert", "calibrate", "train", "resume")
"""Commands whose system calls fail."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, default=1, help="Step between the numbers of failed calls.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    step, log = given.step, given.log
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
