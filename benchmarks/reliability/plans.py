"""Legal plans of every balancer for random shapes, loads and histories."""

import argparse
from collections import Counter

from benchmarks.reliability.tries import number_option, seed_option, summary
from benchmarks.render.results import Table, Value
from tests.stress.plans import random_plans


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 200, "Plans.")
    seed_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    tried: Counter[str] = Counter()
    held: Counter[str] = Counter()
    notes = [f"Seed {given.seed}; plans on the host, for up to 32 ranks and 128 experts."]
    for case in random_plans(given.seed, given.number):
        tried[case.balancer] += 1
        held[case.balancer] += not case.fault
        notes += [f"{case.balancer}, {case.fault[:200]}."] if case.fault else []
    rows: list[list[Value]] = [[name, tried[name], held[name]] for name in sorted(tried)]
    condition = "legal plan: all tokens are served, by slots with their expert, inside the domain"
    return {
        "summary": summary("random plans", tried.total(), held.total(), condition, notes[:9]),
        "balancers": Table({"balancer": "", "plans": "d", "legal": "d"}, rows),
    }
