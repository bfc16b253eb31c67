"""Outcomes of checks, and the files that keep them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from benchmarks.render.results import Table, circumstances, load, save

TRUE, FALSE, NOT_REACHED = "true", "false", "not reached"
DRY_RUN_FAILED = "the check fails: "
"""Start of the reason of a claim whose check failed for its own fault in a dry run."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Scale:
    """Sizes of checks."""

    dry: bool
    # Equal scales share cached programs.
    keep: Callable[[Table], None] = field(default=lambda _: None, compare=False)

    def of(self, full: Value, tiny: Value) -> Value:
        """Return the value of a dry run, or the other one."""
        return tiny if self.dry else full


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    holds: bool | None
    found: str
    table: Table | None = None


Check = Callable[[Scale], Finding]
"""Function that checks a claim. An exception, such as an `AssertionError`, makes the claim false."""


@dataclass(frozen=True)
class Claim:
    """Statement about this library on NVIDIA GPUs."""

    name: str
    text: str
    source: str
    check: Check


@dataclass(frozen=True)
class Row:
    """Stored outcome of a claim."""

    claim: str
    outcome: str
    found: str
    seconds: float
    device: str
    commit: str
    run: str


CLAIMS = "claims"
"""Name of the table of outcomes in a file; other tables have names of claims."""

COLUMNS = dict.fromkeys(Row.__dataclass_fields__, "") | {"seconds": ".1f"}


def now() -> str:
    """Return the time as the name of a run."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_rows(path: Path) -> dict[str, Row]:
    """Return the outcomes of a file by claim, none if it does not exist."""
    if not path.exists():
        return {}
    return {values[0]: Row(*values) for values in load(path)[CLAIMS].rows}  # type: ignore[arg-type,misc]


def write_row(path: Path, row: Row, table: Table | None = None) -> None:
    """Write the outcome of one claim, and its further measurements, and keep those of all others."""
    rows = read_rows(path) | {row.claim: replace(row, commit=circumstances()["commit"])}
    tables = (load(path) if path.exists() else {}) | ({} if table is None else {row.claim: table})
    kept = Table(COLUMNS, [list(vars(one).values()) for one in rows.values()])
    path.parent.mkdir(parents=True, exist_ok=True)
    save({**tables, CLAIMS: kept}, path, row.device)
