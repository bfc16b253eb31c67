"""How often loops run whose compiler does not write it: those of TPUs, which count from one constant to another."""

import re
from dataclasses import replace

from jax_moe_lb.compiled.hlo import Computation, Instruction, Module

BODY = re.compile(r"\bbody=%?([\w.\-]+)")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
PASSED_ON = ("copy", "bitcast", "copy-done", "copy-start")


def with_counted_loops(module: Module) -> Module:
    """Returns the program with `counted` in loops that count up to a constant, where the compiler says nothing itself.

    Args:
        module: the program as it is printed.
    """
    computations = {
        name: replace(part, instructions=dict(part.instructions)) for name, part in module.computations.items()
    }
    for computation in computations.values():
        for loop in tuple(computation):
            if loop.opcode == "while" and loop.trips is None:
                computation.instructions[loop.name] = replace(loop, counted=_rounds(module, computation, loop))
    return replace(module, computations=computations)


def _rounds(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Reads the rounds off `i < stop` in the condition, `i + step` in the body and what `i` begins with."""
    body, condition = (module.computations.get(_named(pattern, loop)) for pattern in (BODY, CONDITION))
    if body is None or condition is None or condition.root.opcode != "compare":
        return None
    if "direction=LT" not in condition.root.attributes:
        return None
    counter, bound = condition.operands(condition.root)
    index, stop = _index(condition, counter), _constant(condition, bound)
    if index is None or stop is None:
        return None
    start = _constant(computation, _part(computation, computation.operands(loop)[0], index))
    step = _step(body, _part(body, body.root, index), index)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(stop - start) // step))


def _named(pattern: re.Pattern[str], loop: Instruction) -> str:
    found = pattern.search(loop.attributes)
    return found[1] if found else ""


def _passed(computation: Computation, one: Instruction | None) -> Instruction | None:
    """The instruction whose result is passed on, unchanged, to this one."""
    while one is not None and one.opcode in PASSED_ON:
        one = next(iter(computation.operands(one)), None)
    return one


def _part(computation: Computation, whole: Instruction, index: int) -> Instruction | None:
    made = _passed(computation, whole)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return computation.instructions.get(made.operands[index])


def _index(computation: Computation, one: Instruction | None) -> int | None:
    """Which element of the loop's state an instruction is."""
    element = _passed(computation, one)
    if element is None or element.opcode != "get-tuple-element":
        return None
    found = re.search(r"\bindex=(\d+)", element.attributes)
    return int(found[1]) if found else None


def _constant(computation: Computation, one: Instruction | None) -> int | None:
    made = _passed(computation, one)
    if made is None or made.opcode != "constant" or not re.fullmatch(r"-?\d+", made.arguments):
        return None
    return int(made.arguments)


def _step(body: Computation, one: Instruction | None, index: int) -> int | None:
    total = _passed(body, one)
    if total is None or total.opcode != "add":
        return None
    parts = body.operands(total)
    steps = [_constant(body, part) for part in parts]
    if index not in [_index(body, part) for part in parts]:
        return None
    return next((step for step in steps if step is not None), None)
