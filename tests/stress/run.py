"""All cases of a program: one compilation, many inputs."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from tests.stress.compared import faults_of
from tests.stress.compiled import Compiled
from tests.stress.draws import draw_inputs
from tests.stress.programs import Program


class Case(NamedTuple):
    """Result of a program on one input.

    Args:
        number: number of the input.
        pattern: kind of the input.
        faults: one line per difference from the reference.
    """

    number: int
    pattern: str
    faults: list[str]


def run_program(program: Program, numbers: Iterable[int]) -> Iterator[Case]:
    """Compile a program, run it on these inputs in order, and yield the results.

    A balancer with a history continues with the state of the previous input.
    """
    with jax.enable_x64(True) if program.dtype == "float64" else contextlib.nullcontext():
        compiled = Compiled(program)
        state = compiled.state
        for number in numbers:
            pattern, inputs, answers = draw_inputs(program, number)
            outcome = compiled.run(number, inputs, state)
            state = outcome.state
            yield Case(number, pattern, [*faults_of(program, outcome, answers), *compiled.faults()])
