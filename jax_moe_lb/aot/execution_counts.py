"""Number of executions per instruction of a program, and waits between host and device.

The trip count of a loop comes from the compiler or from the condition, and is 1 if neither gives it. Loops in
`IDLE_SCOPE` count 0. TPU compilers state no trip count, but their loops count from one constant to another. For a
conditional, the most expensive branch counts.

XLA launches the operations of a GPU from the host, one after another. Before each iteration of a `while` of unknown
length, and before each branch, it copies the condition to the host and waits, while the device idles. Inside a command
buffer, which CUDA runs as a graph, it does not wait. A device waits for a planner that runs as a host function of its
stream (`cudaLaunchHostFunc`). A TPU runs loops and branches itself and waits for host calls only.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jax_moe_lb.aot.hlo import Computation, Instruction, Module

BODY = re.compile(r"\bbody=%?([\w.\-]+)")
CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
PASSED_ON = ("copy", "bitcast", "copy-done", "copy-start")


def with_counted_loops(module: Module) -> Module:
    """Set `counted` of loops up to a constant if the compiler states no trip count."""
    computations = {
        name: replace(part, instructions=dict(part.instructions)) for name, part in module.computations.items()
    }
    for computation in computations.values():
        for loop in tuple(computation):
            if loop.opcode == "while" and loop.trips is None:
                computation.instructions[loop.name] = replace(loop, counted=_rounds(module, computation, loop))
    return replace(module, computations=computations)


def _rounds(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Derive the trip count from `i < stop` in the condition, `i + step` in the body, and the initial `i`."""
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
    """Return the instruction whose unchanged result this one passes on."""
    while one is not None and one.opcode in PASSED_ON:
        one = next(iter(computation.operands(one)), None)
    return one


def _part(computation: Computation, whole: Instruction, index: int) -> Instruction | None:
    made = _passed(computation, whole)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return computation.instructions.get(made.operands[index])


def _index(computation: Computation, one: Instruction | None) -> int | None:
    """Return the index of an instruction in the loop's state, or None if it is no element."""
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
"""Named scope of overflow rounds. They serve rows beyond the first round, so a balanced step runs none of them."""

SEARCH_SCOPE = "missed_mean"
"""Named scope of loops of the planner `exact` in jnp that run if its first plans miss the mean load."""

CostOf = Callable[[Computation, Instruction], int]
"""Function that returns the cost of one instruction other than control flow, in any unit."""


@dataclass(frozen=True)
class OperationCost:
    """Cost of one instruction."""

    instruction: Instruction  # the instruction
    computation: Computation  # its computation
    amount: int  # cost of one execution, in the unit of the cost function
    times: int = 1  # number of executions

    @property
    def total(self) -> int:
        """Cost of all executions."""
        return self.amount * self.times


def executed(module: Module, cost: CostOf, start: str = "") -> list[OperationCost]:
    """List the instructions with a nonzero cost, in execution order."""
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
    """List the costs inside a control-flow instruction; None for other instructions."""
    if instruction.opcode not in CONTROL_FLOW:
        return None
    parts = [executed(module, cost, called.name) for called in module.called(instruction)]
    if instruction.opcode == "conditional":
        return max(parts, key=total, default=[])
    times = rounds_of(instruction)
    return [replace(one, times=one.times * times) for part in parts for one in part if times]


def rounds_of(loop: Instruction) -> int:
    """Return the trip count of a loop in a balanced step; 1 for other instructions."""
    if loop.trips is not None:
        return loop.trips
    if loop.counted is not None:
        return loop.counted
    return 0 if IDLE_SCOPE in loop.text("op_name") else 1


def total(costs: list[OperationCost]) -> int:
    """Sum the costs over all executions."""
    return sum(one.total for one in costs)


THUNK = re.compile(r"^( *)(\d+): (k\w+)")
LABEL = re.compile(r"^ *(\w+):$")
HOST = "is_host_transfer=true"
MEGASCALE = "xla_megascale_runtime"
"""Runtime of transfers between TPU slices."""
NAMED = re.compile(r'profile_annotation: "([^"]*)"\s*(?:thunk_id: (\d+))?')


@dataclass
class Thunk:
    """Step of XLA's GPU runtime."""

    number: int  # number in the dumps
    kind: str  # XLA's name, such as `kWhile`
    label: str  # part of its parent, such as `body`
    depth: int  # indentation in columns
    children: list["Thunk"] = field(default_factory=list)  # thunks inside it


@dataclass(frozen=True)
class Launches:
    """Launches of a program's operations by XLA's GPU runtime."""

    kernels: Mapping[str, int] = field(default_factory=dict)  # kernels of each instruction, by its name
    in_graphs: frozenset[str] = frozenset()  # names of instructions inside of CUDA graphs


def launches(sequence: str, metadata: str) -> Launches:
    """Read the launches per instruction."""
    names = {int(number): name for name, number in NAMED.findall(metadata) if number}
    kernels: Counter[str] = Counter()
    inside: set[str] = set()

    def visit(thunk: Thunk, in_graph: bool) -> None:
        name = names.get(thunk.number)
        if name is not None and thunk.kind != "kCommandBuffer":
            kernels[name] += 1
            inside.update({name} if in_graph else ())
        for child in thunk.children:
            visit(child, in_graph or thunk.kind == "kCommandBuffer")

    for thunk in parse_thunks(sequence):
        visit(thunk, False)
    return Launches(kernels, frozenset(inside))


def host_waits(module: Module, sequence: str, metadata: str) -> int:
    """Count the waits of the host for the device in one run of a balanced step, and of the device for the host."""
    loops = {one.name: one for part in module.computations.values() for one in part if one.opcode == "while"}
    named = {int(number or 0): loops[name] for name, number in NAMED.findall(metadata) if name in loops}
    return sum(_waits(thunk, named) for thunk in parse_thunks(sequence)) + planners_on_host(module)


PLANNER = "moe_lb_plan_"
KERNEL = "_kernel"
"""End of the name of a planner that runs as a kernel."""
BESIDE = "_and_copy"
"""End of the name of a planner that a thread of the host runs beside the device."""


def planners_on_host(module: Module) -> int:
    """Count the planners in host functions of a GPU's stream in one run of a balanced step."""

    def is_on_host(_: Computation, one: Instruction) -> int:
        return int(one.target.startswith(PLANNER) and not one.target.endswith((KERNEL, BESIDE)))

    return total(executed(module, is_on_host))


def answers_from_host(module: Module) -> int:
    """Count the callback results awaited by a TPU in one run of a balanced step, without transfers between slices."""

    def is_answer(_: Computation, one: Instruction) -> int:
        return int(one.opcode == "recv-done" and HOST in one.attributes and MEGASCALE not in one.attributes)

    return total(executed(module, is_answer))


def _waits(thunk: Thunk, loops: Mapping[int, Instruction]) -> int:
    if thunk.kind == "kCommandBuffer":
        return 0
    inner = [(child.label, _waits(child, loops)) for child in thunk.children]
    if thunk.kind == "kWhile":
        loop = loops.get(thunk.number)
        rounds = rounds_of(loop) if loop else 1
        # The condition is read before every round and once at the end, unless the trip count is known.
        own = 0 if loop and loop.trips is not None else rounds + 1
        return own + rounds * sum(waits for _, waits in inner)
    if thunk.kind == "kConditional":
        branches = {label: sum(waits for name, waits in inner if name == label) for label, _ in inner}
        return 1 + max(branches.values(), default=0)
    return sum(waits for _, waits in inner)


def parse_thunks(sequence: str) -> list[Thunk]:
    """Parse the indented dump of the thunks into a tree."""
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
            # A label applies up to the next label of the same parent.
            thunk.label = siblings[-1].label if siblings and siblings[-1].depth == thunk.depth and not label else label
            siblings.append(thunk)
            path.append(thunk)
            label = ""
    return root.children
