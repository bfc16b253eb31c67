"""Times of the kernels of one rank's step, by what they do: where the time of `comparison` goes."""

import re
from collections import defaultdict
from functools import partial
from math import prod

from benchmarks.gpu import comparison
from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.comparison import EVEN, LAYERS, ONE_ROUND, PROFILED, SKEWS, TINY, Layer, Prepared
from benchmarks.gpu.device import kernel_seconds
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.render.results import Table, Value

PRODUCTS, EXCHANGE = "products", "copies of rows in place of the exchange"
GATHERS, SUMS = "gathers of rows into sending order", "sums of a token's copies"
ACTIVATIONS = "activations and masks"
REPLICAS, WEIGHTS = "replicas and their gradients", "weights joined, transposed, and split"
SMALL, OTHER = "sort, addresses and other small ones", "others"

REMATERIALIZED = 4
"""Further operations per row and `H x F`: the products of `up` and `gate`, unless a system saves the activations."""

SMALL_BYTES = 4_000_000
"""Results below this size hold no rows and no weights."""

HIGHEST = f"{SKEWS[0]:g}"
"""Skew of `by_part`."""

MOST_GROUPS = 256
CALLS = 3

COLUMNS = {"skew": "", "system": "", "part": "", "kernel": "", "result": "", "executions": ".1f", "ms": ".4f"}
WHOLE, WITH_GRAPHS, FLOOR = "whole call", "whole call with CUDA graphs", "products at the peak rate"

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(.*$", re.MULTILINE)
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


def parts_of(text: str, small: int = SMALL_BYTES) -> dict[str, tuple[str, str]]:
    """Return the part and the largest result of every instruction of a compiled program, by its name."""
    return {found[1]: _part(found[3], found[2], found[0], small) for found in _INSTRUCTION.finditer(text)}


def _part(opcode: str, results: str, line: str, small: int) -> tuple[str, str]:
    arrays = [(kind, [int(one) for one in dims.split(",") if one]) for kind, dims in _ARRAY.findall(results)]
    kind, dims = max(arrays, key=_nbytes, default=("", []))
    path = (re.findall(r'op_name="([^"]*)"', line) or [""])[0]
    return _named(opcode, path, dims, _nbytes((kind, dims)) < small), f"{kind}[{','.join(map(str, dims))}]"


def _named(opcode: str, path: str, dims: list[int], is_small: bool) -> str:
    are_weights = len(dims) > 2 and dims[0] <= MOST_GROUPS
    rules = {
        EXCHANGE: "copy_rows" in path,
        PRODUCTS: opcode == "custom-call" and "/experts" in path,
        SMALL: is_small,
        REPLICAS: "/replicate" in path,
        WEIGHTS: are_weights,
        ACTIVATIONS: "/experts" in path,
        GATHERS: "/dispatch" in path,
        SUMS: "/combine" in path,
    }
    return next((name for name, holds in rules.items() if holds), OTHER)


def _nbytes(array: tuple[str, list[int]]) -> int:
    kind, dims = array
    bits = _BITS.search(kind)
    return prod(dims) * (int(bits[0]) if bits else 8) // 8


def kernels_of(ready: Prepared, name: str, skew: float | str, scale: Scale) -> list[list[Value]]:
    """Return rows of `COLUMNS` for a system at a skew: all kernels, the slowest first, and whole calls."""
    if reason := ready.programs.reasons.get(name):
        raise RuntimeError(reason)
    compiled, calls = ready.programs.profiled[name], scale.of(CALLS, 1)
    if isinstance(compiled, Exception):
        raise compiled
    inputs = ready.inputs[name, skew][0]
    both = {WHOLE: partial(compiled, inputs), WITH_GRAPHS: partial(ready.programs.compiled[name], inputs)}
    with Clocks() as clocks:
        times = comparison.times_of(both, scale, clocks)
    parts = parts_of(compiled.as_text() or "", scale.of(SMALL_BYTES, 4096))
    rows: list[list[Value]] = []
    start = [skew if isinstance(skew, str) else f"{skew:g}", name]
    for kernel, seconds in kernel_seconds(both[WHOLE], calls).items():
        part, result = parts.get(kernel, (OTHER, ""))
        rows.append([*start, part, kernel, result, len(seconds) / calls, 1e3 * sum(seconds) / calls])
    rows.sort(key=lambda row: -float(row[-1]))  # type: ignore[arg-type]
    busiest = comparison.busiest_of(ready, name, skew)
    ends = {part: one.median for part, one in times.items()} | {FLOOR: floor_ms(ready.layer, name, busiest)}
    return rows + [[*start, part, "", "", None, ms] for part, ms in ends.items()]


def floor_ms(layer: Layer, name: str, rows: int) -> float:
    """Return the milliseconds of the products of a system for a number of rows, at the peak rate."""
    saved = comparison.variants(layer)[name].system.dispatch.saved
    per_weight = comparison.FLOP_PER_WEIGHT + (0 if saved.hidden else REMATERIALIZED)
    return 1e3 * per_weight * rows * layer.hidden * layer.inner / comparison.PEAK_FLOPS


def by_part(rows: list[list[Value]], name: str) -> dict[str, float]:
    """Return the milliseconds of each part of a system at the highest skew, the longest first."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row[:2] == [HIGHEST, name] and row[3]:
            found[str(row[2])] += float(row[-1])  # type: ignore[arg-type]
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def products_take_most(name: str, scale: Scale) -> Finding:
    """Check that products take most of the time of a call of `exact` with one round in a layer."""
    if scale.dry and name != next(iter(LAYERS)):
        return Finding(None, "not in a dry run")
    layer: Layer = scale.of(LAYERS[name], TINY)
    rows: list[list[Value]] = []
    reasons: list[str] = []
    for skew in (SKEWS[0], EVEN):
        for system in PROFILED:
            with comparison.attempt(reasons.append):
                rows += kernels_of(comparison.prepared(layer), system, skew, scale)
            scale.keep(Table(COLUMNS, rows))
    parts = by_part(rows, ONE_ROUND)
    if not parts:
        return Finding(None, "; ".join(reasons) or "the profile has no kernels", Table(COLUMNS, rows))
    whole = next(float(row[-1]) for row in rows if row[:3] == [HIGHEST, ONE_ROUND, WHOLE])  # type: ignore[arg-type]
    texts = [f"{part} {ms:.2f}" for part, ms in parts.items()]
    found = f"{whole:.2f} ms, of them {'; '.join(texts)}; idle {whole - sum(parts.values()):.2f}"
    return Finding(parts.get(PRODUCTS, 0.0) > whole / 2, found, Table(COLUMNS, rows))
