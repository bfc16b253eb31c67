"""What a program reads from and writes to the device's memory, operation by operation.

Caches are left out: what an operation reads counts once for each operation, and what it writes as well. Of a gather
only what it picks counts, of an update in place only what it changes. What copy engines do for the custom calls of this
package is left out too.
"""

from dataclasses import dataclass

from jax_moe_lb.compiled.executed import Cost, executed
from jax_moe_lb.compiled.hlo import Computation, Instruction, Module

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

    def costs(self) -> list[Cost]:
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
