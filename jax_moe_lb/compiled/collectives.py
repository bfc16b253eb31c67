"""The collectives of a program: over which mesh axes, how many bytes, and what runs meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass

from jax_moe_lb.compiled.executed import CONTROL_FLOW, Cost, CostOf, executed, total
from jax_moe_lb.compiled.groups import axes_of
from jax_moe_lb.compiled.hlo import Computation, Instruction, Module

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

REAL_WORK_BYTES = 10**6
"""An operation that moves less is no work that could hide a collective."""


@dataclass(frozen=True)
class Collective:
    """These are the collectives of one kind over the same axes.

    Args:
        kind: as XLA names it, such as `all-gather`.
        axes: the mesh axes; empty if every device is alone in its group, `None` if the groups fit no axes.
        count: how many run.
        nbytes: what one device gives or gets in all of them, the larger of the two, in bytes. Of a ragged all-to-all it
            is the whole buffer, of which the rows that there are travel.
        asynchronous: how many of them run beside other work.
        over: the work that runs beside them: the largest operations by name, of a loop its own.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int
    nbytes: int
    asynchronous: int
    over: tuple[str, ...]


def collectives(module: Module, axes: Mapping[str, int], moved: CostOf) -> list[Collective]:
    """Lists the collectives of a program, the largest first.

    Args:
        module: the scheduled program.
        axes: names and sizes of the mesh.
        moved: the HBM bytes of an instruction, by which work is told from bookkeeping.
    """
    found: dict[tuple[str, tuple[str, ...] | None], list[tuple[Cost, list[str]]]] = {}
    for cost in executed(module, lambda computation, one: _nbytes(module, computation, one)):
        beside = _beside(module, cost.computation, cost.instruction, moved)
        for _, inner in _exchanges(module, cost.computation, cost.instruction):
            found.setdefault((_kind(inner), axes_of(inner, axes)), []).append((cost, beside))
    merged = [_merged(*key, members) for key, members in found.items()]
    return sorted(merged, key=lambda one: one.nbytes, reverse=True)


def _merged(kind: str, axes: tuple[str, ...] | None, members: list[tuple[Cost, list[str]]]) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        count=sum(cost.times for cost, _ in members),
        nbytes=total([cost for cost, _ in members]),
        asynchronous=sum(cost.times for cost, beside in members if beside),
        over=tuple(dict.fromkeys(name for _, beside in members for name in beside)),
    )


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _exchanges(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """Finds the collectives that an instruction is or, as a fusion or an asynchronous call, contains."""
    if _kind(instruction) in KINDS:
        return [(computation, instruction)]
    if instruction.opcode not in ("fusion", "async-start"):
        return []
    return [
        found for called in module.called(instruction) for one in called for found in _exchanges(module, called, one)
    ]


def _nbytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    return sum(_own_nbytes(*found) for found in _exchanges(module, computation, instruction))


def _own_nbytes(computation: Computation, instruction: Instruction) -> int:
    given = computation.operands(instruction)
    if _kind(instruction) == "ragged-all-to-all":
        # The others are the buffer that it writes into, offsets and sizes.
        return given[0].nbytes
    # The result of a start holds the operands too, and what the transfer needs.
    got = _end(computation, instruction) if instruction.opcode.endswith("-start") else instruction
    return max(sum(one.nbytes for one in given), got.nbytes if got else 0)


def _end(computation: Computation, instruction: Instruction) -> Instruction | None:
    """Finds where an asynchronous operation is waited for."""
    for user, _ in computation.users[instruction.name]:
        if user.opcode.endswith("-done"):
            return user
        if user.opcode.endswith("-update"):
            return _end(computation, user)
    return None


def _beside(module: Module, computation: Computation, instruction: Instruction, moved: CostOf) -> list[str]:
    """Names the real work between start and end of a collective, the largest first; none if it is synchronous."""
    end = _end(computation, instruction)
    if end is None or not instruction.opcode.endswith("-start"):
        return []
    names = list(computation.instructions)
    between = names[names.index(instruction.name) + 1 : names.index(end.name)]
    work = [(_work(module, computation, computation.instructions[name], moved), name) for name in between]
    return [name for size, name in sorted(work, reverse=True) if size >= REAL_WORK_BYTES]


def _work(module: Module, computation: Computation, instruction: Instruction, moved: CostOf) -> int:
    if instruction.opcode in CONTROL_FLOW:
        return sum(total(executed(module, moved, called.name)) for called in module.called(instruction))
    # Another transfer takes the same links, and hides nothing.
    is_transfer = _kind(instruction) in KINDS or instruction.opcode.endswith(("-start", "-done", "-update"))
    return 0 if is_transfer else moved(computation, instruction)
