"""SIGKILL of one of two and of four training processes, then `--resume`."""

import argparse

from benchmarks.reliability.tries import by_processes, log_option, longest, number_option, summary_of
from benchmarks.render.results import Table

CONDITION = "all others name it in one line, and the resumed run has the losses of an uninterrupted one, bit for bit"


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 100, "Kills of two processes, and of four.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    tries = by_processes("trainings", given.number, given.log)
    return {
        "summary": summary_of(tries, "SIGKILL of one training process of several", CONDITION),
        "processes": longest(tries, ("processes",)),
    }
