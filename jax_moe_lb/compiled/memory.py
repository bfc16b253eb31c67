"""Which arrays fill a device's memory at the peak, from the dumps that XLA writes beside a program."""

import re
from dataclasses import dataclass, replace

from jax_moe_lb.compiled.hlo import Computation, Instruction, Module

ALLOCATION = re.compile(r"^allocation \d+: (.*):$")
VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @\d+>(?: \(size=\d+,offset=(\d+)\))?")
SIZE = re.compile(r"\bsize (\d+)")
COLOR = re.compile(r"\bcolor (\d+)")
LIVE = re.compile(r"^    ([\w.\-]+)\{([\d,]*)\}: (\d+) bytes")


@dataclass(frozen=True)
class Buffer:
    """This is an array that lives at the peak of a program's memory.

    Args:
        name: the instruction that makes it; `name{1}` is the second of its results.
        nbytes: its size.
        shape: its dtype and dimensions.
        holds: what of the traced program it is.
        source: the line of Python that it comes from.
    """

    name: str
    nbytes: int
    shape: str
    holds: str
    source: str


@dataclass(frozen=True)
class Value:
    """This is what an instruction makes.

    Args:
        computation: where the instruction stands.
        instruction: the instruction.
        index: which of its results it is, `None` for all.
    """

    computation: Computation
    instruction: Instruction
    index: int | None = None

    @property
    def shape(self) -> str:
        """Writes its shape, the first of several."""
        shapes = self.instruction.shapes[self.index or 0 :]
        return str(shapes[0]) if shapes else ""


def peak_buffers(module: Module, live_ranges: str, assignment: str, fast_spaces: frozenset[int]) -> list[Buffer]:
    """Lists the temporaries that live at the peak, the largest first.

    Args:
        module: the program, as it was when these dumps were written.
        live_ranges: XLA's dump `live-range`.
        assignment: XLA's dump `buffer-assignment`, which tells temporaries from arguments and results.
        fast_spaces: memories that are not the device's own, by XLA's numbers.
    """
    where = {one.name: Value(part, one) for part in module.computations.values() for one in part}
    temporary = _temporaries(assignment, fast_spaces)
    found, taken = [], set()
    for name, index, nbytes in _live_at_peak(live_ranges):
        key = f"{name}{{{index}}}" if index else name
        # What is changed in place has several names.
        if key in temporary and name in where and temporary[key] not in taken:
            taken |= {temporary[key]} - {None}
            value = replace(where[name], index=int(index) if index.isdecimal() else None)
            origin = _origin(module, value).instruction
            found.append(Buffer(key, int(nbytes), value.shape, module.op_name(origin), module.source(origin)))
    return sorted(found, key=lambda one: one.nbytes, reverse=True)


def temporary_bytes(assignment: str, fast_spaces: frozenset[int]) -> int:
    """Sums the room for temporaries, with the gaps that no buffer fits into.

    XLA's own statistics count the gaps twice for TPUs.

    Args:
        assignment: XLA's dump `buffer-assignment`; empty where there is none.
        fast_spaces: memories that are not the device's own, by XLA's numbers.
    """
    headers = (found[1] for line in assignment.splitlines() if (found := ALLOCATION.match(line)))
    sizes = (SIZE.search(header) for header in headers if _is_temporary(header, fast_spaces))
    return sum(int(size[1]) for size in sizes if size)


def _live_at_peak(live_ranges: str) -> list[tuple[str, str, str]]:
    _, _, peak = live_ranges.partition("(peak):\n")
    found = []
    for line in peak.splitlines():
        match = LIVE.match(line)
        if match is None:
            break
        found.append((match[1], match[2], match[3]))
    return found


def _temporaries(assignment: str, fast_spaces: frozenset[int]) -> dict[str, tuple[str, str] | None]:
    """Finds by name where each temporary lies, allocation and offset; `None` where the dump does not say."""
    places: dict[str, tuple[str, str] | None] = {}
    allocation, is_temporary = "", False
    for line in assignment.splitlines():
        if found := ALLOCATION.match(line):
            allocation, is_temporary = line, _is_temporary(found[1], fast_spaces)
        elif is_temporary and (value := VALUE.match(line)):
            places[value[1] + (value[2] or "").replace("{}", "")] = (allocation, value[3]) if value[3] else None
    return places


def _is_temporary(header: str, fast_spaces: frozenset[int]) -> bool:
    color = COLOR.search(header)
    return "preallocated-temp" in header and (not color or int(color[1]) not in fast_spaces)


def _origin(module: Module, value: Value) -> Value:
    """Finds what first made a value: behind copies, views, and the state of loops."""
    operands = value.computation.operands(value.instruction)
    opcode, before = value.instruction.opcode, None
    if opcode in ("bitcast", "copy") and operands:
        before = replace(value, instruction=operands[0])
    elif opcode == "get-tuple-element":
        number = re.search(r"index=(\d+)", value.instruction.attributes)
        before = Value(value.computation, operands[0], int(number[1]) if number else None)
    elif opcode == "tuple" and value.index is not None:
        before = Value(value.computation, operands[value.index])
    elif opcode == "parameter":
        before = _handed(module, value)
    return _origin(module, before) if before else value


def _handed(module: Module, value: Value) -> Value | None:
    """Finds what a loop is given as its state, of which the value is the parameter."""
    for part in module.computations.values():
        for caller in part:
            if caller.opcode == "while" and value.computation.name in caller.called:
                return Value(part, part.operands(caller)[0], value.index)
    return None
