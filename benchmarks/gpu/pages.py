"""Text of documents about the results of one GPU: a section of the page of results, and a row of the status."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.gpu.claims import MODELS
from benchmarks.gpu.findings import CLAIMS, FALSE, TRUE
from benchmarks.render.marks import made_by
from benchmarks.render.results import Record, Table

SECTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{f"rank-{name}": (f"One rank of eight, {model}", "skew", ("4", "even")) for name, model in MODELS.items()},
    "parts": ("Parts of a rank's layer at skew 4", "system", ("exact, one round",)),
    "products": ("Grouped products, TFLOP/s", "kind", ("product",)),
    "planner-time": ("Planners", "", ()),
    "clocks": ("Rates of the device on random data", "", ()),
    CLAIMS: ("Claims", "outcome", (TRUE, FALSE)),
}
"""Title of each table in their order, and a column with the texts of shown rows."""

HIDDEN = ("claim", "found")
"""Columns that the file of results has alone."""


def heading(kind: str) -> str:
    """Return the title of the section."""
    return f"On an {kind.upper()}"


def with_section(page: str, kind: str, run: str, record: Record) -> str:
    """Return the page of results with the section of a GPU, before the numbers at its end."""
    before = re.search(rf"^## {heading(kind)}\n.*?(?=^## |^<!-- numbers|\Z)", page, re.M | re.S)
    if before is not None:
        page = page[: before.start()] + page[before.end() :]
    at = numbers.start() if (numbers := re.search(r"^<!-- numbers", page, re.M)) else len(page)
    link = f"[{run}.json](../../benchmarks/results/{run}.json)"
    start = f"## {heading(kind)}\n\nThe same checks on one NVIDIA {kind.upper()}; {link} has all tables."
    return page[:at] + "\n\n".join([start, made_by(record), *_tables(record.tables)]) + "\n\n" + page[at:]


def _tables(tables: Mapping[str, Table]) -> Iterator[str]:
    # Without marks, since a short run lacks tables and rows.
    for name, (title, column, texts) in SECTIONS.items():
        if name in tables and tables[name].rows:
            yield f"{title}:\n\n{_shown(tables[name], column, texts)}"


def _shown(table: Table, column: str, texts: tuple[str, ...]) -> Table:
    at = list(table.columns).index(column) if column else 0
    rows = [row for row, cells in zip(table.rows, table.cells(), strict=True) if cells[at] in texts] or table.rows
    kept = [i for i, name in enumerate(table.columns) if name not in HIDDEN]
    columns = {name: form for name, form in table.columns.items() if name not in HIDDEN}
    return replace(table, columns=columns, rows=[[row[i] for i in kept] for row in rows])


def with_row(status: str, kind: str, tables: Mapping[str, Table]) -> str:
    """Return the page of the status with the row of a GPU, below those of other single GPUs."""
    name, outcomes = f"| one NVIDIA {kind.upper()} |", [row[3] for row in tables[CLAIMS].rows]
    anchor = heading(kind).lower().replace(" ", "-")
    counts = f"{outcomes.count(TRUE)} claims true, {outcomes.count(FALSE)} false"
    row = f"{name} **run** | [{counts}](results/gpu.md#{anchor}), without exchanges |"
    lines = [line for line in status.splitlines() if not line.startswith(name)]
    at = max(i for i, line in enumerate(lines) if line.startswith("| one NVIDIA"))
    return "\n".join([*lines[: at + 1], row, *lines[at + 1 :]]) + "\n"
