"""SIGSTOP of each of two and of four processes, before the first training step and later."""

import argparse

from benchmarks.reliability.tries import by_processes, log_option, longest, number_option, summary_of
from benchmarks.render.results import Table

CONDITION = "all others name it in 30 s; the run continues, or ends in one line and is resumed; its losses are right"


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 1, "Stops of each process and phase.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    tries = by_processes("stalls", given.number, given.log)
    return {
        "summary": summary_of(tries, "SIGSTOP of one process of several", CONDITION),
        "processes": longest(tries, ("processes", "phase", "stopped")),
    }
