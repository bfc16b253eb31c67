"""Short tables for documents, from those of the parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.gpu.rank_kernels import HIGHEST
from benchmarks.gpu.tiles import BEST_OF_TOKAMAX, MODELS
from benchmarks.render.results import Table, Value

PRODUCTS = {
    "default": ("Triton kernel", "of the table"),
    "Hopper": ("Hopper kernel", "of the table"),
    "tokamax": ("tokamax.ragged_dot", "of the table"),
    "tokamax, 128 x 128 x 64": ("tokamax.ragged_dot", BEST_OF_TOKAMAX),
    "dense, cuBLAS": ("dense", "cuBLAS"),
}
"""Kernels of grouped products by title: backend and tiles, as in `tiles.py`."""

EXPERT_ROWS = "rows of an expert"

MOST_OPERATIONS, MOST_KERNELS = 30, 6
"""Operations of the timeline, and kernels of a system at a skew, the slowest."""


def overview(tables: Mapping[str, Table]) -> dict[str, Table]:
    """Return the tables of documents: those of the parts, and sums of them."""
    grouped = {name: table for name, table in tables.items() if name.startswith("fastest-")}
    kernels = {name: table for name, table in tables.items() if name.startswith("rank-kernels-")}
    found = {name: table for name, table in tables.items() if name not in grouped}
    found |= {name: _slowest(table) for name, table in kernels.items()}
    if "timeline" in found:
        found["timeline"] = Table(found["timeline"].columns, found["timeline"].rows[:MOST_OPERATIONS])
    if grouped:
        of_products = products(grouped)
        # A dry run has no times of the default kernels.
        if of_products.rows:
            found["products"] = of_products
    if kernels:
        found["parts"] = parts(kernels)
    return found


def products(tables: Mapping[str, Table]) -> Table:
    """Return the rates of grouped products at even rows that fill the buffer, by model and kind."""
    rates: dict[tuple[Any, ...], dict[str, Value]] = {}
    for table in tables.values():
        for at in table.dicts():
            # A note is the reason of a wrong result.
            if at["skew"] != "even" or at["rows"] != at["buffer rows"] or at[""]:
                continue
            of_case = rates.setdefault(tuple(at[name] for name in ("model", "product", "kind", "rows")), {})
            title = next((one for one, kernel in PRODUCTS.items() if kernel == (at["backend"], at["tiles"])), None)
            if title is not None:
                of_case[title] = at["TFLOP/s"]
    columns = dict.fromkeys(("model", "product", "kind", "rows", EXPERT_ROWS), "") | dict.fromkeys(PRODUCTS, ".0f")
    rows = []
    for (name, *case, number), found in rates.items():
        if "default" in found:
            # Of each home expert; slots of replicas are empty.
            of_expert = round(number / (MODELS[name].groups - MODELS[name].slots))
            rows.append([name, *case, number, of_expert, *(found.get(title) for title in PRODUCTS)])
    return Table(columns, rows)


def _slowest(table: Table) -> Table:
    """Return the slowest kernels of each system at each skew, and its whole calls, whose kernel is empty."""
    at, rows, numbers = list(table.columns).index("kernel"), list[Sequence[Value]](), Counter[tuple[Value, ...]]()
    for row in table.rows:
        numbers[tuple(row[:2])] += row[at] != ""
        if row[at] == "" or numbers[tuple(row[:2])] <= MOST_KERNELS:
            rows.append(row)
    return replace(table, rows=rows)


def parts(tables: Mapping[str, Table]) -> Table:
    """Return the time of each part of a rank's layer at the highest skew, by layer and system."""
    sums: dict[tuple[str, ...], float] = {}
    for name, table in tables.items():
        for at in table.dicts():
            if at["skew"] == HIGHEST:
                key = name.removeprefix("rank-kernels-"), at["system"], at["part"]
                sums[key] = sums.get(key, 0.0) + at["ms"]
    columns = dict.fromkeys(("layer", "system", "part"), "") | {"ms": ".2f"}
    return Table(columns, [[*key, ms] for key, ms in sums.items()])
