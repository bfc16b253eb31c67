"""Replace measured numbers in the sentences of a page; see `benchmarks.render` for the block that names them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.render.results import Record, Table, Value, cell

BLOCK = re.compile(r"(?<=<!-- numbers\n).*?(?=-->)", re.DOTALL)
NOT_PROSE = re.compile(r"<!-- (table|include|answers): .*?<!-- end -->|<!--.*?-->", re.DOTALL)
BRACED = re.compile(r"\{(.+?)\}")
PLAIN = re.compile(r"(?P<plus>\+?)-?\d+(?:\.(?P<decimals>\d+))?")
"""A number without range, unit and separators."""


@dataclass(frozen=True)
class Phrase:
    """Words of a page with numbers in braces, and the path of the cell of each number."""

    words: str
    paths: list[str]

    def match(self, prose: str) -> re.Match[str]:
        """Return the one occurrence in a page, with a group per number; lines may break anywhere."""
        parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in BRACED.split(self.words)]
        # A number is no part of a longer one.
        parts[1::2] = [rf"(?<![\d.,])({number})(?!\d|[.,]\d)" for number in parts[1::2]]
        found = list(re.finditer("".join(parts), prose))
        if len(found) != 1:
            raise ValueError(f"phrase {self.words!r} occurs {len(found)} times; expected once")
        if len(parts) // 2 != len(self.paths):
            raise ValueError(f"phrase {self.words!r} has {len(self.paths)} paths; expected one per number in braces")
        return found[0]

    def line(self, numbers: list[str]) -> str:
        """Return the line of the block with other numbers."""
        new = iter(" ".join(number.split()) for number in numbers)
        return " | ".join([BRACED.sub(lambda _: f"{{{next(new)}}}", self.words), *self.paths])


def replace_numbers(page: str, records: Mapping[str, Record]) -> str:
    """Return a page with the numbers of its block replaced, in its sentences and in the block."""
    block = BLOCK.search(page)
    if block is None:
        return page
    prose = NOT_PROSE.sub(lambda match: "\0" * len(match.group()), page)  # positions stay
    table, lines, replaced = "", [], {}
    for line in block.group().splitlines():
        words, *paths = line.split(" | ")
        if paths:
            phrase = Phrase(words, paths)
            found = phrase.match(prose)
            cells = [cell_at(records, f"{table} > {path}") for path in paths]
            numbers = [written_as(old, *new) for old, new in zip(found.groups(), cells, strict=True)]
            replaced |= {found.span(n): number for n, number in enumerate(numbers, 1)}
            line = phrase.line(numbers)
        else:
            table = line
        lines.append(line + "\n")
    replaced[block.span()] = "".join(lines)
    for (start, end), text in sorted(replaced.items(), reverse=True):
        page = page[:start] + text + page[end:]
    return page


def written_as(old: str, value: Value, form: str) -> str:
    """Return a value as its predecessor in a sentence is written: the same decimals, or the text of the cell."""
    plain = PLAIN.fullmatch(old)
    if isinstance(value, str) or value is None or not plain:
        shown = cell(value, form)
        return old if old.split() == shown.split() else shown
    median = value if isinstance(value, int | float) else value[0]
    return format(median, f"{plain['plus']}.{len(plain['decimals'] or '')}f")


def cell_at(records: Mapping[str, Record], path: str) -> tuple[Value, str]:
    """Return the value at a path and the format of its column."""
    where, *row, column = (part.strip() for part in path.split(" > "))
    table = table_at(records, where)
    found = [number for number, cells in enumerate(table.cells()) if set(row) <= set(cells)]
    if len(found) != 1 or column not in table.columns:
        raise KeyError(
            f"{path!r} names {len(found)} rows of columns {list(table.columns)}; expected one row, one column"
        )
    return table.rows[found[0]][list(table.columns).index(column)], table.columns[column]


def table_at(records: Mapping[str, Record], where: str) -> Table:
    run, name = where.split("/")
    tables = records[run].tables if run in records else {}
    if name not in tables:
        raise KeyError(f"no table {name!r} in run {run!r}; it has {sorted(tables)}")
    return tables[name]
