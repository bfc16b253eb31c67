"""Insert results of benchmarks into the documents, so that no number is typed by hand.

    python -m benchmarks.render            # update every document from benchmarks/results/*.json
    python -m benchmarks.render --check    # fail if a document is out of date; also run by a test

A document marks the position of a table with its run and name; the text between the marks is replaced. The first table
of a run is preceded by its command, date and machine.

    <!-- table: bench_systems/zipf -->
    <!-- /table -->

A number in a sentence is a cell, given by its table, texts of other cells that identify its row, and the title of its
column.

    <!-- value: bench_systems/zipf > exact > imbalance -->1.010<!-- /value -->

A plot is a file `docs/results/plots/RUN.PLOT.svg` with one of `benchmarks.plots.figures_of`, drawn if a document links
to it. Its first line has the digest of its tables.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.results import Record, Table, read

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "results" / "plots"
PLOT = re.compile(r"plots/(?P<name>[\w-]+)\.(?P<plot>[\w-]+)\.svg")
TABLE = re.compile(r"<!-- table: (?P<name>\S+) -->\n.*?<!-- /table -->", re.DOTALL)
VALUE = re.compile(r"<!-- value: (?P<path>[^\n]+?) -->.*?<!-- /value -->", re.DOTALL)


def documents() -> list[Path]:
    """Return all documents that may contain results."""
    return [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, results: Path = RESULTS) -> str:
    """Return a document with all tables and values updated from the results.

    Raises:
        KeyError: a table, row or column does not exist; a missing results file is allowed.
    """
    seen: set[str] = set()
    records = read(results)

    def table(match: re.Match[str]) -> str:
        run, name = match["name"].split("/")
        shown = f"Not run yet: `{run}` is not among the results."
        if run in records:
            head = "" if run in seen else made_by(records[run]) + "\n\n"
            shown = f"{head}{table_of(records, run, name)}"
        seen.add(run)
        return f"<!-- table: {run}/{name} -->\n{shown}\n<!-- /table -->"

    def value(match: re.Match[str]) -> str:
        return f"<!-- value: {match['path']} -->{value_of(records, match['path'])}<!-- /value -->"

    return VALUE.sub(value, TABLE.sub(table, text))


def table_of(records: Mapping[str, Record], run: str, name: str) -> Table:
    """Return one table of one run."""
    tables = records[run].tables if run in records else {}
    if name not in tables:
        raise KeyError(f"no table {name!r} in run {run!r}; it has {sorted(tables)}")
    return tables[name]


def value_of(records: Mapping[str, Record], path: str) -> str:
    """Return the cell at a path."""
    where, *row, column = (part.strip() for part in path.split(" > "))
    run, name = where.split("/")
    table = table_of(records, run, name)
    found = [cells for cells in table.cells() if set(row) <= set(cells)]
    if len(found) != 1 or column not in table.columns:
        raise KeyError(
            f"{path!r} names {len(found)} rows of columns {list(table.columns)}; expected one row, one column"
        )
    return found[0][list(table.columns).index(column)]


def made_by(record: Record) -> str:
    """Return the provenance of a run."""
    return f"`{record.command}`, {record.date}; {record.machine}; {record.software}."


def changed() -> Iterator[tuple[Path, str]]:
    """Yield out-of-date documents with their new content."""
    for path in documents():
        text = path.read_text()
        wanted = rendered(text)
        if wanted != text:
            yield path, wanted


def old_plots() -> Iterator[tuple[Path, str]]:
    """Yield linked plots that are out of date, with their digest line."""
    text, records = "".join(path.read_text() for path in documents()), read(RESULTS)
    for match in sorted({match.group() for match in PLOT.finditer(text)}):
        path = PLOTS / Path(match).name
        drawn = f"<!-- of {records[path.name.split('.')[0]].digest} -->"
        if not path.exists() or path.read_text().split("\n", 1)[0] != drawn:
            yield path, drawn


def draw(path: Path, drawn: str) -> None:
    """Write one plot."""
    from benchmarks.plots import figures_of, svg

    name, plot, _ = path.name.split(".")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{drawn}\n{svg(figures_of(name, read(RESULTS)[name].tables)[plot])}")


def write_documents() -> None:
    """Write all out-of-date documents and print their names."""
    for path, wanted in changed():
        path.write_text(wanted)
        print(path.relative_to(ROOT))
    for path, drawn in old_plots():
        draw(path, drawn)
        print(path.relative_to(ROOT))


def main() -> None:
    """Write all documents, or print the out-of-date ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Fail if a document is out of date; write no file.")
    given = parser.parse_args()
    if not given.check:
        write_documents()
    elif old := [str(path.relative_to(ROOT)) for path, _ in (*changed(), *old_plots())]:
        sys.exit(f"{', '.join(old)}: out of date; run python -m benchmarks.render")


if __name__ == "__main__":
    main()
