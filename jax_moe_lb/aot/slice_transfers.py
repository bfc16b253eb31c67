"""Transfers between TPU slices in a compiled program.

Each slice has the same program. XLA compiles a collective between slices to sends and receives of the host, and one
inside a slice as for a single slice.
"""

import re

from jax_moe_lb.aot.collectives import Key, ProgramCollective, merged
from jax_moe_lb.aot.execution_counts import CostOf, OperationCost, executed
from jax_moe_lb.aot.hlo import Computation, Instruction, Module
from jax_moe_lb.core.types import Axes

TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
FIRST_GROUP = re.compile(r"_xla_megascale_target=\{\{([\d,]+)\}")

NUMBERS_OF_A_SLICE = 100_000
"""Numbers of devices of a slice in such a group: the first device of slice `i` has `(i + 1)` times as many."""


def transfers_between_slices(module: Module, axes: Axes, slice_axes: Axes, moved: CostOf) -> list[ProgramCollective]:
    """List the transfers between slices, largest first; `slice_axes` are some of the mesh axes."""
    found: list[tuple[Key, OperationCost]] = []
    for cost in executed(module, _received):
        attributes, kind = cost.instruction.attributes, TRANSFER.search(cost.instruction.attributes)
        assert kind is not None
        over = axes if _includes_slices(attributes) else slice_axes
        found.append(((f"{kind[1].lower().replace('_', '-')} between slices", over, None), cost))
    return merged(module, found, moved)


def _received(_: Computation, one: Instruction) -> int:
    """Count the received bytes of a transfer; of a ragged exchange, the bytes of the whole buffer."""
    return one.shapes[0].nbytes if one.opcode == "recv" and TRANSFER.search(one.attributes) else 0


def _includes_slices(attributes: str) -> bool:
    """Return whether devices of one slice also exchange rows through their hosts."""
    group = FIRST_GROUP.search(attributes)
    numbers = [int(number) // NUMBERS_OF_A_SLICE for number in group[1].split(",")] if group else []
    return len(set(numbers)) < len(numbers)
