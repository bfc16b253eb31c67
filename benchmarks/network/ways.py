"""Routes of rows between ranks, direct or via rail ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ROW_BYTES = 2048
"""Bytes of a token of width 1024 in two bytes per number."""

Route = Callable[[int, int, int], tuple[int, ...]]
"""Function of source, target and way, returning the ranks on the route, without duplicates."""


@dataclass(frozen=True)
class Ways:
    """Rows by route."""

    rows: np.ndarray
    path: Route

    def __post_init__(self) -> None:
        own = np.flatnonzero(np.einsum("rrw->r", self.rows))
        if own.size:
            raise ValueError(f"rows has rows from rank {own[0]} to itself; expected none")
        if self.rows.min(initial=0) < 0:
            raise ValueError(f"rows has {self.rows.min()} rows from a rank to another; expected at least 0")

    @classmethod
    def straight(cls, rows: np.ndarray) -> "Ways":
        """Return direct routes for `[R, R]` rows."""
        return cls(rows[:, :, None], lambda source, target, way: (source, target))

    @classmethod
    def along_rails(cls, rails: np.ndarray) -> "Ways":
        """Return routes between nodes with one rank per rail: via the rail ranks of the own and the other node."""
        num_rails = rails.shape[2]
        if len(rails) % num_rails:
            raise ValueError(f"rails has {num_rails} rails for {len(rails)} ranks; expected a divisor of the ranks")

        def path(source: int, target: int, rail: int) -> tuple[int, ...]:
            if source // num_rails == target // num_rails:
                return source, target
            near, far = (rank // num_rails * num_rails + rail for rank in (source, target))
            # A rail rank equal to the source or the target is not a hop.
            return tuple(dict.fromkeys((source, near, far, target)))

        return cls(rails, path)

    def hops(self) -> np.ndarray:
        """Return the rows sent between ranks, `[R, R]`, including forwarded ones."""
        passing = np.zeros(self.rows.shape[:2], np.int64)
        for source, target, way in np.argwhere(self.rows).tolist():
            path = self.path(source, target, way)
            for one, following in pairwise(path):
                passing[one, following] += self.rows[source, target, way]
        return passing


def contents(source: int, target: int, count: int) -> np.ndarray:
    """Return the rows from one rank to another, `[count, ROW_BYTES / 4]` int32, each with its source, target and
    index.
    """
    number = np.arange(count, dtype=np.int32)
    rows = number[:, None] * np.int32(1009) + np.arange(ROW_BYTES // 4, dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = source, target, number
    return rows


def expected(rank: int, ways: Ways) -> np.ndarray:
    """Return the rows expected by a rank, by source, then in order."""
    counts = ways.rows[:, rank].sum(-1).tolist()
    return np.concatenate([contents(source, rank, count) for source, count in enumerate(counts)])
