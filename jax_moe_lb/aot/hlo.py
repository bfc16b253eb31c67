"""Parser of compiled programs as XLA prints them.

It reads names, shapes, operands and attributes, and the Python lines of instructions from the tables at the head of a
program. XLA's own parser is not part of jaxlib's interface, and it rejects dumps of other versions. Shapes look like
`bf16[16,2048]{1,0:T(8,128)S(1)}`, alone or in parentheses.
"""

import functools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BITS = {
    "pred": 8,
    **{f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
"""The bits of an element; `f8e4m3fn` and the like say theirs in the name, and tokens and opaque values have none."""

ARRAY = re.compile(r"\b(pred|bf16|[suc]\d+|f\d+\w*)\[([\d,<=]*)\](\{[^}]*\})?")
MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class ArrayShape:
    """This is the shape of one array.

    Args:
        dtype: as XLA writes it, such as `bf16`.
        dims: the sizes of its dimensions.
        space: the memory that holds it: 0 is the device's own, 1 on a TPU the fast memory of a core.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all elements, without padding."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Reads the arrays out of a shape, those of a tuple in order.

    Args:
        text: a shape as XLA writes it; what is no array, such as a token, is left out.
    """
    return tuple(_array(*match.groups()) for match in ARRAY.finditer(text))


def _array(dtype: str, dims: str, layout: str | None) -> ArrayShape:
    space = MEMORY_SPACE.search(layout or "")
    # A dimension of unknown length is written with its bound, `<=8`.
    sizes = tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size)
    return ArrayShape(dtype, sizes, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    named = re.match(r"f(\d+)e", dtype)
    return int(named[1]) if named else 0


TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
ROW = re.compile(r"(\d+) (.*)")
FIELD = re.compile(r"(\w+)=(\d+)")
FRAME = re.compile(r"stack_frame_id=(\d+)")
INLINE = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')

HELPER = re.compile(
    r"-packages/(?!jax_moe_lb/)"
    r"|jax_moe_lb/(?:core/(?:types|manual_axes|custom_calls|plan_file)|collectives/local_processes)\.py:"
)
"""A line of these files, and of other packages that are installed, says less than the one that called it."""

TRACER = re.compile(r"jax_moe_lb/aot/\w+\.py:")
"""A line of these files says nothing: the whole program is traced there."""


@dataclass(frozen=True)
class Sources:
    """These tables say where instructions come from.

    Args:
        files: paths by number.
        locations: by number, the number of a file and a line.
        frames: by number, the numbers of a location and of the frame that called it, 0 where nothing did.
    """

    files: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)

    def line(self, attributes: str) -> str:
        """Tells file and line of an instruction, as `jax_moe_lb/core/split.py:71`; empty if it does not say.

        Args:
            attributes: of the instruction, as text.
        """
        if found := FRAME.search(attributes):
            lines = [line for line in self._lines(int(found[1])) if not TRACER.search(line)]
            return _short(next((line for line in lines if not HELPER.search(line)), lines[0] if lines else ""))
        if found := INLINE.search(attributes):
            return _short(f"{found[1]}:{found[2] or '?'}")
        return ""

    def _lines(self, frame: int) -> list[str]:
        """Lists the lines of a stack, innermost first."""
        lines: list[str] = []
        while frame in self.frames:
            location, caller = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            lines.append(f"{self.files.get(file, '?')}:{line}")
            frame = caller
        return lines


def read_sources(text: str) -> Sources:
    """Reads the tables, which are empty where the program has none."""
    rows: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    table = ""
    for line in text.splitlines():
        if line in TABLES:
            table = line
        elif table and (found := ROW.fullmatch(line)):
            rows[table][int(found[1])] = found[2]
        elif table and line:
            break
    locations = {number: dict(FIELD.findall(row)) for number, row in rows["FileLocations"].items()}
    frames = {number: dict(FIELD.findall(row)) for number, row in rows["StackFrames"].items()}
    return Sources(
        files={number: row.strip('"') for number, row in rows["FileNames"].items()},
        locations={n: (int(row.get("file_name_id", 0)), int(row.get("line", 0))) for n, row in locations.items()},
        # XLA prints the number of the caller plus one, so that 1 is none.
        frames={n: (int(row["file_location_id"]), int(row.get("parent_frame_id", 1)) - 1) for n, row in frames.items()},
    )


def _short(path: str) -> str:
    """Shortens a path to what is below site-packages or the working directory."""
    if not path:
        return ""
    parts = Path(path).parts
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(root) :])
    here = os.path.relpath(path)
    return path if here.startswith("..") else here


HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"([\w\-]+)\(")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation|comparator)=%?([\w.\-]+)")
LISTED = re.compile(r"(?:called_computations|branch_computations)=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """This is one operation of a program.

    Args:
        name: unique in its computation.
        opcode: what it does, such as `fusion`.
        shapes: its results; several for a tuple.
        operands: the names of what it reads, instructions of the same computation.
        arguments: what stands in its parentheses, as text; of a parameter, its number.
        attributes: what follows the parentheses, as text.
        is_root: whether it is the result of its computation.
        counted: trip count of a loop by its condition if the compiler states none; see `execution_counts.py`.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool
    counted: int | None = None

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all results."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def called(self) -> tuple[str, ...]:
        """Names the computations that it runs, of a loop the body first."""
        listed = (name for found in LISTED.findall(self.attributes) for name in re.findall(r"%?([\w.\-]+)", found))
        return (*CALLED.findall(self.attributes), *listed)

    @property
    def trips(self) -> int | None:
        """Tells how often the compiler says that a loop runs, `None` if it does not."""
        known = TRIP_COUNT.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def target(self) -> str:
        """Names what a custom call calls; empty for other operations."""
        return self.text("custom_call_target")

    def text(self, attribute: str) -> str:
        """Reads an attribute that is written in quotes, empty if it is absent."""
        found = re.search(rf'\b{attribute}="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Reads an attribute that is a list of integers, such as `lhs_contracting_dims={1}`."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(number) for number in found[1].split(",") if number) if found else ()


@dataclass(frozen=True, eq=False)
class Computation:
    """These are the instructions of one computation, in the order in which they are printed.

    Args:
        name: unique in the program.
        instructions: by their names; of a scheduled program in the order in which they run.
    """

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Finds the instructions that this one reads."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Tells who reads an instruction, and as which of its operands."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self:
            for number, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, number))
        return users

    @property
    def root(self) -> Instruction:
        """Finds the instruction that is the result."""
        return next(instruction for instruction in self if instruction.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        """Lists the parameters by their numbers."""
        found = [instruction for instruction in self if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.arguments))


@dataclass(frozen=True, eq=False)
class Module:
    """This is a whole program.

    Args:
        computations: by their names.
        entry: the name of the first to run.
        sources: the table of source lines that instructions refer to.
    """

    computations: dict[str, Computation]
    entry: str
    sources: Sources

    def called(self, instruction: Instruction) -> list[Computation]:
        """Finds the computations that an instruction runs."""
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def source(self, instruction: Instruction) -> str:
        """Tells the line of Python that an instruction comes from, empty if it does not say."""
        return self.sources.line(self._telling(instruction, "stack_frame_id").attributes)

    def op_name(self, instruction: Instruction) -> str:
        """Says what of the traced program an instruction is, such as `while/body/gather`; its opcode if it does not."""
        name = self._telling(instruction, "op_name").text("op_name")
        return "/".join(part for part in name.split("/") if not part.startswith("jit(")) or instruction.opcode

    def _telling(self, instruction: Instruction, attribute: str) -> Instruction:
        """Finds the instruction with an attribute: of a fusion without it, the last one inside that has it."""
        if attribute in instruction.attributes or instruction.opcode != "fusion":
            return instruction
        inside = [one for part in self.called(instruction) for one in part if attribute in one.attributes]
        return inside[-1] if inside else instruction


def parse_module(text: str) -> Module:
    """Reads a program that XLA printed.

    Args:
        text: what `jax.stages.Compiled.as_text` returns, or a dump of XLA.

    Raises:
        ValueError: it holds no entry computation, so it is no such text.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = computations[header[2]] = Computation(header[2])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3], bool(found[1]))
            if instruction is not None:
                current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError(f"the program starts with {text[:40]!r}; expected HLO text with an ENTRY computation")
    return Module(computations, entry, read_sources(text))


def _instruction(name: str, text: str, is_root: bool) -> Instruction | None:
    shape_end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode = OPCODE.match(text, shape_end + 1)
    if opcode is None:
        return None
    start = opcode.end() - 1
    end = start + _closing(text[start:])
    arguments = text[start + 1 : end]
    return Instruction(
        name=name,
        opcode=opcode[1],
        shapes=parse_shapes(text[:shape_end]),
        operands=tuple(NAME.findall(arguments)),
        arguments=arguments,
        attributes=text[end + 1 :],
        is_root=is_root,
    )


def _closing(text: str) -> int:
    """Finds the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1
