"""A report says what one device of a target holds and does in one run of a program."""

from dataclasses import asdict, dataclass
from typing import Any

from jax_moe_lb.compiled.collectives import Collective
from jax_moe_lb.compiled.executed import Cost
from jax_moe_lb.compiled.hlo import Module
from jax_moe_lb.compiled.memory import Buffer


@dataclass(frozen=True)
class Operation:
    """This is one operation of a program, with what it moves.

    Args:
        name: its name in the compiled program.
        nbytes: what all of its runs read from and write to the device's memory.
        times: how often it runs.
        shape: its result, the first of several.
        holds: what of the traced program it is.
        source: the line of Python that it comes from.
    """

    name: str
    nbytes: int
    times: int
    shape: str
    holds: str
    source: str

    @classmethod
    def of(cls, module: Module, cost: Cost) -> "Operation":
        """Describes the operation of a cost in bytes."""
        one = cost.instruction
        shape = str(one.shapes[0]) if one.shapes else ""
        return cls(one.name, cost.total, cost.times, shape, module.op_name(one), module.source(one))


@dataclass(frozen=True)
class Report:
    """A report says what one device of a target holds and does in one run of a program.

    `compile_for` and `compile_layer` make one. All of it is read off the compiled program: nothing has run. Loops of
    unknown length count one round.

    Args:
        target: the name of the machine.
        devices: how many it has.
        argument_bytes: what the arguments take.
        output_bytes: what the results take that are not written over arguments.
        temp_bytes: what everything else takes.
        peak_bytes: what of that is in use at the peak; the rest is gaps that no buffer fits into.
        memory_bytes: what the device has, `None` if that is not known.
        buffers: the temporaries that live at the peak, the largest first.
        flops: the floating-point operations of all products.
        ideal_flops: those that the program is for, `None` if that is not known.
        hbm_bytes: what all operations read from and write to the device's memory.
        operations: those that move most, the largest first.
        collectives: by kind and mesh axes.
        custom_calls: how often each custom call runs, by its target.
        host_waits: how often a GPU's host waits for it, or a TPU for its host; `None` if the compiler does not say.
        compile_s: the seconds that tracing and compiling took.
    """

    target: str
    devices: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    peak_bytes: int
    memory_bytes: int | None
    buffers: tuple[Buffer, ...]
    flops: int
    ideal_flops: int | None
    hbm_bytes: int
    operations: tuple[Operation, ...]
    collectives: tuple[Collective, ...]
    custom_calls: dict[str, int]
    host_waits: int | None
    compile_s: float

    @property
    def total_bytes(self) -> int:
        """Sums what the program takes on a device."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes

    @property
    def fits(self) -> bool | None:
        """Says whether the device has as much memory, `None` if that is not known."""
        return None if self.memory_bytes is None else self.total_bytes <= self.memory_bytes

    @property
    def flops_over_ideal(self) -> float | None:
        """Tells how many times the ideal operations run, `None` if the ideal is not known."""
        return self.flops / self.ideal_flops if self.ideal_flops else None

    def to_json(self) -> dict[str, Any]:
        """Collects everything, as JSON holds it."""
        return asdict(self) | {"fits": self.fits, "flops_over_ideal": self.flops_over_ideal}
