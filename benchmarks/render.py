"""Insert results of benchmarks into the documents, so that no number is typed by hand.

    python -m benchmarks.render            # update every document from benchmarks/results/*.json
    python -m benchmarks.render --check    # fail if a document is out of date; also run by a test

A document marks the position of tables with their run and names; the text between the marks is replaced. Command, date
and machine precede the first table of a run.

    <!-- table: bench_systems/zipf popular_ranks -->
    <!-- /table -->

Sentences have plain numbers. A block at the end of a page names their cells: a line with a table, then a line per
phrase of the page, with numbers in braces and the path of each: texts of other cells that identify the row, and the
title of the column.

    <!-- numbers
    bench_systems/zipf
    from {2.51} to {1.01} times the mean | plain > imbalance | exact > imbalance
    -->

A phrase occurs once in the page; lines may break anywhere. Both copies of a number are updated. A plain number keeps
its count of decimals; a number with a range or unit is the text of the cell.

A page includes the text of another before its first section, without title and comments; links become relative to the
including page.

    <!-- include: ../status.md -->
    <!-- /include -->

A plot is a file `docs/results/plots/RUN.PLOT.svg` with one of `benchmarks.plots.figures_of`, drawn if a document links
to it. Its first line has the digest of its tables.
"""

import argparse
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page_numbers import cell_at, replace_numbers, table_at
from benchmarks.results import Record, cell, read

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "results" / "plots"
PLOT = re.compile(r"plots/(?P<name>[\w-]+)\.(?P<plot>[\w-]+)\.svg")
TABLE = re.compile(r"<!-- table: (?P<names>[^\n]+?) -->\n.*?<!-- /table -->", re.DOTALL)
INCLUDE = re.compile(r"<!-- include: (?P<path>\S+) -->\n.*?<!-- /include -->", re.DOTALL)
TITLE_OR_COMMENT = re.compile(r"\A# [^\n]*\n|<!--.*?-->\n?", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)\s#]+)")
VALUE = re.compile(r"<!-- value: (?P<path>[^\n]+?) -->.*?<!-- /value -->", re.DOTALL)


def documents() -> list[Path]:
    """Return all documents that may contain results."""
    return [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, results: Path = RESULTS, folder: Path = ROOT) -> str:
    """Return a document with all tables, included pages and numbers updated.

    Args:
        text: the document.
        results: folder of the results.
        folder: folder of the document.

    Raises:
        KeyError: a table, row or column does not exist; a missing results file is allowed.
        ValueError: a phrase of the block `numbers` does not occur exactly once.
    """
    seen: set[str] = set()
    records = read(results)

    def shown(where: str) -> str:
        run = where.partition("/")[0]
        if run not in records:
            return f"Not run yet: `{run}` is not among the results."
        head = "" if run in seen else made_by(records[run]) + "\n\n"
        seen.add(run)
        return f"{head}{table_at(records, where)}"

    def tables(match: re.Match[str]) -> str:
        shown_tables = "\n\n".join(map(shown, tables_of(match)))
        return f"<!-- table: {match['names']} -->\n{shown_tables}\n<!-- /table -->"

    def include(match: re.Match[str]) -> str:
        path = folder / match["path"]
        body = included(rendered(path.read_text(), results, path.parent), match["path"])
        return f"<!-- include: {match['path']} -->\n{body}\n<!-- /include -->"

    def value(match: re.Match[str]) -> str:
        return f"<!-- value: {match['path']} -->{cell(*cell_at(records, match['path']))}<!-- /value -->"

    return replace_numbers(VALUE.sub(value, INCLUDE.sub(include, TABLE.sub(tables, text))), records)


def tables_of(match: re.Match[str]) -> list[str]:
    """Return run and name of all tables of a mark."""
    run, first, *others = re.split(r"[/ ]", match["names"])
    return [f"{run}/{name}" for name in (first, *others)]


def included(text: str, path: str) -> str:
    """Return a page at a relative path without title and comments, with links as in the including page."""

    def link(match: re.Match[str]) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))

    first, _, _ = TITLE_OR_COMMENT.sub("", text).partition("\n## ")
    return LINK.sub(link, first).strip()


def made_by(record: Record) -> str:
    """Return command, date, hardware and software of a run."""
    machine = re.sub(r", (load average [\d.]+|with other work)", "", record.machine)
    return f"`{record.command}`, {record.date}; {machine}; {record.software}."


def changed() -> Iterator[tuple[Path, str]]:
    """Yield out-of-date documents with their new content."""
    for path in documents():
        text = path.read_text()
        try:
            wanted = rendered(text, folder=path.parent)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path.relative_to(ROOT)}: {error.args[0]}") from error
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
