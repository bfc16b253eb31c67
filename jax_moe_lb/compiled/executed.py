"""Which instructions run, and how often, so that costs can be summed over a program.

A loop runs as often as the compiler or its condition says, and once where neither does; but the loops in `IDLE_SCOPE`
not at all. Of a conditional the dearest branch runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jax_moe_lb.compiled.hlo import Computation, Instruction, Module

CONTROL_FLOW = ("while", "conditional", "call")

IDLE_SCOPE = "further_rounds"
"""Loops whose operations carry this name serve what the first round has no room for: a balanced step runs none."""

CostOf = Callable[[Computation, Instruction], int]
"""It tells the cost of one instruction that is not control flow, in any unit."""


@dataclass(frozen=True)
class Cost:
    """This is what one instruction costs.

    Args:
        instruction: the instruction.
        computation: where it stands.
        amount: what one run of it costs, in the unit of whoever asked.
        times: how often it runs.
    """

    instruction: Instruction
    computation: Computation
    amount: int
    times: int = 1

    @property
    def total(self) -> int:
        """Sums over all runs."""
        return self.amount * self.times


def executed(module: Module, cost: CostOf, start: str = "") -> list[Cost]:
    """Lists what costs something, in the order in which it runs.

    Args:
        module: the program.
        cost: of one instruction that is not control flow, in any unit.
        start: the computation to begin with; the whole program by default.
    """
    computation = module.computations[start or module.entry]
    costs: list[Cost] = []
    for instruction in computation:
        inner = _inner(module, cost, instruction)
        if inner is not None:
            costs += inner
        elif amount := cost(computation, instruction):
            costs.append(Cost(instruction, computation, amount))
    return costs


def _inner(module: Module, cost: CostOf, instruction: Instruction) -> list[Cost] | None:
    """Lists the costs of what control flow runs, `None` for an instruction that is none."""
    if instruction.opcode not in CONTROL_FLOW:
        return None
    parts = [executed(module, cost, called.name) for called in module.called(instruction)]
    if instruction.opcode == "conditional":
        return max(parts, key=total, default=[])
    times = rounds_of(instruction)
    return [replace(one, times=one.times * times) for part in parts for one in part if times]


def rounds_of(loop: Instruction) -> int:
    """Tells how often a loop runs in a balanced step; other instructions run once."""
    if loop.trips is not None:
        return loop.trips
    if loop.counted is not None:
        return loop.counted
    return 0 if IDLE_SCOPE in loop.text("op_name") else 1


def total(costs: list[Cost]) -> int:
    """Sums costs."""
    return sum(one.total for one in costs)
