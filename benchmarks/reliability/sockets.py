"""Failed sends and receives of peer copies in one of four processes, and kills before each send.

The C++ test `sockets_test` runs them, see ci/sanitizers.sh for its build.
"""

import argparse
import re
import subprocess
from pathlib import Path

from benchmarks.reliability.tries import ROOT, summary
from benchmarks.render.results import Table, Value

FAULTS = {"fail 1": "a send or a receive fails, with each of five errors", "die 0": "SIGKILL before a send"}
"""Faults of the parts of `sockets_test`."""


def options(parser: argparse.ArgumentParser) -> None:
    built = ROOT / "build" / "cpp" / "sockets_test"
    parser.add_argument("--program", type=Path, default=built, help="C++ test sockets_test.")


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    rows: list[list[Value]] = []
    for part, pattern in (("fail 1", r"failed (\d+) calls"), ("die 0", r"killed before each of (\d+) sends")):
        done = subprocess.run([given.program, *part.split()], stderr=subprocess.PIPE, text=True)
        found = re.search(pattern, done.stderr)
        if found is None:
            raise RuntimeError(f"{given.program} {part} printed {done.stderr[-200:]!r}; expected a number of calls")
        number = int(found[1])
        rows.append([FAULTS[part], number, number * (done.returncode == 0)])
    tried, held = (sum(int(str(row[at])) for row in rows) for at in (1, 2))
    condition = "all four processes continue, or all end in one line that names the error or the process"
    return {
        "summary": summary("faults of sockets of peer copies", tried, held, condition),
        "faults": Table({"fault in one of four processes": "", "tried": "d", "held": "d"}, rows),
    }
