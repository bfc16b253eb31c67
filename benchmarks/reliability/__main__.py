"""Inputs and faults tried on plans, layers, readers and training: `python -m benchmarks.reliability NAME`.

A try holds if its condition is true. `--log FILE` appends finished tries to a file, and continues after those in it.
"""

import argparse

from benchmarks.reliability import runs
from benchmarks.reliability.soak import soak
from benchmarks.render.results import out_option, report

_INPUTS = (runs.calls, runs.files, runs.interrupts, runs.kills, runs.layers, runs.mutants, runs.plans)
_FAULTS = (runs.process_kills, soak, runs.sockets, runs.stalls, runs.training_kills, runs.writers)
RUNS = {one.__name__: one for one in (*_INPUTS, *_FAULTS)}


def main() -> None:
    """Run the tries named by the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__, formatter_class=form)
    parser.add_argument("name", choices=RUNS, metavar="NAME", help=f"Kind of tries: {', '.join(RUNS)}.")
    parser.add_argument("--number", type=int, help="Tries; of several processes, tries of each number of them.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the first input.")
    parser.add_argument("--log", type=runs.log_file, help="File of finished tries, appended to and not repeated.")
    out_option(parser)
    given = parser.parse_args()
    report(RUNS[given.name](given), given.out)


if __name__ == "__main__":
    main()
