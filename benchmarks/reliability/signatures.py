"""Layers drawn from the public signatures against a dense float64 reference."""

import argparse

from benchmarks.reliability.tries import log_option, logged, number_option, run_into, summary
from benchmarks.render.results import Table

INPUTS = 64
"""Inputs of each layer."""


def options(parser: argparse.ArgumentParser) -> None:
    number_option(parser, 160, "Layers.")
    log_option(parser)


def benchmark(given: argparse.Namespace) -> dict[str, Table]:
    layers = logged(given.log)
    first = 1 + max((one["layer"] for one in layers), default=-1)
    if first < given.number:
        layers = run_into(given.log, "tests.stress.modules", str(first), str(given.number), str(INPUTS))
    bad = [one for one in layers if one["faults"]]
    tried = sum(one["cases"] for one in layers)
    held = tried - sum(one["cases"] for one in bad)
    refused = sum(bool(one["refused"]) for one in layers)
    notes = [f"{len(layers) - refused} layers, and {refused} refused combinations of options."]
    notes += [f"Layer {one['layer']}: {one['faults'][0][:200]}." for one in bad[:9]]
    condition = "values and gradients of all parameters equal those of a dense float64 layer"
    return {"summary": summary("inputs of layers drawn from signatures", tried, held, condition, notes)}
