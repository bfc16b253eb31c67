"""Writes what benchmarks found into the documents that show it, so that nobody types a number.

    python -m benchmarks.render            # every document again, from benchmarks/results/*.json
    python -m benchmarks.render --check    # fails if one is not what would be written; a test does the same

A document says where a table goes and which, by run and name; what stands between the marks is replaced. Before the
first table of a run stand its command, date and machine.

    <!-- table: bench_systems/zipf -->
    <!-- /table -->

A number in a sentence is a cell: its table, then texts of other cells of its row that no other row has all of, then
the title of its column.

    <!-- value: bench_systems/zipf > exact > imbalance -->1.010<!-- /value -->

A plot is a file, `docs/results/plots/RUN.PLOT.svg` with one of `benchmarks.plots.figures_of`, which is drawn if a
document links to it. Its first line has the digest of the tables that it was drawn from.
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
    """All that may show results."""
    return [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, results: Path = RESULTS) -> str:
    """A document with all tables and values as they are in the results.

    Raises:
        KeyError: it names a table, row or column that there is not; a whole file may not be there yet.
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
    """The cell that a path names."""
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
    """How a run was made."""
    return f"`{record.command}`, {record.date}; {record.machine}; {record.software}."


def changed() -> Iterator[tuple[Path, str]]:
    """Documents that are not what would be written, with what would be."""
    for path in documents():
        text = path.read_text()
        wanted = rendered(text)
        if wanted != text:
            yield path, wanted


def old_plots() -> Iterator[tuple[Path, str]]:
    """Plot that documents link to and that were not drawn from these results, with the line that says so."""
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
    """Write all that changed, and says which."""
    for path, wanted in changed():
        path.write_text(wanted)
        print(path.relative_to(ROOT))
    for path, drawn in old_plots():
        draw(path, drawn)
        print(path.relative_to(ROOT))


def main() -> None:
    """Write all documents, or tells which are old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything would be written")
    given = parser.parse_args()
    if not given.check:
        write_documents()
    elif old := [str(path.relative_to(ROOT)) for path, _ in (*changed(), *old_plots())]:
        sys.exit(f"{', '.join(old)}: not what the results say; run python -m benchmarks.render")


if __name__ == "__main__":
    main()
