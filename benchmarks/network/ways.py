"""Who sends rows to whom, and by which rail ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ROW_BYTES = 2048
"""Of a token of width 1024 in two bytes."""

Route = Callable[[int, int, int], tuple[int, ...]]
"""The ranks by which rows travel, of their source, their target and the number of their way; no rank twice."""


@dataclass(frozen=True)
class Ways:
    """Which rows travel which way.

    Args:
        rows: from rank to rank on each way, `[R, R, W]`; a pair's rows stand in order of their way.
        path: of each way.
    """

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
        """From rank to rank, `[R, R]` rows."""
        return cls(rows[:, :, None], lambda source, target, way: (source, target))

    @classmethod
    def along_rails(cls, rails: np.ndarray) -> "Ways":
        """Between nodes of as many ranks as rails: by the rank of the own node on the rail, and that of the other.

        Args:
            rails: rows from rank to rank on each rail, `[R, R, N]`, as of `Plan.rails`.
        """
        num_rails = rails.shape[2]
        if len(rails) % num_rails:
            raise ValueError(f"rails has {num_rails} rails for {len(rails)} ranks; expected a divisor of the ranks")

        def path(source: int, target: int, rail: int) -> tuple[int, ...]:
            if source // num_rails == target // num_rails:
                return source, target
            near, far = (rank // num_rails * num_rails + rail for rank in (source, target))
            # A rail rank that is the source or the target itself is no hop.
            return tuple(dict.fromkeys((source, near, far, target)))

        return cls(rails, path)

    def hops(self) -> np.ndarray:
        """Rows that pass from rank to rank, `[R, R]`: their own, and those of others."""
        passing = np.zeros(self.rows.shape[:2], np.int64)
        for source, target, way in np.argwhere(self.rows).tolist():
            path = self.path(source, target, way)
            for one, following in pairwise(path):
                passing[one, following] += self.rows[source, target, way]
        return passing


def contents(source: int, target: int, count: int) -> np.ndarray:
    """The rows from a rank to another, `[count, ROW_BYTES / 4]` int32: each says whose it is, and which."""
    number = np.arange(count, dtype=np.int32)
    rows = number[:, None] * np.int32(1009) + np.arange(ROW_BYTES // 4, dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = source, target, number
    return rows


def expected(rank: int, ways: Ways) -> np.ndarray:
    """What a rank should receive: by source, then in order."""
    counts = ways.rows[:, rank].sum(-1).tolist()
    return np.concatenate([contents(source, rank, count) for source, count in enumerate(counts)])
