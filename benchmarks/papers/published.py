"""Comparison of published and simulated numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.render.results import Table, Value


@dataclass(frozen=True)
class Row:
    name: str
    simulated: float
    published: float | None = None
    unit: str = ""
    fitted: bool = False

    @property
    def deviation(self) -> float | None:
        """Deviation of the simulated from the published number, in percent."""
        return None if self.published is None else 100 * (self.simulated / self.published - 1)


@dataclass
class Comparison:
    """Rows under a title, with notes."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, name: str, simulated: float, published: float | None = None, unit: str = "", fitted: bool = False
    ) -> None:
        self.rows.append(Row(name, float(simulated), published, unit, fitted))

    @property
    def mean_deviation(self) -> float | None:
        """Mean of absolute deviations in percent, over predictions, or over all rows if all were fitted."""
        known = [row for row in self.rows if row.deviation is not None]
        known = [row for row in known if not row.fitted] or known
        return sum(abs(row.deviation or 0.0) for row in known) / len(known) if known else None

    def table(self) -> Table:
        """Return the rows as a table, with the mean deviation if there are published numbers."""
        units = {row.unit for row in self.rows}
        unit = f", {units.pop()}" if len(units) == 1 and "" not in units else ""
        rows: list[list[Value]] = [[_name(row, unit), row.published, row.simulated, row.deviation] for row in self.rows]
        columns = {"": "", f"published{unit}": ".4g", f"simulated{unit}": ".4g", "deviation, %": "+.1f"}
        if self.mean_deviation is None:
            columns = {"": "", f"simulated{unit}": ".4g"}
            rows = [[name, simulated] for name, _, simulated, _ in rows]
        else:
            of = ", predictions only" if len({row.fitted for row in self.rows}) > 1 else ""
            rows.append([f"mean absolute deviation{of}", None, None, f"{self.mean_deviation:.1f}"])
        return Table(columns, rows, self.title, tuple(self.notes))


def _name(row: Row, unit: str) -> str:
    return row.name + (f", {row.unit}" if row.unit and not unit else "")


def tables_of(comparisons: Sequence[Comparison]) -> dict[str, Table]:
    return {one.name: one.table() for one in comparisons}
