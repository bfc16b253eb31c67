"""Memory of a compiled program: buffers at the peak, and bytes read and written.

Peak buffers come from dumps that XLA writes during compilation. Traffic is counted per operation without caches: each
operand of each operation counts once. A gather counts the rows read, and an update in place the rows changed. Copies by
copy engines in this package's custom calls are not included.
"""

import re
from dataclasses import dataclass, replace

from jax_moe_lb.aot.execution_counts import OperationCost, executed
from jax_moe_lb.aot.hlo import Computation, Instruction, Module
from jax_moe_lb.core.tpu_vectors import ALLOCATING_KERNEL

ALLOCATION = re.compile(r"^allocation \d+: (.*):$")
VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(\{[\d,]*\})?(?: \(phi\))? @\d+>(?: \(size=\d+,offset=(\d+)\))?")
SIZE = re.compile(r"\bsize (\d+)")
COLOR = re.compile(r"\bcolor (\d+)")
LIVE = re.compile(r"^    ([\w.\-]+)\{([\d,]*)\}: (\d+) bytes")


@dataclass(frozen=True)
class Buffer:
    """Array that lives at the memory peak of a program.

    Args:
        name: Name of its instruction; `name{1}` is the second result.
        nbytes: Size in bytes.
        shape: Dtype and dimensions.
        holds: Name in the traced program.
        source: Python line of its origin.
    """

    name: str
    nbytes: int
    shape: str
    holds: str
    source: str


@dataclass(frozen=True)
class HloValue:
    """Result of an instruction."""

    computation: Computation  # computation of the instruction
    instruction: Instruction  # the instruction
    index: int | None = None  # number of the result, or None for all

    @property
    def shape(self) -> str:
        """Shape of the result, or of the first of several."""
        shapes = self.instruction.shapes[self.index or 0 :]
        return str(shapes[0]) if shapes else ""


def peak_buffers(module: Module, live_ranges: str, assignment: str, fast_spaces: frozenset[int]) -> list[Buffer]:
    """List the temporaries that live at the peak, largest first."""
    where = {one.name: HloValue(part, one) for part in module.computations.values() for one in part}
    temporary = _temporaries(assignment, fast_spaces)
    found, taken = [], set()
    for name, index, nbytes in _live_at_peak(live_ranges):
        key = f"{name}{{{index}}}" if index else name
        # A buffer changed in place appears under several names.
        if key in temporary and name in where and temporary[key] not in taken:
            taken |= {temporary[key]} - {None}
            value = replace(where[name], index=int(index) if index.isdecimal() else None)
            origin = _origin(module, value).instruction
            found.append(Buffer(key, int(nbytes), value.shape, module.op_name(origin), module.source(origin)))
    return sorted(found, key=lambda one: one.nbytes, reverse=True)


def temporary_bytes(assignment: str, fast_spaces: frozenset[int]) -> int:
    """Sum the bytes of temporaries, including fragmentation."""
    # XLA's own statistics count the fragmentation twice on TPUs.
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
    """Return allocation and offset per temporary by name; None if the dump has no offset."""
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
    """Return the original value behind copies, views, and the state of loops."""
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
    """Return the initial state of the loop whose parameter the value is."""
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
"""Prefixes of custom calls without traffic: calls of compilers move no bytes. Calls of this package plan, and start and
await copies; most of the operands only enforce order."""

PASSES_ON = {"bitcast", "convert", "copy", "reshape", "transpose"}
"""Operations inside a fusion that pass on the operand element by element."""

PICKS = {"gather", "dynamic-slice", "slice"}
UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
"""Operations that change a part of the first operand in place, and the number of the operand with the new values."""


@dataclass(frozen=True, eq=False)
class MemoryTraffic:
    """Counter of the bytes read and written by the instructions of a module."""

    module: Module  # the program
    # XLA's numbers of memory spaces outside the device's main memory; they cost no traffic
    fast_spaces: frozenset[int] = frozenset()

    def costs(self) -> list[OperationCost]:
        """List the operations with the bytes moved by one execution of each."""
        return executed(self.module, self.nbytes)

    def nbytes(self, computation: Computation, instruction: Instruction) -> int:
        """Count the bytes read and written by an instruction."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith(("-start", "-update")) or instruction.target.startswith(FREE_TARGETS):
            return 0
        if instruction.name.startswith(ALLOCATING_KERNEL):
            return 0
        if opcode == "fusion":
            return self._fused(computation, instruction, instruction)
        if opcode.endswith("-done"):
            return self._transfer(computation, instruction)
        return self._plain(computation, instruction)

    def _held(self, instruction: Instruction) -> int:
        return sum(shape.nbytes for shape in instruction.shapes if shape.space not in self.fast_spaces)

    def _plain(self, computation: Computation, instruction: Instruction) -> int:
        operands, opcode = computation.operands(instruction), instruction.opcode
        if opcode == "ragged-all-to-all":
            return self._exchanged(operands[0], instruction)
        if opcode in UPDATES:
            return 2 * self._held(operands[UPDATES[opcode]])
        if opcode in PICKS:
            return 2 * self._held(instruction)
        # A kernel may have an operand twice, for two blocks of it.
        unique = {one.name: one for one in operands}.values()
        return sum(map(self._held, unique)) + self._held(instruction)

    def _transfer(self, computation: Computation, end: Instruction) -> int:
        """Count an asynchronous operation at the end, which has the shape of the result."""
        start = computation.start(end)
        operands = computation.operands(start)
        if start.opcode == "async-start" and (called := self.module.called(start)):
            # An asynchronous call runs only its callee, such as an update in place.
            return self.nbytes(called[0], called[0].root)
        if start.opcode == "fusion-start" and (called := self.module.called(start)):
            root = called[0].root
            # The callee is a computation around the fusion, or the fusion's own computation.
            wraps = root.opcode == "fusion"
            return self.nbytes(called[0], root) if wraps else self._fused(computation, start, end)
        if start.opcode == "ragged-all-to-all-start":
            return self._exchanged(operands[0], end)
        if start.opcode in ("copy-start", "slice-start"):
            # The bytes read equal the bytes written.
            from_here = operands and self._held(operands[0])
            return (end.nbytes if from_here else 0) + self._held(end)
        return sum(map(self._held, operands)) + self._held(end)

    def _exchanged(self, operand: Instruction, result: Instruction) -> int:
        """Count the maximum bytes moved by an exchange of slices if ranks send as much as they receive."""
        return 2 * min(self._held(operand), self._held(result))

    def _fused(self, computation: Computation, instruction: Instruction, end: Instruction) -> int:
        """Count a fusion: the operands of `instruction`, and the result at `end`."""
        (called,) = self.module.called(instruction)[:1]
        operands = [computation.instructions.get(name) for name in instruction.operands]
        read = sum(
            min(self._held(operand), self._read(called.name, parameter.name))
            for operand, parameter in zip(operands, called.parameters, strict=False)
            if operand is not None
        )
        return read + self._written(called, end)

    def _read(self, name: str, of: str) -> int:
        """Count the bytes read of a value inside a fusion, at most its size."""
        computation = self.module.computations[name]
        whole, total = computation.instructions[of].nbytes, 0
        if computation.instructions[of] is computation.root:
            # The fusion returns the whole value, as a lone transpose does.
            return whole
        for user, number in computation.users[of]:
            if user.opcode in PASSES_ON:
                # In bytes of the source, because a conversion may change the width.
                total += self._read(name, user.name) * whole // max(user.nbytes, 1)
            elif user.opcode in PICKS and number == 0:
                total += user.nbytes
            elif user.opcode in UPDATES and number == 0:
                # The rest of the operand is not read.
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
    """Count the changed bytes of a result: for an update in place, only the update."""
    whole = instruction.nbytes
    while instruction.opcode in PASSES_ON and computation.operands(instruction):
        instruction = computation.operands(instruction)[0]
    if instruction.opcode in UPDATES:
        operands = computation.operands(instruction)
        return operands[UPDATES[instruction.opcode]].nbytes
    return whole
