"""Comparison of the outputs of a compiled program with the reference."""

from collections.abc import Iterator

import numpy as np

from tests.stress.compiled import Outcome
from tests.stress.float64_experts import Weights
from tests.stress.float64_layer import Network
from tests.stress.programs import Program

TOLERANCES = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 4e-2}
"""Tolerance relative to the largest entry, or to the largest term if terms cancel.

A bfloat16 number is rounded by at most 2^-9, about ten times on its way through a layer and back. Sums are kept in
float32, so their length does not matter. The largest errors of a thousand cases are 1e-14, 4e-6 and 2.5e-2.
"""

ROUNDED = {
    "float8": {"float64": 1e-6, "float32": 0.08, "bfloat16": 0.08},
    "int8": {"float64": 1e-6, "float32": 0.01, "bfloat16": 0.05},
}
"""The same for results that depend on outputs rounded by a transfer, by the dtypes of transfer and layer.

A rounding error may move an output to the next float8 number, by up to 1/14 of the largest one, or the next int8, by
1/127. In float64 only the scales are rounded, which are float32.
"""


def tolerance_of(program: Program, name: str) -> float:
    """Return the tolerance of a result; losses and gradients do not depend on rounded outputs."""
    if not program.quantizes_outputs or not (name == "value" or name.startswith("y[")):
        return TOLERANCES[program.dtype]
    return max(TOLERANCES[program.dtype], ROUNDED[program.transfer][program.dtype])


def faults_of(program: Program, outcome: Outcome, answers: list[Network]) -> list[str]:
    """Return one line per differing array."""
    lines = [*_differences_of_counts(program, outcome, answers)]
    for name, got, want, size in _compared(program, outcome, answers):
        got = np.asarray(got, np.float64)
        if got.shape != np.shape(want):
            lines.append(f"{name} has shape {got.shape}; expected {np.shape(want)}")
            continue
        error, scale = np.abs(got - want).max(initial=0), max(np.abs(want).max(initial=0), np.max(size, initial=0))
        # Also false if the error is NaN.
        if not error <= tolerance_of(program, name) * scale:
            lines.append(f"{name} has an error of {error:.3g} of {scale:.3g}, {error / max(scale, 1e-300):.3g}")
    return lines


def _compared(program: Program, outcome: Outcome, answers: list[Network]) -> Iterator[tuple]:
    """Yield names, arrays of the program and of the reference, and the size of the cancelling terms."""
    layers = [layer for answer in answers for layer in answer.layers]
    losses = np.array([[told.loss for told in layer.routed] for layer in layers])
    yield "loss", np.reshape(outcome.stats.loss, losses.shape), losses, 0
    yield "value", outcome.value, sum(answer.value.value for answer in answers), sum(a.value.size for a in answers)
    for at, answer in enumerate(answers):
        for name, got, want in (("y", outcome.y, answer.y), ("gradient of x", outcome.x, answer.x)):
            yield f"{name}[{at}]", np.reshape(got, (len(answers), *want.value.shape))[at], *want
    parts = [gradients for answer in answers for gradients in answer.gradients]
    groups = [[part] for part in parts] if program.own_weights else [parts]
    for name in Weights._fields:
        got = getattr(outcome.weights, name)
        if got is None:
            continue
        for at, group in enumerate(groups):
            want = sum(getattr(part.weights, name) for part in group)
            size = sum(getattr(part.sizes, name) for part in group)
            yield f"gradient of {name}[{at}]", got[at] if program.own_weights else got, want, size


def _differences_of_counts(program: Program, outcome: Outcome, answers: list[Network]) -> Iterator[str]:
    """Check that counts are exact, in every layer and microbatch."""
    counts = np.stack([layer.counts for answer in answers for layer in answer.layers])
    num_ranks, experts, stats = program.num_ranks, program.num_experts, outcome.stats
    served = np.reshape(stats.quota, (*counts.shape[:2], experts, num_ranks))
    wanted = counts.sum(2)
    loads = {
        "counts": (np.reshape(stats.counts, counts.shape), counts),
        "load_before": (stats.load_before, wanted.reshape(*wanted.shape[:2], num_ranks, -1).sum(3)),
        "load_after": (stats.load_after, served.sum(2)),
        "quota by expert": (served.sum(3), wanted),
    }
    for name, (got, want) in loads.items():
        if not np.array_equal(np.reshape(got, want.shape), want):
            yield f"{name} is {np.reshape(got, want.shape).tolist()}; expected {want.tolist()}"
    if np.any(stats.fault.code):
        yield f"fault.code is {np.ravel(stats.fault.code).tolist()}; expected 0"
    if not ((np.ravel(stats.rounds) > 0) == (counts.sum((2, 3)).ravel() > 0)).all():
        yield f"rounds is {np.ravel(stats.rounds).tolist()}; expected some where there are token copies"
