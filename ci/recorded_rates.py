"""Compare the rates of kernels in `core/devices/b200.toml` with the autotuning database of the installed tokamax.

`ci/accelerators.sh` runs it, beside tokamax.
"""

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from jax_moe_lb.core.device_rates import GpuRates, device_rates
from jax_moe_lb.kernels.backends import DIMENSIONS

FILES = {
    "Mosaic": "nvidia_b200/pallas_mosaic_gpu_ragged_dot.json",
    "Triton": "nvidia_b200/pallas_triton_ragged_dot.json",
}
LEAST_ROWS = 8192
KINDS = {json.dumps(one.dot_dimension_numbers[0]): kind for kind, one in DIMENSIONS.items()}


def shape_of(text: Any) -> list[int] | None:
    """Parse a shape such as `bf16[8192,4096]`; return `None` for other dtypes and quantized arrays."""
    return [int(n) for n in text[5:-1].split(",")] if isinstance(text, str) and text.startswith("bf16[") else None


def best_rates(file: Path) -> dict[tuple[str, str], float]:
    """Return the highest recorded TFLOP/s of each kind and operands."""
    best: dict[tuple[str, str], float] = {}
    for key, configurations in json.loads(file.read_text()).items():
        args = json.loads(key)
        left, right = shape_of(args["lhs"]), shape_of(args["rhs"])
        if left is None or right is None or left[0] < LEAST_ROWS:
            continue
        kind = KINDS[json.dumps(args["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0])]
        flops = 2 * math.prod(left) * right[2 if kind == "product" else 1]
        # Older entries have the number of rows in place of the number of groups.
        groups = args["group_sizes"].get("num_groups") if isinstance(args["group_sizes"], dict) else "listed"
        operands = kind, f"{left} {right} {groups}"
        for recorded in configurations.values():
            if times_ms := recorded.get("evaluation_times_ms"):
                best[operands] = max(best.get(operands, 0.0), flops / statistics.median(times_ms) / 1e9)
    return best


def main() -> int:
    """Print each recorded rate beside the database's; fail if one differs."""
    found = importlib.util.find_spec("tokamax")
    folder = Path(found.origin if found and found.origin else "").parent / "data" / "autotuning"
    every = {name: best_rates(folder / file) for name, file in FILES.items()}
    bad, rates = 0, device_rates("b200", "cuda")
    assert isinstance(rates, GpuRates)
    for kernel, kind, rate in (
        (one, kind, rate) for one, kinds in rates.kernels.items() for kind, rate in kinds.items()
    ):
        mine, other = (every[name] for name in (kernel, "Triton" if kernel == "Mosaic" else "Mosaic"))
        of_kind = [operands for operands in mine if operands[0] == kind]
        shared = [operands for operands in of_kind if operands in other] or of_kind
        median = statistics.median(mine[operands] for operands in shared)
        bad += not math.isclose(median, rate / 1e12, abs_tol=0.1)
        print(f"{kind:10} {kernel} {rate / 1e12:7.1f}, in the database {median:7.1f} of {len(shared)} shapes")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
