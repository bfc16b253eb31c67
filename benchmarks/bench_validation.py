"""Predictions of the simulator against measurements: real networks and papers, without fitted numbers.

    python -m benchmarks.bench_validation [--out FILE.json] [--only networks interfaces hybridep ultraep feplb rails]

One row is one source. It lists the measured values known to the prediction, and the deviations of seconds and of the
speed-up over a baseline. The last columns give the deviation of seconds under other assumptions.
"""

import argparse

from benchmarks.results import out_option, report
from benchmarks.validation import assumptions_table, table
from benchmarks.validation_networks import datacenters, rails
from benchmarks.validation_papers import of_feplb, of_hybridep, of_rails, of_ultraep

SOURCES = {
    "networks": datacenters,
    "interfaces": rails,
    "hybridep": of_hybridep,
    "ultraep": of_ultraep,
    "feplb": of_feplb,
    "rails": of_rails,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES), help="Sources to include.")
    out_option(parser)
    given = parser.parse_args()
    checks = [check for name in given.only for check in SOURCES[name]()]
    report({"predicted": table(checks), "assumptions": assumptions_table(checks)}, given.out)


if __name__ == "__main__":
    main()
