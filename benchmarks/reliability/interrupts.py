"""SIGINT of training runs at random times, then `--resume`."""

import argparse

from benchmarks.reliability.tries import log_option, number_option, stops
from benchmarks.render.results import Table

CONDITION = "at most one line, and the resumed run has the losses of an uninterrupted run, bit for bit"


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Interrupts.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    return {"summary": stops("interrupts", "SIGINT of a training run", CONDITION, given.number, given.log)}
