"""The lines of Python that instructions come from, out of the tables at the head of a printed program."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
ROW = re.compile(r"(\d+) (.*)")
FIELD = re.compile(r"(\w+)=(\d+)")
FRAME = re.compile(r"stack_frame_id=(\d+)")
INLINE = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')

HELPER = re.compile(r"-packages/(?!jax_moe_lb/)|jax_moe_lb/(?:types|_\w+)\.py:")
"""A line of these files, and of other packages that are installed, says less than the one that called it."""

TRACER = re.compile(r"jax_moe_lb/compiled/\w+\.py:")
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
        """Tells file and line of an instruction, as `jax_moe_lb/split.py:71`; empty if it does not say.

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
