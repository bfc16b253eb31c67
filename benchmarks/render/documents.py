"""Insert results of benchmarks into the documents, so that no number is typed by hand.

    python -m benchmarks.render            # update every document from benchmarks/results/*.json
    python -m benchmarks.render --check    # fail if a document is out of date; also run by a test

The check also fails if a result names a commit that is not in the history, unless the history is not there (a shallow
clone, unpacked sources).

A document marks the position of tables with their runs and names; the text between the marks is replaced. Command, date
and machine precede the first table of a run.

    <!-- table: systems/zipf popular_ranks memory/memory -->
    <!-- end -->

Conditions select rows; a column with one text is omitted.

    <!-- table: systems/zipf | rounds = 1.0 | system = exact or plain -->
    <!-- end -->

A table of several runs, with equal columns, becomes one, with the command of each run:

    <!-- rows: reliability_*/summary -->
    <!-- end -->

Sentences have plain numbers. A block at the end of a page names their cells: a line with a table, then a line per
phrase of the page, with numbers in braces and the path of each: texts of other cells that identify the row, and the
title of the column.

    <!-- numbers
    systems/zipf
    from {2.51} to {1.01} times the mean | plain > imbalance | exact > imbalance
    -->

A phrase occurs once in the page; lines may break anywhere. Both copies of a number are updated. A plain number keeps
its count of decimals; a number with a range or unit is the text of the cell.

A page includes the text of another before its first section, without title and comments; links become relative to the
including page. It also lists the first paragraphs of other pages.

    <!-- include: ../status.md -->
    <!-- end -->

    <!-- answers: results/ gpu training -->
    <!-- end -->

A plot is a file `docs/results/plots/RUN.PLOT.svg` with one of `plots.figures_of`, drawn if a document links to it.
Its first line has the digest of its tables.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.render.history import NO_COMMIT, missing_commits
from benchmarks.render.marks import Page
from benchmarks.render.results import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "results" / "plots"
PLOT = re.compile(r"plots/(?P<name>[\w-]+)\.(?P<plot>[\w-]+)\.svg")


def documents() -> list[Path]:
    """Return all documents that may contain results."""
    return [ROOT / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def rendered(text: str, results: Path = RESULTS, folder: Path = ROOT) -> str:
    """Return a document with all tables, included pages and numbers updated."""
    return Page(folder, read(results)).filled(text)


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


def missing() -> list[str]:
    """Return the runs whose commit is not in the history."""
    commits = {name: record.commit for name, record in read(RESULTS).items()}
    lost = set(missing_commits(commits.values()))
    return [f"commit of {name} is {commit}" for name, commit in commits.items() if commit in lost]


def draw(path: Path, drawn: str) -> None:
    from benchmarks.render.plots import figures_of, svg

    name, plot, _ = path.name.split(".")
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{drawn}\n{svg(figures_of(read(RESULTS)[name].tables)[plot])}")


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
    parser.add_argument(
        "--check", action="store_true", help="Fail if a document is out of date or a commit is missing."
    )
    given = parser.parse_args()
    if not given.check:
        write_documents()
    elif old := [str(path.relative_to(ROOT)) for path, _ in (*changed(), *old_plots())]:
        sys.exit(f"{', '.join(old)}: out of date; run python -m benchmarks.render")
    elif lost := missing():
        sys.exit(f"{', '.join(lost)}; expected a commit of the history, or {NO_COMMIT!r}")
