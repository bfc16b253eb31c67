"""Random programs on random inputs equal a dense float64 layer, in values and all gradients.

`pytest tests/stress --layer-cases 3000` runs ten times as many cases; `--layer-case 7.3` repeats a failed one, by the
numbers of its program and input.
"""

import contextlib

import jax
import pytest

from tests.stress.compared import faults_of
from tests.stress.compiled import Compiled
from tests.stress.draws import PATTERNS, draw_inputs
from tests.stress.programs import (
    DTYPES,
    INPUTS,
    LAYOUTS,
    LOSSES,
    ROUNDS,
    ROUTERS,
    SYSTEMS,
    TRANSFORMATIONS,
    Program,
    draw_programs,
)


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        only = metafunc.config.getoption("layer_case")
        cases = metafunc.config.getoption("layer_cases")
        numbers = range(-(-cases // INPUTS)) if only is None else [int(only.split(".")[0])]
        everyday = set(numbers if only else spread(draw_programs(len(numbers))))
        thorough = pytest.mark.thorough
        metafunc.parametrize(
            "number", [number if number in everyday else pytest.param(number, marks=thorough) for number in numbers]
        )


EVERYDAY = 1
"""Number of programs run by default; the others are thorough cases."""

CHOICES = ("system", "layout", "router", "losses", "dtype", "transformation", "headroom", "max_rounds")
CHOICES += ("explicit", "gated", "masked", "homes", "check_vma")


def spread(programs: list[Program]) -> list[int]:
    """Return the numbers of a few programs covering many values, by greedy selection."""
    found, seen = [], set()
    for _ in range(min(EVERYDAY, len(programs))):
        made = [{(name, getattr(program, name)) for name in CHOICES} for program in programs]
        found.append(max(range(len(programs)), key=lambda i, made=made: len(made[i] - seen)))
        seen |= made[found[-1]]
    return found


def test_the_default_programs_cover_every_choice():
    programs = draw_programs(-(-380 // INPUTS))
    assert {program.system for program in programs} == set(SYSTEMS)
    assert {program.layout for program in programs} == set(LAYOUTS)
    assert {program.router for program in programs} == set(ROUTERS)
    assert {program.losses for program in programs} == set(LOSSES)
    assert {program.dtype for program in programs} == set(DTYPES)
    assert {program.transformation for program in programs} == set(TRANSFORMATIONS)
    assert {(program.headroom, program.max_rounds) for program in programs} == set(ROUNDS)
    for choice in ("explicit", "gated", "masked", "homes", "check_vma"):
        assert {getattr(program, choice) for program in programs} == {False, True}
    assert len(PATTERNS) <= INPUTS


@pytest.mark.slow
def test_the_layer_equals_float64(number, request):
    program = draw_programs(number + 1)[number]
    # Shown if the test fails, also with an error.
    print(program)
    faults = []
    with jax.enable_x64(True) if program.dtype == "float64" else contextlib.nullcontext():
        compiled = Compiled(program)
        state = compiled.state
        for at in inputs_of(number, request.config):
            pattern, inputs, answers = draw_inputs(program, at)
            print(f"--layer-case {number}.{at}: {pattern}")
            outcome = compiled.run(inputs, state)
            state = outcome.state
            faults += [f"--layer-case {number}.{at}: {fault}" for fault in faults_of(program, outcome, answers)]
    assert not faults, "\n".join(faults)
    if program.transformation != "not jitted" and not program.transformation.startswith("module"):
        assert compiled.step._cache_size() == 1


def inputs_of(number: int, config: pytest.Config) -> range:
    if (only := config.getoption("layer_case")) is None:
        return range(min(INPUTS, config.getoption("layer_cases") - number * INPUTS))
    # A balancer with a history needs the earlier inputs as well, even for a single requested case.
    return range(int(only.split(".")[1]) + 1)
