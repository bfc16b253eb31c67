"""How often each instruction of a program runs, and how often host and device wait for each other.

A loop runs as often as the compiler or its condition states, and once if neither does; loops in `IDLE_SCOPE` do not
run. TPU compilers state no trip count: their loops count from one constant to another. The most expensive branch of a
conditional counts.

XLA launches the operations of a GPU from the host, one after another. Before each iteration of a `while` of unknown
length and before each branch it copies the condition to the host and waits, and the device idles. Inside a command
buffer, which CUDA runs as a graph, it does not wait. A TPU runs loops and branches itself and waits for host calls
only.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jax_moe_lb.aot.hlo import Computation, Instruction, Module

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


CONTROL_FLOW = ("while", "conditional", "call")

IDLE_SCOPE = "further_rounds"
"""Loops whose operations carry this name serve what the first round has no room for: a balanced step runs none."""

CostOf = Callable[[Computation, Instruction], int]
"""It tells the cost of one instruction that is not control flow, in any unit."""


@dataclass(frozen=True)
class OperationCost:
    """This is what one instruction costs.

    Args:
        instruction: the instruction.
        computation: where it stands.
        amount: what one run of it costs, in the unit of whoever asked.
        times: how often it runs.
    """

    instruction: Instruction
    computation: Computation
    amount: int
    times: int = 1

    @property
    def total(self) -> int:
        """Sums over all runs."""
        return self.amount * self.times


def executed(module: Module, cost: CostOf, start: str = "") -> list[OperationCost]:
    """Lists what costs something, in the order in which it runs.

    Args:
        module: the program.
        cost: of one instruction that is not control flow, in any unit.
        start: the computation to begin with; the whole program by default.
    """
    computation = module.computations[start or module.entry]
    costs: list[OperationCost] = []
    for instruction in computation:
        inner = _inner(module, cost, instruction)
        if inner is not None:
            costs += inner
        elif amount := cost(computation, instruction):
            costs.append(OperationCost(instruction, computation, amount))
    return costs


def _inner(module: Module, cost: CostOf, instruction: Instruction) -> list[OperationCost] | None:
    """Lists the costs of what control flow runs, `None` for an instruction that is none."""
    if instruction.opcode not in CONTROL_FLOW:
        return None
    parts = [executed(module, cost, called.name) for called in module.called(instruction)]
    if instruction.opcode == "conditional":
        return max(parts, key=total, default=[])
    times = rounds_of(instruction)
    return [replace(one, times=one.times * times) for part in parts for one in part if times]


def rounds_of(loop: Instruction) -> int:
    """Tells how often a loop runs in a balanced step; other instructions run once."""
    if loop.trips is not None:
        return loop.trips
    if loop.counted is not None:
        return loop.counted
    return 0 if IDLE_SCOPE in loop.text("op_name") else 1


def total(costs: list[OperationCost]) -> int:
    """Sums costs."""
    return sum(one.total for one in costs)


THUNK = re.compile(r"^( *)(\d+): (k\w+)")
LABEL = re.compile(r"^ *(\w+):$")
HOST = "is_host_transfer=true"
NAMED = re.compile(r'profile_annotation: "([^"]*)"\s*(?:thunk_id: (\d+))?')


@dataclass
class Thunk:
    """This is a step of XLA's runtime.

    Args:
        number: its number in the dumps.
        kind: as XLA names it, such as `kWhile`.
        label: the part of its parent that it belongs to, such as `body`.
        depth: the columns it is indented by.
        children: what it runs.
    """

    number: int
    kind: str
    label: str
    depth: int
    children: list["Thunk"] = field(default_factory=list)


def host_waits(module: Module, sequence: str, metadata: str) -> int:
    """Counts how often the host waits in one run of a balanced step.

    Args:
        module: the program, which knows how often some loops run.
        sequence: XLA's dump of the thunks, `thunk_sequence_after_thunk_passes`.
        metadata: its dump of their names, `thunk_metadata`.
    """
    loops = {one.name: one for part in module.computations.values() for one in part if one.opcode == "while"}
    named = {int(number or 0): loops[name] for name, number in NAMED.findall(metadata) if name in loops}
    return sum(_waits(thunk, named) for thunk in parse_thunks(sequence))


def answers_from_host(module: Module) -> int:
    """Counts the results of callbacks that a TPU waits for in one run of a balanced step.

    Args:
        module: the program.
    """
    return total(executed(module, lambda _, one: int(one.opcode == "recv-done" and HOST in one.attributes)))


def _waits(thunk: Thunk, loops: Mapping[int, Instruction]) -> int:
    if thunk.kind == "kCommandBuffer":
        return 0
    inner = [(child.label, _waits(child, loops)) for child in thunk.children]
    if thunk.kind == "kWhile":
        loop = loops.get(thunk.number)
        rounds = rounds_of(loop) if loop else 1
        # The condition is looked at before every round, and once more to end; not where their number is known.
        own = 0 if loop and loop.trips is not None else rounds + 1
        return own + rounds * sum(waits for _, waits in inner)
    if thunk.kind == "kConditional":
        branches = {label: sum(waits for name, waits in inner if name == label) for label, _ in inner}
        return 1 + max(branches.values(), default=0)
    return sum(waits for _, waits in inner)


def parse_thunks(sequence: str) -> list[Thunk]:
    """Reads the dump of the thunks into a tree; its branches are indented.

    Args:
        sequence: the text of the dump.
    """
    root = Thunk(-1, "kSequential", "", -1)
    path, label = [root], ""
    for line in sequence.splitlines():
        if found := LABEL.match(line):
            label = found[1]
        elif found := THUNK.match(line):
            thunk = Thunk(int(found[2]), found[3], label, len(found[1]))
            while path[-1].depth >= thunk.depth:
                path.pop()
            siblings = path[-1].children
            # A label holds until the next one of the same parent.
            thunk.label = siblings[-1].label if siblings and siblings[-1].depth == thunk.depth and not label else label
            siblings.append(thunk)
            path.append(thunk)
            label = ""
    return root.children
