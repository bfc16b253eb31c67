"""Scheduled operations of a compiled program, in the form of a timeline: small, and convertible to JSON.

The entry computation of a compiled program is its schedule. `scheduled` keeps of each operation what decides its time:
bytes, floating-point operations, the form of a product or an exchange, the named scope, and the place in a loop. Loops
keep their operations once. `timeline.py` adds times.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from jax_moe_lb.aot.collectives import RAGGED, PathOf, axes_of, exchanged_bytes, exchanges, kind_of, result_of
from jax_moe_lb.aot.execution_counts import IDLE_SCOPE, KERNEL, SEARCH_SCOPE, Launches
from jax_moe_lb.aot.flops import ProductForm, flops_of, product_form
from jax_moe_lb.aot.hlo import ArrayShape, Computation, Instruction, Module
from jax_moe_lb.aot.memory import FREE, FREE_TARGETS, MemoryTraffic
from jax_moe_lb.core.tpu_vectors import num_vectors

SCOPES = (
    "route",
    "count",
    "at_homes",
    "plan",
    "address",
    "replicate",
    "dispatch",
    "experts",
    "combine",
)
"""Named scopes of a layer, which are the stages of the timeline."""

WAVES = ("rows_onward", "rows_back", "home_wave", "moved_wave")
"""Named scopes of the second phase of `TwoPhase`, and of the parts of the products."""

BACKWARD, OTHER = "backward/", "other"
"""Prefix of stages of the backward pass, and the stage of operations outside of all scopes."""

STREAM = re.compile(r'_xla_stream_annotation="?(\w+)')


PEER_COPIES = "peer copies"
"""Kind of copies by copy engines, whose rows are weights of experts or token copies."""

ROW_KERNELS = ("moe_gather_rows", "moe_sum_rows")
"""Kernels for TPUs that copy rows by index; see `kernels/tpu_rows.py`."""

PLANNER_KERNEL = "moe_exact_fill"
"""Kernel for TPUs with one pass of the planner `exact`; see `planners/exact_on_tpu.py`."""


class Kind(StrEnum):
    """Kind of an operation."""

    KERNEL = "kernel"  # operation bound by memory traffic
    PRODUCT = "product"  # matrix product
    EXCHANGE = "exchange"  # ragged exchange
    COLLECTIVE = "collective"  # other collective
    PLANNER = "planner"  # planner on the host, or in a kernel
    COPIES = "copies"  # peer copies by copy engines; they run until the next `JOIN`
    JOIN = "join"  # wait for peer copies, or for the planner of `stream`
    TRANSFER = "transfer"  # asynchronous copy between memories of a device
    WAIT = "wait"  # end of an asynchronous operation
    LOOP = "loop"  # loop or branch


class Loop(StrEnum):
    """Number of iterations of a loop."""

    BRANCH = "branch"  # once: the most expensive branch
    COUNTED = "counted"  # `trips`
    ROUNDS = "rounds"  # overflow rounds: rounds of the load after the first
    REPLICAS = "replicas"  # replicas that return to one home
    SEARCH = "search"  # once, unless the plan of the load is near the mean


@dataclass(frozen=True)
class ExchangeShape:
    """Shape of a collective."""

    kind: str  # XLA's name, such as `ragged-all-to-all`; `PEER_COPIES` for copies by copy engines
    axes: tuple[str, ...] | None  # mesh axes; None if the groups match no axes
    num_ranks: int  # ranks of a group
    nbytes: int  # larger of sent and received bytes of a rank; for a ragged exchange, the whole operand
    result_bytes: int  # bytes of the result
    operand_rows: int  # rows of the operand
    updates: int  # entries of the lists for each peer; 0 for other collectives
    path: str  # implementation of a ragged exchange, empty for other collectives


@dataclass(frozen=True)
class ScheduledOperation:
    """One operation of a schedule."""

    name: str  # name in the compiled program
    kind: Kind  # kind of the operation
    stage: str  # innermost named scope, after `backward/` in the backward pass
    wave: str = ""  # innermost named scope of `WAVES`, or empty
    nbytes: int = 0  # bytes read from and written to device memory
    flops: int = 0  # floating-point operations of its products
    product: ProductForm | None = None  # form of its largest product, or None
    exchange: ExchangeShape | None = None  # shape of its collective, or None
    runs_beside: bool = False  # whether later operations start before it ends
    stream: str = ""  # stream of an asynchronous operation, such as `collective`; empty for the stream of its kind
    awaits: str = ""  # name of the operation that a `WAIT` ends
    in_graph: bool = False  # whether it is launched inside of a CUDA graph
    launches: int = 1  # number of its kernels
    # Rows of a kernel of `ROW_KERNELS`, or vectors of a `PLANNER_KERNEL` that fills all slots; 0 for other operations
    items: int = 0
    loop: Loop | None = None  # kind of a loop; None for other operations
    trips: int = 1  # iterations of a counted loop
    waits_for_host: bool = False  # whether the host reads the condition of a loop or branch, or the tables of copies
    planned_ranks: int = 0  # ranks of a domain of a planner that runs as a kernel; 0 for other operations
    under_limits: bool = False  # whether this kernel plans under several limits of replicas
    body: "tuple[ScheduledOperation, ...]" = ()  # operations of a loop


def scheduled(
    module: Module,
    traffic: MemoryTraffic,
    axes: Mapping[str, int],
    path_of: PathOf,
    launches: Launches = Launches(),
) -> tuple[ScheduledOperation, ...]:
    """Return the operations of a program in the order of the schedule."""
    reader = _Reader(module, traffic, axes, path_of, launches)
    return tuple(reader.read(module.computations[module.entry]))


def stage_of(op_name: str) -> str:
    """Return the stage of an operation from the name in the traced program."""
    words = re.findall(r"\w+", op_name)
    scope = next((word for word in reversed(words) if word in SCOPES), OTHER)
    is_backward = "backward" in words or "transpose(" in op_name
    return (BACKWARD if is_backward and scope != OTHER else "") + scope


@dataclass(frozen=True, eq=False)
class _Reader:
    module: Module
    traffic: MemoryTraffic
    axes: Mapping[str, int]
    path_of: PathOf
    launches: Launches

    def read(self, computation: Computation) -> Iterator[ScheduledOperation]:
        for instruction in computation:
            if instruction.opcode == "call":
                for called in self.module.called(instruction):
                    yield from self.read(called)
            elif instruction.opcode in ("while", "conditional"):
                yield self._loop(instruction)
            elif not self._is_free(instruction):
                yield from self._operation(computation, instruction)

    def _is_free(self, instruction: Instruction) -> bool:
        is_ours = instruction.target.startswith("moe_lb_")
        return instruction.opcode in FREE or (instruction.target.startswith(FREE_TARGETS) and not is_ours)

    def _stage(self, instruction: Instruction) -> str:
        found = stage_of(self.module.op_name(instruction))
        if found != OTHER:
            return found
        # An asynchronous call has the scope of its operation.
        inside = (stage_of(self.module.op_name(one)) for part in self.module.called(instruction) for one in part)
        return next((stage for stage in inside if stage != OTHER), OTHER)

    def _loop(self, instruction: Instruction) -> ScheduledOperation:
        name = instruction.text("op_name")
        stage, loop, trips = stage_of(name), Loop.COUNTED, 1
        parts = [tuple(self.read(part)) for part in self.module.called(instruction)]
        if instruction.opcode == "conditional":
            body, loop = max(parts, key=_weight, default=()), Loop.BRANCH
        else:
            body = tuple(one for part in parts for one in part)
            known = instruction.trips if instruction.trips is not None else instruction.counted
            is_replicas = "replicate" in stage
            if known is not None:
                trips = known
            elif IDLE_SCOPE in name:
                # Replicas that return in several turns are rare; rounds follow from the load.
                loop, trips = (Loop.COUNTED, 0) if is_replicas else (Loop.ROUNDS, 0)
            elif is_replicas:
                loop = Loop.REPLICAS
            elif SEARCH_SCOPE in name:
                loop = Loop.SEARCH
        # The host reads the condition of a loop or branch outside of graphs, unless the trip count is stated.
        is_outside = instruction.name in self.launches.kernels and instruction.name not in self.launches.in_graphs
        waits = is_outside and instruction.trips is None
        return ScheduledOperation(
            instruction.name, Kind.LOOP, stage, loop=loop, trips=trips, waits_for_host=waits, body=body
        )

    def _exchange_stage(self, computation: Computation, one: Instruction) -> str:
        """Return the stage of a ragged exchange, which some compilers print without its name."""
        own = self._stage(one)
        # On GPUs an exchange of outputs can have the name of the products before it.
        if own != OTHER and not own.endswith("experts"):
            return own
        # Its output buffer has the scope, except for outputs on their way back, which come from `experts`.
        rows, output = computation.operands(one)[:2]
        found = self._stage(_made(computation, output))
        if found.removeprefix(BACKWARD) != OTHER:
            return found
        source = self._stage(_made(computation, rows))
        if source.endswith("experts"):
            return source.replace("experts", "combine")
        # The buffer for outputs of all rounds is made outside of all scopes.
        name = _made(computation, output).text("op_name")
        return (BACKWARD if "backward" in name else "") + "combine" if name.endswith("/empty") else source

    def _operation(self, computation: Computation, one: Instruction) -> Iterator[ScheduledOperation]:
        stage, in_graph = self._stage(one), one.name in self.launches.in_graphs
        if one.opcode.endswith(("-done", "-update")):
            if one.opcode.endswith("-done"):
                yield ScheduledOperation(one.name, Kind.WAIT, stage, awaits=computation.start(one).name)
            return
        end = computation.end(one) if one.opcode.endswith("-start") else None
        beside, stream = end is not None, self._stream(one)
        if found := exchanges(self.module, computation, one):
            # A fusion may have several; the first one gives its shape.
            shape = self._shape(*found[0])
            kind = Kind.EXCHANGE if shape.kind == RAGGED else Kind.COLLECTIVE
            stage = self._exchange_stage(*found[0]) if kind is Kind.EXCHANGE else stage
            yield ScheduledOperation(
                one.name, kind, stage, exchange=shape, runs_beside=beside, stream=stream, in_graph=in_graph
            )
            return
        if one.target.startswith(("moe_lb_copy", "moe_lb_plan")):
            yield from self._own_call(computation, one, stage)
            return
        where, inner = self._inner(computation, one)
        nbytes = self.traffic.nbytes(computation, end if end is not None else one)
        flops = flops_of(self.module, computation, one)
        kind = _kind(one if inner is None else inner, flops)
        if kind is Kind.KERNEL and not nbytes and not flops and one.opcode not in ("custom-call", "async-start"):
            return
        yield ScheduledOperation(
            one.name,
            kind,
            stage,
            wave=self._wave(one),
            nbytes=nbytes,
            flops=flops,
            product=product_form(self.module, where, inner or one) if flops else None,
            runs_beside=beside,
            stream=stream,
            in_graph=in_graph,
            launches=max(1, self.launches.kernels.get(one.name, 1)),
            items=_items(computation, one),
        )

    def _own_call(self, computation: Computation, one: Instruction, stage: str) -> Iterator[ScheduledOperation]:
        """Yield the parts of a planner or of peer copies of this package."""
        name, target, wave = one.name, one.target, self._wave(one)
        if target.endswith("_join"):
            yield ScheduledOperation(name, Kind.JOIN, stage)
        elif target.endswith("_post"):
            # The planner starts with the counts, beside the compute stream.
            yield ScheduledOperation(name, Kind.PLANNER, stage, runs_beside=True)
        elif target.startswith("moe_lb_plan") and not target.endswith("_and_copy"):
            ranks, limited = _planned_ranks(one), _plans_under_limits(computation, one)
            yield ScheduledOperation(name, Kind.PLANNER, stage, planned_ranks=ranks, under_limits=limited)
        else:
            plans = target.startswith("moe_lb_plan")
            if plans:
                yield ScheduledOperation(name, Kind.JOIN, stage, stream=Kind.PLANNER.value)
            beside = not target.endswith("_sum")
            shape = _copied(computation, one)
            # Copy engines take addresses from the host: it reads the tables first, unless it made them.
            yield ScheduledOperation(
                name, Kind.COPIES, stage, wave=wave, exchange=shape, runs_beside=beside, waits_for_host=not plans
            )

    def _wave(self, one: Instruction) -> str:
        words = re.findall(r"\w+", self.module.op_name(one))
        return next((word for word in reversed(words) if word in WAVES), "")

    def _inner(self, computation: Computation, one: Instruction) -> tuple[Computation, Instruction | None]:
        """Return the operation inside of an asynchronous call."""
        called = self.module.called(one) if one.opcode == "async-start" else []
        return (called[0], called[0].root) if called else (computation, None)

    def _stream(self, one: Instruction) -> str:
        inside = [inner for part in self.module.called(one) for inner in part] if one.opcode == "async-start" else []
        found = (STREAM.search(each.attributes) for each in (one, *inside))
        return next((match[1] for match in found if match), "")

    def _shape(self, computation: Computation, one: Instruction) -> ExchangeShape:
        over, operands = axes_of(one, self.axes), computation.operands(one)
        ranks = math.prod(self.axes[name] for name in (self.axes if over is None else over))
        is_ragged = kind_of(one) == RAGGED
        rows = operands[0].shapes[0].dims[0] if operands and operands[0].shapes[0].dims else 1
        return ExchangeShape(
            kind=kind_of(one),
            axes=over,
            num_ranks=ranks,
            nbytes=exchanged_bytes(computation, one),
            result_bytes=result_of(computation, one).nbytes,
            operand_rows=rows,
            updates=operands[2].shapes[0].dims[0] // ranks if is_ragged else 0,
            path=self.path_of(over if over else tuple(self.axes)).path.value if is_ragged else "",
        )


def _made(computation: Computation, one: Instruction) -> Instruction:
    """Return the operation behind views and elements of results."""
    while one.opcode in ("bitcast", "copy", "get-tuple-element") and computation.operands(one):
        one = computation.operands(one)[0]
    return one


def _planned_ranks(planner: Instruction) -> int:
    if not planner.target.endswith(KERNEL):
        return 0
    found = re.search(r"\bdomain = (\d+)", planner.attributes)
    return int(found[1]) if found else 1


def _plans_under_limits(computation: Computation, planner: Instruction) -> bool:
    """Return whether a kernel of `exact` has several limits, the operand after the counts."""
    limits = computation.operands(planner)[1:] if planner.target.endswith("exact_kernel") else ()
    return any(shape.dims[0] > 1 for one in limits for shape in one.shapes)


def _copied(computation: Computation, one: Instruction) -> ExchangeShape:
    """Return the shape of peer copies: of weights `[G, ...]` of experts, or of rows `[A, ...]`."""
    arrays = [shape for operand in computation.operands(one) for shape in operand.shapes if _is_float(shape)]
    # Passed operands follow: buffers to write, and arrays for the order of operations.
    kinds = re.search(r"\bnum_kinds = (\d+)", one.attributes)
    if kinds:
        arrays = arrays[: int(kinds[1])]
    else:
        weights = [shape for shape in arrays if len(shape.dims) > 2]
        arrays = [shape for shape in weights if shape.dims[0] == weights[0].dims[0]]
    rows = arrays[0].dims[0] if arrays else 1
    nbytes = sum(shape.nbytes for shape in arrays)
    return ExchangeShape(PEER_COPIES, None, 1, nbytes, one.nbytes, rows, 0, "")


def _items(computation: Computation, one: Instruction) -> int:
    """Return the rows that a kernel copies by index, or the vectors that a planner reads in all of its steps."""
    if one.name.startswith(PLANNER_KERNEL):
        # One step per slot reads the slots, the home experts, and about two vectors per rank more. The choice among
        # sublanes and the wait for it last as long as 40 vectors.
        (*domains, slots, ranks, width), home = one.shapes[0].dims, one.shapes[2].dims[-3]
        return math.prod(domains) * slots * ranks * ((slots + home + 2) * num_vectors(ranks, width) + 40)
    if not one.name.startswith(ROW_KERNELS):
        return 0
    lists = (shape for operand in computation.operands(one) for shape in operand.shapes if shape.dtype == "s32")
    return max((shape.dims[0] for shape in lists), default=0)


def _is_float(shape: ArrayShape) -> bool:
    return shape.dtype.startswith(("f", "bf"))


def _kind(one: Instruction, flops: int) -> Kind:
    if one.target.startswith("moe_lb_plan"):
        return Kind.PLANNER
    if one.opcode in ("copy-start", "slice-start"):
        return Kind.TRANSFER
    return Kind.PRODUCT if flops else Kind.KERNEL


def _weight(operations: tuple[ScheduledOperation, ...]) -> int:
    """Return the bytes of a branch, with exchanged ones, and the floating-point operations at 300 per byte."""
    return sum(
        (one.nbytes + _exchanged_bytes(one) + one.flops // 300 + _weight(one.body)) * one.trips for one in operations
    )


def _exchanged_bytes(operation: ScheduledOperation) -> int:
    exchange = operation.exchange
    return 0 if exchange is None else exchange.nbytes + exchange.result_bytes
