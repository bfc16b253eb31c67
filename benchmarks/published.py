"""Tables of published numbers beside simulated ones."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Row:
    """One number.

    Args:
        name: of what.
        simulated: by this project.
        published: in the paper; `None`: it has no such row.
        unit: of both.
        fitted: whether something was fitted to it, so that it is no prediction.
    """

    name: str
    simulated: float
    published: float | None = None
    unit: str = ""
    fitted: bool = False

    @property
    def deviation(self) -> float | None:
        """Of the simulated from the published number, in percent."""
        return None if self.published is None else 100 * (self.simulated / self.published - 1)


@dataclass
class Table:
    """Rows under a title, and what must be said about them."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, simulated: float, published: float | None = None, unit: str = "", fitted: bool = False
    ) -> None:
        """One more row."""
        self.rows.append(Row(name, float(simulated), published, unit, fitted))

    @property
    def mean_deviation(self) -> float | None:
        """Mean of the absolute deviations, in percent: of what was predicted, or of a table in which all was fitted."""
        known = [row for row in self.rows if row.deviation is not None]
        known = [row for row in known if not row.fitted] or known
        return sum(abs(row.deviation or 0.0) for row in known) / len(known) if known else None

    def __str__(self) -> str:
        if self.mean_deviation is None:
            head, lines = ["| | simulated |", "|---|---|"], [f"| {row.name} | {_number(row)} |" for row in self.rows]
        else:
            head, lines = (
                ["| | published | simulated | deviation % |", "|---|---|---|---|"],
                list(map(_line, self.rows)),
            )
            of = " of what was not fitted" if len({row.fitted for row in self.rows}) > 1 else ""
            lines.append(f"| mean of the absolute deviations{of} | | | {self.mean_deviation:.1f} |")
        lines = [f"**{self.title}**", "", *head, *lines]
        return "\n".join([*lines, *("\n" + note for note in self.notes), ""])


def _line(row: Row) -> str:
    published = "" if row.published is None else f"{row.published:.4g}{row.unit}"
    deviation = "" if row.deviation is None else f"{row.deviation:+.1f}"
    return f"| {row.name} | {published} | {_number(row)} | {deviation} |"


def _number(row: Row) -> str:
    return f"{row.simulated:.4g}{row.unit}"


def show(tables: Sequence[Table], as_json: bool) -> None:
    """Prints all of them, as Markdown or as one JSON object."""
    if not as_json:
        print(*tables, sep="\n")
        return
    found = [asdict(table) for table in tables]
    for table, rows in zip(tables, found, strict=True):
        for row, line in zip(table.rows, rows["rows"], strict=True):
            line["deviation_percent"] = row.deviation
    print(json.dumps({"tables": found}, indent=1))
