"""How often host and device wait for each other inside one run of a program: each time, the device runs dry.

XLA launches the operations of a GPU one after another from the host. Before a `while` of unknown length goes on and
before a branch is taken, it copies the condition to the host and waits. Inside a command buffer, which CUDA runs as a
graph, it does not. A TPU runs loops and branches itself, and waits where the host is called.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax_moe_lb.compiled.executed import executed, rounds_of, total
from jax_moe_lb.compiled.hlo import Instruction, Module

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
