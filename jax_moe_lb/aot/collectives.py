"""Collectives of a compiled program: mesh axes, bytes, and overlapping work.

The axes follow from the device groups of an instruction.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jax_moe_lb.aot.execution_counts import CONTROL_FLOW, CostOf, OperationCost, executed, total
from jax_moe_lb.aot.hlo import Computation, Instruction, Module
from jax_moe_lb.collectives.exchange_paths import ExchangePath, PathChoice
from jax_moe_lb.collectives.one_shot_lists import blocks_per_peer

LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
NUMBERED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^{}:]*)\}")

Groups = frozenset[frozenset[int]]


def axes_of(instruction: Instruction, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes of a collective."""
    attributes = instruction.attributes
    if "source_target_pairs" in attributes:
        return _axes_of_pairs(_listed(attributes), axes)
    groups = _listed(attributes) or _numbered(attributes) or _named(attributes)
    # Empty or missing groups mean one group of all devices.
    everyone = "replica_groups={}" in attributes or "replica_groups=" not in attributes
    return tuple(axes) if everyone else _axes_of_groups(frozenset(map(frozenset, groups)), axes)


def _listed(attributes: str) -> list[tuple[int, ...]]:
    found = LISTED.search(attributes)
    groups = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return [tuple(map(int, group.split(","))) for group in groups]


def _numbered(attributes: str) -> list[tuple[int, ...]]:
    """Parse `[2,8]<=[8,2]T(1,0)`: device numbers in order, reshaped, transposed, and split into groups."""
    found = NUMBERED.search(attributes)
    if found is None:
        return []
    shape, sizes = ([int(size) for size in part.split(",")] for part in (found[1], found[2]))
    order = [int(axis) for axis in found[3].split(",")] if found[3] else list(range(len(sizes)))
    devices = np.arange(np.prod(sizes)).reshape(sizes).transpose(order)
    return [tuple(group) for group in devices.reshape(shape[0], -1).tolist()]


def _named(attributes: str) -> list[tuple[int, ...]]:
    """Parse `mesh['a'=2,'b'=8] {'b'}`: groups over axes of XLA's own mesh, whose names may differ from JAX's."""
    found = NAMED.search(attributes)
    if found is None:
        return []
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    chosen = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", found[2])]
    devices = np.arange(np.prod(list(sizes.values()), dtype=int)).reshape(tuple(sizes.values()))
    return [tuple(group) for group in _groups_over(devices, tuple(chosen)).tolist()]


def _groups_over(devices: np.ndarray, chosen: tuple[int, ...]) -> np.ndarray:
    """Split devices into groups whose members differ only along the chosen axes."""
    last = np.moveaxis(devices, chosen, range(devices.ndim - len(chosen), devices.ndim))
    return last.reshape(-1, int(np.prod([devices.shape[axis] for axis in chosen], dtype=int)))


def _axes_of_groups(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    names = list(axes)
    devices = np.arange(np.prod(list(axes.values()), dtype=int)).reshape(tuple(axes.values()))
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), size):
            if frozenset(map(frozenset, _groups_over(devices, chosen).tolist())) == groups:
                return tuple(names[axis] for axis in chosen)
    return None


def _axes_of_pairs(pairs: list[tuple[int, ...]], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which a sender differs from the receiver."""
    places = [np.array(np.unravel_index(pair, tuple(axes.values()))) for pair in pairs]
    moved = {axis for place in places for axis in np.flatnonzero(place[:, 0] != place[:, 1])}
    return tuple(name for axis, name in enumerate(axes) if axis in moved)


KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

RAGGED = "ragged-all-to-all"

REAL_WORK_BYTES = 10**6
"""Minimum bytes moved by an operation that counts as overlapping work."""


@dataclass(frozen=True)
class ExchangeForm:
    """Form of the ragged exchanges of a program."""

    updates_per_peer: int  # entries of the lists for each peer
    blocks_per_peer: int | None  # thread blocks sharing these entries in XLA's one-shot kernel; None on other paths
    path: str  # implementation predicted by `exchange_path`
    reason: str  # condition of the choice of `path`


Key = tuple[str, tuple[str, ...] | None, ExchangeForm | None]
"""Kind, mesh axes and form of collectives that are listed together."""

PathOf = Callable[[tuple[str, ...]], PathChoice]
"""Function from mesh axes to the path of an exchange over them."""


@dataclass(frozen=True)
class ProgramCollective:
    """All collectives of one kind and form over the same axes.

    Args:
        kind: XLA's name, such as `all-gather`, with "between slices" for transfers through the hosts of TPU slices.
        axes: Mesh axes; `()` if every device is alone in the group, None if the groups match no axes.
        count: Number of executions.
        nbytes: Bytes sent or received by one device over all executions, whichever is larger. For a ragged all-to-all,
            the whole buffer, of which only the filled rows travel.
        asynchronous: Number of executions that overlap with other work.
        over: Overlapping work: the largest operations by name; for a loop, the loop itself.
        exchange: Form of a ragged exchange; None for other kinds and for groups that match no axes.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int
    nbytes: int
    asynchronous: int
    over: tuple[str, ...]
    exchange: ExchangeForm | None = None


def collectives(
    module: Module, axes: Mapping[str, int], moved: CostOf, path_of: PathOf | None = None
) -> list[ProgramCollective]:
    """List the collectives of a program, largest first."""
    found: list[tuple[Key, OperationCost]] = []
    for cost in executed(module, lambda computation, one: _nbytes(module, computation, one)):
        for computation, inner in exchanges(module, cost.computation, cost.instruction):
            over = axes_of(inner, axes)
            form = _form(computation, inner, over, axes, path_of) if path_of else None
            found.append(((kind_of(inner), over, form), cost))
    return merged(module, found, moved)


def _form(
    computation: Computation,
    instruction: Instruction,
    over: tuple[str, ...] | None,
    axes: Mapping[str, int],
    path_of: PathOf,
) -> ExchangeForm | None:
    if kind_of(instruction) != RAGGED or not over:
        return None
    operands, ranks, choice = computation.operands(instruction), math.prod(axes[name] for name in over), path_of(over)
    rows, updates = operands[0].shapes[0].dims[0], operands[2].shapes[0].dims[0] // ranks
    blocks = blocks_per_peer(updates, rows) if choice.path is ExchangePath.ONE_SHOT else None
    return ExchangeForm(updates, blocks, choice.path.value, choice.reason)


def merged(module: Module, found: Iterable[tuple[Key, OperationCost]], moved: CostOf) -> list[ProgramCollective]:
    """Add up the executions of equal collectives, each with the overlapping work; return the largest first."""
    groups: dict[Key, list[tuple[OperationCost, list[str]]]] = {}
    for key, cost in found:
        beside = work_between(module, cost.computation, cost.instruction, moved)
        groups.setdefault(key, []).append((cost, beside))
    listed = [
        ProgramCollective(
            kind=kind,
            axes=axes,
            count=sum(cost.times for cost, _ in members),
            nbytes=total([cost for cost, _ in members]),
            asynchronous=sum(cost.times for cost, beside in members if beside),
            over=tuple(dict.fromkeys(name for _, beside in members for name in beside)),
            exchange=exchange,
        )
        for (kind, axes, exchange), members in groups.items()
    ]
    return sorted(listed, key=lambda one: one.nbytes, reverse=True)


def kind_of(instruction: Instruction) -> str:
    """Return XLA's name of an operation without the mark of a start."""
    return instruction.opcode.removesuffix("-start")


def exchanges(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    """Return the collectives executed by an instruction, including those inside a fusion or an asynchronous call."""
    if kind_of(instruction) in KINDS:
        return [(computation, instruction)]
    if instruction.opcode not in ("fusion", "async-start"):
        return []
    return [
        found for called in module.called(instruction) for one in called for found in exchanges(module, called, one)
    ]


def _nbytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    return sum(exchanged_bytes(*found) for found in exchanges(module, computation, instruction))


def exchanged_bytes(computation: Computation, instruction: Instruction) -> int:
    """Count the larger of sent and received bytes of a collective; of a ragged one, the bytes of the whole operand."""
    given = computation.operands(instruction)
    if kind_of(instruction) == RAGGED:
        # The other operands are the output buffer, offsets and sizes.
        return given[0].nbytes
    # The result of a start also holds the operands and scratch buffers of the transfer.
    return max(sum(one.nbytes for one in given), result_of(computation, instruction).nbytes)


def result_of(computation: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction with the result: for an asynchronous operation, its end."""
    found = computation.end(instruction) if instruction.opcode.endswith("-start") else None
    return instruction if found is None else found


def work_between(module: Module, computation: Computation, start: Instruction, moved: CostOf) -> list[str]:
    """List the work between start and end of a transfer, largest first; empty if it is synchronous."""
    end = computation.end(start)
    if end is None:
        return []
    names = list(computation.instructions)
    between = names[names.index(start.name) + 1 : names.index(end.name)]
    work = [(_work(module, computation, computation.instructions[name], moved), name) for name in between]
    return [name for size, name in sorted(work, reverse=True) if size >= REAL_WORK_BYTES]


def _work(module: Module, computation: Computation, instruction: Instruction, moved: CostOf) -> int:
    if instruction.opcode in CONTROL_FLOW:
        return sum(total(executed(module, moved, called.name)) for called in module.called(instruction))
    # Another transfer uses the same links, so it does not overlap.
    is_transfer = kind_of(instruction) in KINDS or instruction.opcode.endswith(
        ("-start", "-done", "-update", "send", "recv")
    )
    return 0 if is_transfer else moved(computation, instruction)
