"""Memory of a compiled program: buffers at the peak, and bytes that it reads and writes.

Peak buffers come from the dumps that XLA writes beside a program. Traffic is counted per operation without caches: each
operand of each operation counts once. A gather counts the rows that it reads, and an update in place the rows that it
changes. Transfers of copy engines for custom calls of this package are left out.
"""

import re
from dataclasses import dataclass, replace

from jax_moe_lb.aot.execution_counts import OperationCost, executed
from jax_moe_lb.aot.hlo import Computation, Instruction, Module

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
class HloValue:
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
    where = {one.name: HloValue(part, one) for part in module.computations.values() for one in part}
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


def _origin(module: Module, value: HloValue) -> HloValue:
    """Finds what first made a value: behind copies, views, and the state of loops."""
    operands = value.computation.operands(value.instruction)
    opcode, before = value.instruction.opcode, None
    if opcode in ("bitcast", "copy") and operands:
        before = replace(value, instruction=operands[0])
    elif opcode == "get-tuple-element":
        number = re.search(r"index=(\d+)", value.instruction.attributes)
        before = HloValue(value.computation, operands[0], int(number[1]) if number else None)
    elif opcode == "tuple" and value.index is not None:
        before = HloValue(value.computation, operands[value.index])
    elif opcode == "parameter":
        before = _handed(module, value)
    return _origin(module, before) if before else value


def _handed(module: Module, value: HloValue) -> HloValue | None:
    """Finds what a loop is given as its state, of which the value is the parameter."""
    for part in module.computations.values():
        for caller in part:
            if caller.opcode == "while" and value.computation.name in caller.called:
                return HloValue(part, part.operands(caller)[0], value.index)
    return None


FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
FREE_TARGETS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "GatherScatterIndices", "moe_lb_")
"""Those of compilers move nothing. Ours plan, and start and await copies; most of their operands only set the order."""

PASSES_ON = {"bitcast", "convert", "copy", "reshape", "transpose"}
"""Inside a fusion these hand on what they read, element by element."""

PICKS = {"gather", "dynamic-slice", "slice"}
UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
"""These change a part of their first operand in place: the number is that of the operand with the new values."""


@dataclass(frozen=True, eq=False)
class MemoryTraffic:
    """It counts the bytes that instructions of a module move.

    Args:
        module: the program.
        fast_spaces: memories that are not the device's own, by XLA's numbers: they cost nothing.
    """

    module: Module
    fast_spaces: frozenset[int] = frozenset()

    def costs(self) -> list[OperationCost]:
        """Lists the operations that run with the bytes that one run of each moves."""
        return executed(self.module, self.nbytes)

    def nbytes(self, computation: Computation, instruction: Instruction) -> int:
        """Counts what an instruction moves, both ways, in bytes."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-start", "-update")) or instruction.target.startswith(FREE_TARGETS):
            return 0
        if opcode == "fusion":
            return self._fusion(computation, instruction)
        if opcode.endswith("-done"):
            return self._transfer(computation, instruction)
        return self._plain(computation, instruction)

    def _held(self, instruction: Instruction) -> int:
        """Counts the bytes of a result that lie in the device's memory."""
        return sum(shape.nbytes for shape in instruction.shapes if shape.space not in self.fast_spaces)

    def _plain(self, computation: Computation, instruction: Instruction) -> int:
        operands, opcode = computation.operands(instruction), instruction.opcode
        if opcode == "ragged-all-to-all":
            return self._exchanged(operands[0], instruction)
        if opcode in UPDATES:
            return 2 * self._held(operands[UPDATES[opcode]])
        if opcode in PICKS:
            return 2 * self._held(instruction)
        return sum(map(self._held, operands)) + self._held(instruction)

    def _transfer(self, computation: Computation, end: Instruction) -> int:
        """Counts an asynchronous operation where it ends: there its result is known."""
        start = computation.operands(end)[0]
        while start.opcode.endswith("-update"):
            start = computation.operands(start)[0]
        operands = computation.operands(start)
        if start.opcode == "async-start" and (called := self.module.called(start)):
            # It runs what it calls, such as an update in place, and nothing else.
            return self.nbytes(called[0], called[0].root)
        if start.opcode == "fusion-start" and (called := self.module.called(start)):
            root = called[0].root
            # Of a fusion it calls what wraps it, or the fusion's own computation.
            wraps = root.opcode == "fusion"
            return self.nbytes(called[0], root) if wraps else self._fused(computation, start, end)
        if start.opcode == "ragged-all-to-all-start":
            return self._exchanged(operands[0], end)
        if start.opcode in ("copy-start", "slice-start"):
            # As much is read as arrives.
            from_here = operands and self._held(operands[0])
            return (end.nbytes if from_here else 0) + self._held(end)
        return sum(map(self._held, operands)) + self._held(end)

    def _exchanged(self, operand: Instruction, result: Instruction) -> int:
        """Counts what an exchange of slices moves at most where ranks send as much as they get."""
        return 2 * min(self._held(operand), self._held(result))

    def _fusion(self, computation: Computation, instruction: Instruction) -> int:
        return self._fused(computation, instruction, instruction)

    def _fused(self, computation: Computation, instruction: Instruction, end: Instruction) -> int:
        """Counts a fusion, given where it starts, with what it reads, and where its result is known."""
        (called,) = self.module.called(instruction)[:1]
        operands = [computation.instructions.get(name) for name in instruction.operands]
        read = sum(
            min(self._held(operand), self._read(called.name, parameter.name))
            for operand, parameter in zip(operands, called.parameters, strict=False)
            if operand is not None
        )
        return read + self._written(called, end)

    def _read(self, name: str, of: str) -> int:
        """Counts how much of a value inside a fusion is read, at most all of it."""
        computation = self.module.computations[name]
        whole, total = computation.instructions[of].nbytes, 0
        if computation.instructions[of] is computation.root:
            # Handed on out of the fusion, as a transpose alone is.
            return whole
        for user, number in computation.users[of]:
            if user.opcode in PASSES_ON:
                # Counted in its own bytes: what is converted may be wider than what comes of it.
                total += self._read(name, user.name) * whole // max(user.nbytes, 1)
            elif user.opcode in PICKS and number == 0:
                total += user.nbytes
            elif user.opcode in UPDATES and number == 0:
                # What is not updated stays where it is.
                continue
            elif user.opcode == "fusion":
                inner = self.module.called(user)[0]
                total += self._read(inner.name, inner.parameters[number].name)
            else:
                return whole
        return min(total, whole)

    def _written(self, called: Computation, instruction: Instruction) -> int:
        root = called.root
        parts = called.operands(root) if root.opcode == "tuple" else [root]
        if len(parts) != len(instruction.shapes):
            return self._held(instruction)
        return sum(
            min(shape.nbytes, _changed(called, part))
            for shape, part in zip(instruction.shapes, parts, strict=True)
            if shape.space not in self.fast_spaces
        )


def _changed(computation: Computation, instruction: Instruction) -> int:
    """Counts the bytes of a result that are new: of an update in place only the update."""
    whole = instruction.nbytes
    while instruction.opcode in PASSES_ON and computation.operands(instruction):
        instruction = computation.operands(instruction)[0]
    if instruction.opcode in UPDATES:
        operands = computation.operands(instruction)
        return operands[UPDATES[instruction.opcode]].nbytes
    return whole
