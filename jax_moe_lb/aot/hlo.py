"""Parser of compiled programs as printed by XLA.

It reads names, shapes, operands and attributes of instructions, and their Python lines from the tables at the head of a
program. XLA's own parser is not part of jaxlib's interface, and rejects dumps of other versions. Shapes look like
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
"""Bits per element. Types such as `f8e4m3fn` have them in the name; tokens and opaque values have none."""

ARRAY = re.compile(r"\b(pred|bf16|[suc]\d+|f\d+\w*)\[([\d,<=]*)\](\{[^}]*\})?")
MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class ArrayShape:
    """Shape of one array."""

    dtype: str  # XLA's name, such as `bf16`
    dims: tuple[int, ...]  # sizes of its dimensions
    space: int = 0  # XLA's memory space: 0 for the device's main memory, 1 on TPUs for the fast memory of a core

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without padding."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Parse the arrays of a shape, in order for a tuple."""
    return tuple(_array(*match.groups()) for match in ARRAY.finditer(text))


def _array(dtype: str, dims: str, layout: str | None) -> ArrayShape:
    space = MEMORY_SPACE.search(layout or "")
    # A dynamic dimension is printed with its bound, as in `<=8`.
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
"""Files of helpers and installed packages; for their lines, the calling line is more informative."""

TRACER = re.compile(r"jax_moe_lb/aot/\w+\.py:")
"""Files that trace the whole program, so their lines are uninformative."""


@dataclass(frozen=True)
class Sources:
    """Source locations of instructions."""

    files: dict[int, str] = field(default_factory=dict)  # paths by number
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)  # file number and line by number
    # Location number and number of the calling frame by number; the caller is 0 if there is none
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)

    def line(self, attributes: str) -> str:
        """Return file and line of an instruction, as `jax_moe_lb/core/split.py:71`; empty if unknown."""
        if found := FRAME.search(attributes):
            lines = [line for line in self._lines(int(found[1])) if not TRACER.search(line)]
            return _short(next((line for line in lines if not HELPER.search(line)), lines[0] if lines else ""))
        if found := INLINE.search(attributes):
            return _short(f"{found[1]}:{found[2] or '?'}")
        return ""

    def _lines(self, frame: int) -> list[str]:
        """List the lines of a stack, innermost first."""
        lines: list[str] = []
        while frame in self.frames:
            location, caller = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            lines.append(f"{self.files.get(file, '?')}:{line}")
            frame = caller
        return lines


def read_sources(text: str) -> Sources:
    """Parse the source tables; empty if the program has none."""
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
        # XLA prints the number of the caller plus one, so 1 means none.
        frames={n: (int(row["file_location_id"]), int(row.get("parent_frame_id", 1)) - 1) for n, row in frames.items()},
    )


def _short(path: str) -> str:
    """Shorten a path to the part below site-packages or the working directory."""
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
CONTINUED = re.compile(r'\n(?="|\}\})')
"""End of a line within the metadata of a TPU kernel, which XLA prints in several lines."""

OPCODE = re.compile(r"([\w\-]+)\(")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation|comparator)=%?([\w.\-]+)")
LISTED = re.compile(r"(?:called_computations|branch_computations)=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """One operation of a program."""

    name: str  # name, unique in its computation
    opcode: str  # operation, such as `fusion`
    shapes: tuple[ArrayShape, ...]  # results; several for a tuple
    operands: tuple[str, ...]  # names of its operands, instructions of the same computation
    arguments: str  # text inside its parentheses; for a parameter, its number
    attributes: str  # text after the parentheses
    is_root: bool  # true for the result of its computation
    # Trip count of a loop from its condition if the compiler states none; see `execution_counts.py`
    counted: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs; for a loop, the body first."""
        listed = (name for found in LISTED.findall(self.attributes) for name in re.findall(r"%?([\w.\-]+)", found))
        return (*CALLED.findall(self.attributes), *listed)

    @property
    def trips(self) -> int | None:
        """Trip count of a loop as stated by the compiler, else None."""
        known = TRIP_COUNT.search(self.attributes)
        return int(known[1]) if known else None

    @property
    def target(self) -> str:
        """Target of a custom call; empty for other operations."""
        return self.text("custom_call_target")

    def text(self, attribute: str) -> str:
        """Return a quoted attribute; empty if it is absent."""
        found = re.search(rf'\b{attribute}="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Return an attribute with a list of integers, such as `lhs_contracting_dims={1}`."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(number) for number in found[1].split(",") if number) if found else ()


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions of one computation, in printed order."""

    name: str  # name, unique in the program
    # Instructions by name; in execution order if the program is scheduled
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the operands of an instruction."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def end(self, start: Instruction) -> Instruction | None:
        """Return the `-done` instruction of an asynchronous operation; None for other operations."""
        for user, _ in self.users[start.name]:
            if user.opcode.endswith("-done"):
                return user
            if user.opcode.endswith("-update"):
                return self.end(user)
        return None

    def start(self, end: Instruction) -> Instruction:
        """Return the `-start` instruction of a `-done` one."""
        start = self.operands(end)[0]
        return self.start(start) if start.opcode.endswith("-update") else start

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Users per instruction, with the number of the operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self:
            for number, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, number))
        return users

    @property
    def root(self) -> Instruction:
        """Instruction with the result."""
        return next(instruction for instruction in self if instruction.is_root)

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters by number."""
        found = [instruction for instruction in self if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.arguments))


@dataclass(frozen=True, eq=False)
class Module:
    """Whole program."""

    computations: dict[str, Computation]  # computations by name
    entry: str  # name of the entry computation
    sources: Sources  # source locations of instructions

    def called(self, instruction: Instruction) -> list[Computation]:
        """Return the computations that an instruction runs."""
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def source(self, instruction: Instruction) -> str:
        """Return the Python line of an instruction; empty if unknown."""
        return self.sources.line(self._telling(instruction, "stack_frame_id").attributes)

    def op_name(self, instruction: Instruction) -> str:
        """Return the name of an instruction in the traced program, as `while/body/gather`; else its opcode."""
        name = self._telling(instruction, "op_name").text("op_name")
        return "/".join(part for part in name.split("/") if not part.startswith("jit(")) or instruction.opcode

    def _telling(self, instruction: Instruction, attribute: str) -> Instruction:
        """Return the instruction with an attribute; for a fusion without it, the last such instruction inside."""
        if attribute in instruction.attributes or instruction.opcode != "fusion":
            return instruction
        inside = [one for part in self.called(instruction) for one in part if attribute in one.attributes]
        return inside[-1] if inside else instruction


def parse_module(text: str) -> Module:
    """Parse a program printed by XLA."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in CONTINUED.sub(" ", text).splitlines():
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
    """Return the position of the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1
