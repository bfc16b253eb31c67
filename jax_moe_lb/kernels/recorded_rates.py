"""Recorded rates of grouped products on GPUs, by which `choose_backend` prefers one kernel to an earlier one.

Source: autotuning database of tokamax 0.0.17, for H100 and B200. A rate is the median over the bfloat16 shapes with
8,192 rows or more that are recorded for both kernels, or for the only one. `ci/recorded_rates.py` reads the database
and compares.
"""

from typing import Literal

RecordedKernel = Literal["Mosaic", "Triton"]
"""Compiler of the recorded kernel."""

TFLOPS: dict[tuple[str, str, RecordedKernel], float] = {
    ("9.0", "product", "Mosaic"): 450.2,
    ("9.0", "product", "Triton"): 391.8,
    ("9.0", "transposed", "Mosaic"): 345.8,
    ("9.0", "transposed", "Triton"): 303.8,
    ("9.0", "outer", "Mosaic"): 111.5,
    ("9.0", "outer", "Triton"): 605.0,
    ("10.0", "product", "Mosaic"): 878.9,
    ("10.0", "product", "Triton"): 377.6,
    ("10.0", "transposed", "Mosaic"): 1231.4,
    ("10.0", "transposed", "Triton"): 243.3,
    ("10.0", "outer", "Triton"): 1070.0,
}
"""TFLOP/s by compute capability, kind of product and kernel."""


def recorded_tflops(compute_capability: str, kind: str, kernel: RecordedKernel | None) -> float | None:
    """Return the recorded rate of a kernel in TFLOP/s; `None` if there is none.

    Args:
        compute_capability: compute capability of the device, such as "9.0".
        kind: kind of the product; see `backends.Kind`.
        kernel: the recorded kernel; `None` for kernels without a record.

    Examples:
        >>> recorded_tflops("9.0", "outer", "Triton")
        605.0
    """
    return None if kernel is None else TFLOPS.get((compute_capability, kind, kernel))
