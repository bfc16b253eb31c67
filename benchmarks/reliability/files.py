"""Mutated files of every kind, read in one worker process."""

import argparse

from benchmarks.reliability.tries import number_option, seed_option, summary
from benchmarks.render.results import Table, Value
from tests.fuzz.run import by_kind, failures, fuzzed
from tests.fuzz.worker import HELD, MOST_BYTES, MOST_S


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Files.")
    seed_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    results = fuzzed(given.seed, given.number)
    kinds = by_kind(results)
    rows: list[list[Value]] = []
    for kind, outcomes in sorted(kinds.items()):
        held = [outcomes[outcome] for outcome in HELD]
        rows.append([kind, outcomes.total(), *held, outcomes.total() - sum(held)])
    condition = f"legal data or one line, in {MOST_S:g} CPU s and {MOST_BYTES // 2**20} MiB"
    bad = failures(results)
    notes = [f"Seed {given.seed}."]
    notes += [f"File {one.index}: {one.kind}, {one.outcome}: {one.detail[:100]}." for one in bad[:9]]
    return {
        "summary": summary("mutated files", len(results), len(results) - len(bad), condition, notes),
        "kinds": Table({"kind": "", "files": "d", **dict.fromkeys((*HELD, "failed"), "d")}, rows),
    }
