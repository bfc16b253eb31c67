"""These models say how long a rank takes for the rows of its slots."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Num

RowsPerSlot = Num[np.ndarray, "R S"]
Seconds = Float[np.ndarray, "R"]


@dataclass(frozen=True)
class AnalyticGemm:
    """This model is stated, not measured: an expert of `n` rows takes as long as `n + half_rows` rows at the peak.

    Use it where nobody has measured the machine. At `half_rows` rows it runs at half the peak, as weights must be read
    however few rows there are. The defaults are an assumption for an H100: 600 TFLOP/s reached in bfloat16, and the 295
    rows at which 989 TFLOP/s and 3.35 TB/s balance.

    Args:
        peak_flops_per_s: the rate of large products, in floating-point operations per second.
        half_rows: the rows of one expert at half the peak; usually the peak over the memory's rate, in operations per
            byte.
        launch_s: the seconds that a grouped FFN takes whatever its rows, usually 10e-6.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import AnalyticGemm
        >>> gemm = AnalyticGemm(peak_flops_per_s=1e12, half_rows=100.0, launch_s=0.0)
        >>> gemm.seconds(np.array([[100, 0], [300, 100]]), row_flops=1e9).tolist()
        [0.2, 0.6]
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
        """Computes the seconds of each rank.

        Args:
            rows: `[R, S]`, the rows of each slot.
            row_flops: the floating-point operations of a row.
            launches: how many grouped FFNs the rows are cut into, usually the rounds.
        """
        padded = np.where(rows > 0, rows + self.half_rows, 0.0).sum(1)
        return padded * row_flops / self.peak_flops_per_s + np.where(padded > 0, launches * self.launch_s, 0.0)


@dataclass(frozen=True)
class MeasuredGemm:
    """This model is a curve: the rate at which experts of so many rows run, as `jax-moe-lb calibrate` measures it.

    Use it wherever the machine can be measured. Between points the time is interpolated linearly. Below the first it is
    that of the first, as the weights are read whatever the rows. Beyond the last the rate is that of the last. Experts
    of another shape are taken to run at the same rate; how far that holds nobody has measured.

    Args:
        rows: the points of the curve, rows of one expert, ascending.
        flops_per_s: the rate at each point, in floating-point operations per second.
        launch_s: the seconds that a grouped FFN takes whatever its rows; usually 0, as the curve has them in it.

    Raises:
        ValueError: the points do not ascend, or a number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import MeasuredGemm
        >>> gemm = MeasuredGemm(rows=(10.0, 100.0), flops_per_s=(1e11, 5e11))
        >>> gemm.seconds(np.array([[100], [200]]), row_flops=1e9).tolist()
        [0.2, 0.4]
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
        """Finds the highest rate of the curve, in floating-point operations per second."""
        return max(self.flops_per_s)

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Computes the seconds of each rank.

        Args:
            rows: `[R, S]`, the rows of each slot.
            row_flops: the floating-point operations of a row.
            launches: how many grouped FFNs the rows are cut into, usually the rounds.
        """
        points, rates = np.array(self.rows), np.array(self.flops_per_s)
        # Times are interpolated, not rates: in seconds of one floating-point operation per row.
        known = points / rates
        beyond = np.maximum(rows - points[-1], 0.0) / rates[-1]
        one = np.where(rows > 0, np.interp(rows, points, known) + beyond, 0.0).sum(1)
        return one * row_flops + np.where(one > 0, launches * self.launch_s, 0.0)


Gemm = AnalyticGemm | MeasuredGemm
