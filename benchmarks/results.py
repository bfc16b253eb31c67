"""What a benchmark found: tables of values that are kept as JSON, and drawn as Markdown wherever they are shown.

A benchmark makes `Table`s, prints them, and with `--out FILE.json` keeps them with command, commit, date and machine:

    parser = argparse.ArgumentParser(description=__doc__)
    out_option(parser)
    given = parser.parse_args()
    table = Table({"ranks": "d", "step ms": ".0f"}, rows=[[8, spread(times_s * 1e3)]])
    report({"steps": table}, given.out)

Documents name a table where it stands, and `python -m benchmarks.render` writes it there (see its docstring), so that
no number is typed.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap

import numpy as np

Value = float | int | str | None | Sequence[float]
"""A number, a text, nothing, or `[median, low, high]`."""


@dataclass(frozen=True)
class Table:
    """Values in rows, and how each column is written.

    Args:
        columns: format of each column's numbers, by its title, as in `format(number, ".2f")`; `""`: as they are.
        rows: one value for each column.
        title: what stands above it, where the name alone does not say what it is.
        notes: what must be said about it, with numbers of the same run.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Value]]
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} values, expected {len(self.columns)}: {row!r}")

    def cells(self) -> list[list[str]]:
        """All rows as they are shown."""
        forms = self.columns.values()
        return [[cell(value, form) for value, form in zip(row, forms, strict=True)] for row in self.rows]

    def __str__(self) -> str:
        lines = [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.cells()]
        title = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*title, *lines, *(part for note in self.notes for part in ("", *wrap(note, 118)))])


def cell(value: Value, form: str) -> str:
    """A value as Markdown: a median has its range behind it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        median, low, high = (format(number, form) for number in value)
        return f"{median} ({low}-{high})"
    return format(value, form)


def spread(values: np.ndarray) -> list[float]:
    """Median, least and most."""
    return [float(number) for number in np.quantile(values, [0.5, 0, 1])]


def out_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--out`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the tables there, as JSON; replaces the file")


def out_alone(what: str | None) -> Path | None:
    """Reads `--out` for a benchmark that has nothing else to choose; refuses anything else, before it begins.

    Args:
        what: the docstring of its module.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    out_option(parser)
    return parser.parse_args().out


def report(tables: Mapping[str, Table], out: Path | None) -> None:
    """Prints all tables, and keeps them where `out` is given."""
    for name, table in tables.items():
        print(f"{name}:\n\n{table}\n")
    if out is not None:
        save(tables, out)


def save(tables: Mapping[str, Table], out: Path) -> None:
    """Keeps tables with what one needs to make them again."""
    kept = {name: {key: value for key, value in vars(table).items() if value} for name, table in tables.items()}
    out.write_text(json.dumps({**circumstances(), "tables": kept}, indent=1) + "\n")


def load(path: Path) -> dict[str, Table]:
    """The tables of a file by `save`."""
    return {name: Table(**table) for name, table in json.loads(path.read_text())["tables"].items()}


def circumstances() -> dict[str, str]:
    """Command, commit, date, machine and software of this process."""
    module = getattr(sys.modules["__main__"].__spec__, "name", None)
    command = shlex.join(["python", *(["-m", module] if module else sys.argv[:1]), *_arguments()])
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"load average {os.getloadavg()[0]:.1f}; no accelerator used",
        "software": f"Python {platform.python_version()}, jax {version('jax')}",
    }


def _arguments() -> list[str]:
    """The options but `--out`, which says where, not what."""
    kept = list(sys.argv[1:])
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept


def _commit() -> str:
    """The commit, with a plus sign where the tree differs from it."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=here, capture_output=True, text=True)
    if found.returncode:
        return "unknown"
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True)
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")
