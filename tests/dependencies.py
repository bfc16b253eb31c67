"""Dependency graph of a compiled or lowered module.

Edges are a superset of the real ones: a loop, a conditional or a call depends on all outside values read by its parts.
A missing path therefore proves independence.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax_moe_lb.aot.hlo import Computation, Instruction


@dataclass(frozen=True)
class Graph:
    """Instructions of one block.

    Args:
        operands: instructions read or awaited by each instruction.
        lines: text of each instruction, its regions and its called computations.
    """

    operands: dict[str, set[str]]
    lines: dict[str, list[str]]

    def holding(self, pattern: str) -> set[str]:
        """Return the instructions with a matching line."""
        return {name for name, lines in self.lines.items() if any(re.search(pattern, line) for line in lines)}

    def needs(self, names: Iterable[str]) -> set[str]:
        """Return all instructions that precede any of `names`."""
        found, todo = set(), list(names)
        while todo:
            new = self.operands.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found


def ancestors(body: Computation, instruction: Instruction) -> list[Instruction]:
    """Return the instructions preceding one inside its computation."""
    found: dict[str, Instruction] = {}
    todo = [instruction]
    while todo:
        new = [one for one in body.operands(todo.pop()) if one.name not in found]
        found |= {one.name: one for one in new}
        todo += new
    return list(found.values())


def of_compiled(text: str) -> Graph:
    """Return the graph of the entry computation of `compiled.as_text()`."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif " = " in line and name:
            computations[name].append(line.strip().removeprefix("ROOT "))
    called = r"(?:to_apply|calls|body|condition|branch_computations|called_computations)=(?:\{([^}]*)\}|%?([\w.-]+))"

    def inside(line: str, seen: set[str]) -> Iterator[str]:
        yield line
        for many, one in re.findall(called, line.split(", metadata=")[0]):
            for callee in re.findall(r"[\w.-]+", many or one):
                if callee not in seen:
                    seen.add(callee)
                    for inner in computations[callee]:
                        yield from inside(inner, seen)

    operands, lines = {}, {}
    for line in computations[entry]:
        out, body = line.split(" = ", 1)
        body = re.sub(called, "", body.split(", metadata=")[0])
        operands[out] = set(re.findall(r"%[\w.-]+", body))
        lines[out] = list(inside(line, set()))
    return Graph(operands, lines)


def of_lowered(text: str, marker: str) -> Graph:
    """Return the graph of the `shard_map` containing `marker`, in `lowered.as_text(debug_info=True)`.

    Values of a block and of its regions have different names, so an operation reads the names in its text, including
    regions. Each line is followed by the scopes of its location.
    """
    scopes = {
        name: re.findall(r'"([^"]*)"|(#loc\d+)', body) for name, body in re.findall(r"(#loc\d+) = loc\((.*)\)", text)
    }

    def located(line: str) -> str:
        names, todo = [], re.findall(r"#loc\d+", line)[-1:]
        while todo:
            for scope, inner in scopes.get(todo.pop(), ()):
                names.append(scope)
                todo += [inner] if inner else []
        return f"{line.split(' loc(')[0]} {' '.join(names)}"

    bodies = dict(re.findall(r"^  func\.func \w+ @([\w.]+)(.*?)^  \}", text, re.M | re.S))
    blocks = re.findall(r"^    [^\n]*sdy\.manual_computation.*?\n(.*?)^    \}", text, re.M | re.S)
    (block,) = [block for block in blocks if marker in block]
    operations = re.split(r"^(?= {6}%\w+(?::\d+)? = | {6}sdy\.return)", block, flags=re.M)
    texts = {re.match(r" *(%?[\w.]+)", one)[1]: one for one in operations if one.strip()}
    operands, lines = {}, {}
    for name, one in texts.items():
        operands[name] = (set(re.findall(r"%\w+", one)) & set(texts)) - {name}
        called, todo = set(), [one]
        lines[name] = []
        while todo:
            part = todo.pop()
            lines[name] += [located(line) for line in part.splitlines()]
            new = set(re.findall(r"call @([\w.]+)\(", part)) & set(bodies) - called
            called |= new
            todo += [bodies[callee] for callee in new]
    return Graph(operands, lines)
