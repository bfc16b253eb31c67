"""Fill the marks of a page: tables of results, other pages, and answers of other pages; see `benchmarks.render`."""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.render.numbers import replace_numbers, table_at
from benchmarks.render.results import Record, Table

MARK = re.compile(r"<!-- (?P<kind>table|rows|include|answers): (?P<given>[^\n]+?) -->\n.*?<!-- end -->", re.DOTALL)
TITLE_OR_COMMENT = re.compile(r"\A# [^\n]*\n|<!--.*?-->\n?", re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:)(?P<path>[^)\s#]*)")


@dataclass(frozen=True)
class Page:
    folder: Path
    records: Mapping[str, Record]
    runs: set[str] = field(default_factory=set)

    def filled(self, text: str) -> str:
        """Return the text of the page with new contents and numbers."""
        return replace_numbers(MARK.sub(self._mark, text), self.records)

    def _mark(self, match: re.Match[str]) -> str:
        contents = {"table": self.tables, "rows": self.rows, "include": self.body, "answers": self.answers}
        return f"<!-- {match['kind']}: {match['given']} -->\n{contents[match['kind']](match['given'])}\n<!-- end -->"

    def tables(self, given: str) -> str:
        names, *conditions = given.split(" | ")
        return "\n\n".join(self.table(where, conditions) for where in table_names(names))

    def rows(self, given: str) -> str:
        """Return a table of all runs of a pattern, which have equal columns, as one table with their commands."""
        names = tables_like(given, self.records)
        runs = [self.records[name.partition("/")[0]] for name in names]
        tables = [table_at(self.records, name) for name in names]
        self.runs.update(name.partition("/")[0] for name in names)
        rows = [
            [*row, f"`{run.command}`, {run.date}"] for run, one in zip(runs, tables, strict=True) for row in one.rows
        ]
        notes = [f"{one.rows[0][0]}: {' '.join(one.notes)}" for one in tables if one.notes]
        notes = [*dict.fromkeys(map(made_on, runs)), *(note[0].upper() + note[1:] for note in notes)]
        return str(replace(tables[0], columns={**tables[0].columns, "command": ""}, rows=rows, notes=notes))

    def table(self, where: str, conditions: Sequence[str]) -> str:
        """Return the selected rows of a table, below the provenance of a run that is new to the page."""
        run = where.partition("/")[0]
        if run not in self.records:
            return f"Not run yet: `{run}` is not among the results."
        head = "" if run in self.runs else made_by(self.records[run]) + "\n\n"
        self.runs.add(run)
        return f"{head}{select(table_at(self.records, where), conditions)}"

    def body(self, path: str) -> str:
        """Return another page before its first section, without title and comments, with links as in this page."""

        def link(match: re.Match[str]) -> str:
            return posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"])) if match["path"] else path

        other = self.folder / path
        text = Page(other.parent, self.records).filled(other.read_text())
        first, _, _ = TITLE_OR_COMMENT.sub("", text).partition("\n## ")
        return LINK.sub(link, first).strip()

    def answers(self, given: str) -> str:
        """Return a table of titles and first paragraphs of pages."""
        folder, *names = given.split()
        rows = [self.answer(posixpath.normpath(f"{folder}{name}.md")) for name in names]
        return "\n".join(["| page | answer |", "|---|---|", *rows])

    def answer(self, path: str) -> str:
        """Return the linked title and the first paragraph of a page as a row."""
        title = (self.folder / path).read_text().partition("\n")[0].removeprefix("# ")
        paragraph = self.body(path).partition("\n\n")[0]
        return f"| [{title}]({path}) | {' '.join(paragraph.split())} |"


def table_names(names: str) -> list[str]:
    """Return run and name of all tables of a mark; a name without run has that of its predecessor."""
    run, tables = "", list[str]()
    for name in names.split():
        run = name.partition("/")[0] if "/" in name else run
        tables.append(name if "/" in name else f"{run}/{name}")
    return tables


def tables_like(pattern: str, runs: Iterable[str]) -> list[str]:
    """Return run and name of a table, such as `reliability_*/summary`, for all runs of the pattern."""
    run, _, table = pattern.partition("/")
    return [f"{name}/{table}" for name in sorted(runs) if fnmatchcase(name, run)]


def select(table: Table, conditions: Sequence[str]) -> Table:
    """Return the rows with one of the texts of each condition, without columns of one text."""
    for condition in conditions:
        column, _, texts = condition.partition(" = ")
        at, allowed = list(table.columns).index(column), texts.split(" or ")
        rows = [row for row, cells in zip(table.rows, table.cells(), strict=True) if cells[at] in allowed]
        if not rows:
            raise ValueError(f"no row with {condition}; column {column} has {sorted({c[at] for c in table.cells()})}")
        kept = [name for name in table.columns if name != column or len(allowed) > 1]
        columns = {name: table.columns[name] for name in kept}
        rows = [[row[list(table.columns).index(name)] for name in kept] for row in rows]
        table = replace(table, columns=columns, rows=rows)
    return table


def made_by(record: Record) -> str:
    """Return command, date, hardware and software of a run."""
    return f"`{record.command}`, {record.date}; {made_on(record)}"


def made_on(record: Record) -> str:
    """Return hardware and software of a run."""
    machine = re.sub(r", (load average [\d.]+|with other work)", "", record.machine)
    return f"{machine}; {record.software}."
