"""Recorded rates of grouped products on GPUs, by which `choose_backend` prefers one kernel to an earlier one.

For an H100 they were run on one, on 2026-11-26: medians over the products of one rank of Qwen3-30B-A3B, DeepSeek-V3 and
Mixtral-8x7B with 8,192 rows or more, in bfloat16 (`benchmarks/gpu/tiles.py`). The one of tokamax is that of its default
tiles, whose sums of groups were wrong.

For a B200 the source is the autotuning database of tokamax 0.0.17: the median over the bfloat16 shapes with 8,192 rows
or more that are recorded for both kernels, or for the only one. `ci/recorded_rates.py` reads the database and compares.
"""

from typing import Literal

RecordedKernel = Literal["Mosaic", "Triton"]
"""Compiler of the recorded kernel, by tokamax for Mosaic."""

TFLOPS: dict[tuple[str, str, RecordedKernel], float] = {
    ("9.0", "product", "Mosaic"): 282.0,
    ("9.0", "product", "Triton"): 584.0,
    ("9.0", "transposed", "Mosaic"): 254.0,
    ("9.0", "transposed", "Triton"): 578.0,
    ("9.0", "outer", "Triton"): 564.0,
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
        564.0
    """
    return None if kernel is None else TFLOPS.get((compute_capability, kind, kernel))
