"""Results of benchmarks: tables stored as JSON and rendered as Markdown.

A benchmark creates `Table`s, prints them, and with `--out FILE.json` writes them with command, commit, date and
machine (the commit is one of the main branch, with a plus sign if the sources had changes to it):

    parser = argparse.ArgumentParser(description=__doc__)
    out_option(parser)
    given = parser.parse_args()
    table = Table({"ranks": "d", "step ms": ".0f"}, rows=[[8, spread(times_s * 1e3)]])
    report({"steps": table}, given.out)

A file has one or more runs of one benchmark. `--out` writes the run with the name of the file and leaves the others;
`merge` moves runs into another file. A table uses one line per row. A number has the digits shown in its column, and at
least four significant digits.

Documents contain marks for tables, which `python -m benchmarks.render` fills (see its docstring).
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from benchmarks.render.history import commit_of_run

Value = float | int | str | None | Sequence[float]
"""A number, a text, `None`, or `[median, low, high]`."""


@dataclass(frozen=True)
class Table:
    """Values in rows, with a format per column."""

    columns: Mapping[str, str]
    rows: Sequence[Sequence[Value]] = ()
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} values, expected {len(self.columns)}: {row!r}")

    def dicts(self) -> list[dict[str, Any]]:
        """Return the values of each row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def cells(self) -> list[list[str]]:
        """Return all rows as formatted cells."""
        forms = self.columns.values()
        return [[cell(value, form) for value, form in zip(row, forms, strict=True)] for row in self.rows]

    def __str__(self) -> str:
        lines = [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.cells()]
        title = [f"**{self.title}**", ""] if self.title else []
        # A name in backticks may have a hyphen.
        notes = (part for note in self.notes for part in ("", *wrap(note, 118, break_on_hyphens=False)))
        return "\n".join([*title, *lines, *notes])


def cell(value: Value, form: str) -> str:
    """Return a value as Markdown; a median is followed by its range."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        median, low, high = (format(number, form) for number in value)
        return f"{median} ({low}-{high})"
    return format(value, form)


def spread(values: np.ndarray) -> list[float]:
    return [float(number) for number in np.quantile(values, [0.5, 0, 1])]


def out_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=tables_file, metavar="FILE", help="JSON file for the tables; replaces its run of the same name"
    )


def output_file(text: str, suffix: str = "") -> Path:
    """Return the path of an output; type of an option."""
    # Imported here: tables are rendered without JAX.
    from jax_moe_lb.cli.output import check_outputs, path_texts

    words = sys.argv[1:]
    own = next((word for word in words if word == text or word.endswith(f"={text}")), None)
    if own is not None:
        words.remove(own)
    inputs = [("argument", Path(part)) for word in words for part in path_texts(word)]
    try:
        check_outputs(inputs, [("output", Path(text), suffix)])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def picture_file(text: str) -> Path:
    """Return the path of a PNG file to write; type of an option, see `output_file`."""
    return output_file(text, ".png")


def tables_file(text: str) -> Path:
    """Return the path of a file of tables; type of an option, see `output_file`."""
    path = output_file(text)
    try:
        _ = path.exists() and read(path)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no file of tables; expected a new file, or one") from error
    return path


def report(tables: Mapping[str, Table], out: Path | None) -> None:
    """Print all tables, and save them if `out` is given."""
    for name, table in tables.items():
        print(f"{name}:\n\n{table}\n")
    if out is not None:
        save(tables, out)


@dataclass(frozen=True)
class Record:
    """One run of a benchmark: its tables and their provenance."""

    command: str
    commit: str
    date: str
    machine: str
    software: str
    tables: Mapping[str, Table]

    @property
    def digest(self) -> str:
        """SHA-256 of the tables, for files generated from them."""
        return hashlib.sha256(
            _text({name: _stored(table) for name, table in self.tables.items()}, 2).encode()
        ).hexdigest()


NO_ACCELERATOR = "no accelerator used"


def save(tables: Mapping[str, Table], out: Path, accelerator: str = NO_ACCELERATOR, **made: str) -> None:
    """Write a run with the name of the file, made here unless `made` says otherwise; keep other runs of the file."""
    stored = {name: _stored(table) for name, table in tables.items()}
    _write(_runs(out) | {out.stem: {**circumstances(accelerator), **made, "tables": stored}}, out)


def save_run(tables: Mapping[str, Table], name: str, path: Path) -> None:
    """Write a run into a file of several."""
    out = path.with_name(f"{name}.json")
    save(tables, out)
    merge(out, path)


def load(path: Path) -> dict[str, Table]:
    """Return the tables of the run with the name of the file."""
    return dict(read(path)[path.stem].tables)


def read(path: Path) -> dict[str, Record]:
    """Return the runs of a file, or of all files of a folder, by name."""
    records: dict[str, Record] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        for name, run in _runs(file).items():
            if name in records:
                raise ValueError(f"run {name} is in {file} and in another file; expected one file")
            tables = {title: Table(**table) for title, table in run["tables"].items()}
            records[name] = Record(**{**run, "tables": tables})
    return records


def merge(source: Path, target: Path) -> None:
    """Move the runs of a file into another, created if missing, and remove the file."""
    _write(_runs(target) | _runs(source), target)
    source.unlink()


def _runs(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(runs: Mapping[str, Any], path: Path) -> None:
    # A killed process leaves the old file.
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(_text(runs) + "\n")
    part.replace(path)


def _stored(table: Table) -> dict[str, Any]:
    """Return the non-empty fields of a table, with rounded numbers."""
    forms = table.columns.values()
    rows = [[_rounded(value, form) for value, form in zip(row, forms, strict=True)] for row in table.rows]
    return {name: value for name, value in (vars(table) | {"rows": rows}).items() if value}


def _rounded(value: Value, form: str) -> Value:
    """Return the number with the fewest digits, at least four significant ones, that is displayed equally."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(number, form) for number in value]  # type: ignore[misc]
    if not isinstance(value, float) or not form:
        return value
    shorter = (float(format(value, f".{digits}g")) for digits in range(4, 17))
    return next((number for number in shorter if format(number, form) == format(value, form)), value)


_TABLE_DEPTH = 3
"""Levels of a file: runs, their fields, tables, fields of a table."""


def _text(value: Any, depth: int = 0) -> str:
    """Return JSON with one line per field of a table, row and note."""
    margin = "\n" + " " * (depth + 1)
    if isinstance(value, Mapping) and depth <= _TABLE_DEPTH:
        fields = (f"{json.dumps(name)}: {_text(field, depth + 1)}" for name, field in value.items())
        return "{" + ",".join(margin + field for field in fields) + margin[:-1] + "}"
    if isinstance(value, Sequence) and not isinstance(value, str) and depth == _TABLE_DEPTH + 1:
        return "[" + ",".join(margin + json.dumps(item, ensure_ascii=False) for item in value) + margin[:-1] + "]"
    return json.dumps(value, ensure_ascii=False)


_commit = cache(commit_of_run)
"""Calls of git take a tenth of a second, and checks on a GPU save their tables after every case."""


def circumstances(accelerator: str = NO_ACCELERATOR) -> dict[str, str]:
    """Return command, commit, date, machine and software of this process."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    command = shlex.join(["python", *(["-m", module] if module else sys.argv[:1]), *_arguments()])
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, "
        f"load average {os.getloadavg()[0]:.1f}; {accelerator}",
        "software": f"Python {platform.python_version()}, jax {version('jax')}",
    }


def _arguments() -> list[str]:
    """Return the command-line options without `--out`."""
    kept = list(sys.argv[1:])
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return kept
