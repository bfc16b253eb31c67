"""SIGKILL of one of two and of four processes that have joined."""

import argparse

from benchmarks.reliability.tries import by_processes, log_option, longest, number_option, summary_of
from benchmarks.render.results import Table


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 100, "Kills of two processes, and of four.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    tries = by_processes("kills", given.number, given.log)
    name, condition = "SIGKILL of one process of several", "all others end in one line that names it"
    return {"summary": summary_of(tries, name, condition), "processes": longest(tries, ("processes",))}
