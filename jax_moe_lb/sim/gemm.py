"""How long a rank takes for the rows of its slots."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Num

RowsPerSlot = Num[np.ndarray, "R S"]
Seconds = Float[np.ndarray, "R"]


@dataclass(frozen=True)
class AnalyticGemm:
    """A stated model: an expert of `n` rows takes as long as `n + half_rows` rows at the peak.

    So at `half_rows` rows it runs at half the peak: weights must be read however few rows there are. The defaults
    are an assumption for an H100, no measurement: 600 TFLOP/s reached in bfloat16, and the 295 rows at which 989
    TFLOP/s and 3.35 TB/s balance.

    Args:
        peak_flops_per_s: of large products.
        half_rows: rows of one expert at half the peak.
        launch_s: once per grouped FFN, whatever its rows.
    """

    peak_flops_per_s: float = 600e12
    half_rows: float = 295.0
    launch_s: float = 10e-6

    def __post_init__(self) -> None:
        if not 0 < self.peak_flops_per_s < math.inf:
            raise ValueError(f"peak_flops_per_s is {self.peak_flops_per_s}; expected a finite rate above 0")
        for name, value in (("half_rows", self.half_rows), ("launch_s", self.launch_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number, at least 0")

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Of each rank, for rows `[R, S]` of `row_flops` floating-point operations each."""
        padded = np.where(rows > 0, rows + self.half_rows, 0.0).sum(1)
        return padded * row_flops / self.peak_flops_per_s + np.where(padded > 0, launches * self.launch_s, 0.0)


@dataclass(frozen=True)
class MeasuredGemm:
    """A curve: the rate at which experts of so many rows run, as `jax-moe-lb calibrate` measures it.

    Between points the time is interpolated linearly. Below the first it is that of the first: the weights are read
    whatever the rows. Beyond the last the rate is that of the last. Experts of another shape are taken to run at
    the same rate; how far that holds nobody has measured.

    Args:
        rows: of one expert, ascending.
        flops_per_s: at each of them.
        launch_s: once per grouped FFN, whatever its rows.
    """

    rows: tuple[float, ...]
    flops_per_s: tuple[float, ...]
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.flops_per_s):
            raise ValueError(f"rows has {len(self.rows)} points, flops_per_s {len(self.flops_per_s)}; expected as many")
        if min(self.rows) <= 0 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows is {self.rows}; expected ascending numbers above 0")
        if not 0 < min(self.flops_per_s) <= max(self.flops_per_s) < math.inf:
            raise ValueError(f"flops_per_s is {self.flops_per_s}; expected finite rates above 0")
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"launch_s is {self.launch_s}; expected a finite number, at least 0")

    @property
    def peak_flops_per_s(self) -> float:
        """The highest rate of the curve."""
        return max(self.flops_per_s)

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Of each rank, for rows `[R, S]` of `row_flops` floating-point operations each."""
        points, rates = np.array(self.rows), np.array(self.flops_per_s)
        # In seconds of one floating-point operation per row.
        known = points / rates
        beyond = np.maximum(rows - points[-1], 0.0) / rates[-1]
        one = np.where(rows > 0, np.interp(rows, points, known) + beyond, 0.0).sum(1)
        return one * row_flops + np.where(one > 0, launches * self.launch_s, 0.0)


Gemm = AnalyticGemm | MeasuredGemm
