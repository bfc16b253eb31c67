"""Rates of a GPU from the tables of its run, as the file of the device in `core/devices` holds them.

`python -m benchmarks.gpu.measured_rates` prints those of an H100. A test compares both after each run on a device.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparison import SKEWS
from benchmarks.gpu.overview import EXPERT_ROWS
from benchmarks.gpu.rank_kernels import FLOOR, OTHER, SMALL, WHOLE, WITH_GRAPHS
from benchmarks.gpu.tiles import MODELS
from benchmarks.render.results import load
from jax_moe_lb.aot.targets import GPUS
from jax_moe_lb.kernels.backends import KINDS
from jax_moe_lb.sim.hbm import HIDDEN_ARRAYS

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"

PRODUCTS = {
    ("up", "product"): 2 + 2,
    ("down", "product"): 1,
    ("up", "transposed"): 2,
    ("down", "transposed"): 1,
    ("up", "outer"): 2,
    ("down", "outer"): 1,
}
"""Products of a gated expert, forward and backward, with the rematerialized ones of `up` and `gate`."""

UNITS = 12
"""Products that the simulator counts: three forward, and three times as many backward."""

HIGHEST = f"{SKEWS[0]:.0f}"
"""Skew of the table of parts."""

DEFAULTS = "eps = 0.01, localize"
"""Options of `exact` in the table of planners."""


def tables(path: Path = RESULTS) -> Mapping[str, list[dict[str, Any]]]:
    """Return the rows of each table of the run, by column."""
    return {name: table.dicts() for name, table in load(path).items()}


def measured(run: Mapping[str, list[dict[str, Any]]], gpu: str = "h100") -> dict[str, Any]:
    """Return the rates of a run by their names in the file of the device, without those of tables that it lacks."""
    rates = {
        "dense": lambda: 1e12 * statistics.median(row["dense, cuBLAS"] for row in run["products"]),
        # The file of a device has all kinds, or none.
        "grouped": lambda: {kind: 1e12 * by_kind(run["products"])[kind] for kind in KINDS},
        "experts": lambda: experts(run["products"], memory_share(run["timeline"]), GPUS[gpu].bytes_per_s),
        "memory_share": lambda: memory_share(run["timeline"]),
        "planner_kernel": lambda: planner_kernel(run["planner-time"]),
        "small_operations": lambda: small_operations(run),
    }
    found: dict[str, Any] = {}
    for name, rate in rates.items():
        # A short run lacks tables, rows or cells.
        with suppress(ArithmeticError, LookupError, StopIteration, TypeError, ValueError):
            found[name] = rate()
    return found


def by_kind(products: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median TFLOP/s of the default kernel by kind."""
    kinds = dict.fromkeys(row["kind"] for row in products)
    return {kind: statistics.median(row["default"] for row in products if row["kind"] == kind) for kind in kinds}


def memory_share(operations: list[dict[str, Any]]) -> float:
    """Return the share of the memory bandwidth reached by the operations that it bounds, together."""
    bound = [row for row in operations if row["bound"] == "HBM"]
    return sum(row["estimated us"] for row in bound) / sum(row["us"] for row in bound)


def experts(products: list[dict[str, Any]], share: float, bytes_per_s: float) -> dict[int, float]:
    """Return the rate of experts by the rows of one, forward and backward: products, and activations between them."""
    found = defaultdict(list)
    for name in {row["model"] for row in products}:
        model, rows = MODELS[name], [row for row in products if row["model"] == name]
        seconds = sum(PRODUCTS[row["product"], row["kind"]] / (1e12 * row["default"]) for row in rows)
        seconds += HIDDEN_ARRAYS / (model.hidden * share * bytes_per_s)
        # Earlier tables have equal rows for all groups, and no column for them.
        of_expert = rows[0].get(EXPERT_ROWS) or round(rows[0]["rows"] / model.groups)
        found[of_expert].append(UNITS / seconds)
    return {rows: statistics.harmonic_mean(rates) for rows, rates in sorted(found.items())}


def small_operations(run: Mapping[str, list[dict[str, Any]]]) -> float:
    """Return the seconds of a round of a layer outside of its large parts: the median over layers and systems."""
    found, calls = [], {(row["layer"], row["system"]) for row in run["parts"]}
    for layer, system in calls:
        parts = {row["part"]: row["ms"] for row in run["parts"] if (row["layer"], row["system"]) == (layer, system)}
        large = sum(ms for part, ms in parts.items() if part not in (SMALL, OTHER, WHOLE, WITH_GRAPHS, FLOOR))
        rows = run[f"rank-{layer}"]
        rounds = next(row["rounds"] for row in rows if (row["skew"], row["system"]) == (HIGHEST, system))
        found.append(1e-3 * (parts[WITH_GRAPHS] - large) / rounds)
    return statistics.median(found)


def planner_kernel(times: list[dict[str, Any]]) -> dict[int, float]:
    """Return the seconds of the kernel of `exact` at its defaults, by ranks."""
    return {
        int(row["ranks x experts"].split()[0]): 1e-6 * row["kernel us"] for row in times if row["options"] == DEFAULTS
    }


if __name__ == "__main__":
    print(json.dumps(measured(tables()), indent=1))
