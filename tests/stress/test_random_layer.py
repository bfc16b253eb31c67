"""Random programs on random inputs equal a dense float64 layer, in values and all gradients.

`pytest tests/stress --layer-cases 3000` runs ten times as many cases; `--layer-case 7.3` repeats a failed one, by the
numbers of its program and input.
"""

import pytest

from jax_moe_lb.layer.systems import system_names
from tests.stress.patterns import PATTERNS
from tests.stress.programs import (
    DTYPES,
    INPUTS,
    LAYOUTS,
    LOSSES,
    ROUNDS,
    ROUTERS,
    SAVED,
    SYSTEMS,
    TRANSFERS,
    TRANSFORMATIONS,
    Program,
    draw_programs,
)
from tests.stress.run import run_program


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
CHOICES += ("explicit", "gated", "masked", "homes", "check_vma", "transfer", "saved", "chunks")


def spread(programs: list[Program]) -> list[int]:
    """Return the numbers of a few programs covering many values, by greedy selection."""
    found, seen = [], set()
    for _ in range(min(EVERYDAY, len(programs))):
        made = [{(name, getattr(program, name)) for name in CHOICES} for program in programs]
        found.append(max(range(len(programs)), key=lambda i, made=made: len(made[i] - seen)))
        seen |= made[found[-1]]
    return found


def test_the_default_programs_cover_every_choice():
    programs = draw_programs(-(-396 // INPUTS))
    assert set(system_names()) < set(SYSTEMS)
    assert {program.system for program in programs} == set(SYSTEMS)
    assert {program.layout for program in programs} == set(LAYOUTS)
    assert {program.router for program in programs} == set(ROUTERS)
    assert {program.losses for program in programs} == set(LOSSES)
    assert {program.dtype for program in programs} == set(DTYPES)
    assert {program.transformation for program in programs} == set(TRANSFORMATIONS)
    assert {program.transfer for program in programs} == set(TRANSFERS)
    assert {program.saved for program in programs} == set(SAVED)
    assert {program.chunks for program in programs} == {1, 2}
    assert {program.width % 2 for program in programs} == {0, 1}
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
    for case in run_program(program, inputs_of(number, request.config)):
        print(f"--layer-case {number}.{case.number}: {case.pattern}")
        faults += [f"--layer-case {number}.{case.number}: {fault}" for fault in case.faults]
    assert not faults, "\n".join(faults)


def inputs_of(number: int, config: pytest.Config) -> range:
    if (only := config.getoption("layer_case")) is None:
        return range(min(INPUTS, config.getoption("layer_cases") - number * INPUTS))
    # A balancer with a history needs the earlier inputs as well, even for a single requested case.
    return range(int(only.split(".")[1]) + 1)
