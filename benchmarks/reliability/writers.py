"""Two training runs of one folder, at once or one after the other."""

import argparse

from benchmarks.reliability.tries import log_option, number_option, stops
from benchmarks.render.results import Table

CONDITION = "one run is refused in one line, or starts after the other; the losses are right"


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Pairs of runs.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    return {"summary": stops("writers", "two runs of one folder", CONDITION, given.number, given.log)}
