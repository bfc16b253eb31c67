"""Checks of rates of grouped products: the chosen kernels beside others, at the shapes of published models.

A check measures the products of one rank of one model, in bfloat16, even and skewed. All its programs are compiled
first, in threads, and then timed. The result of each for the first group is compared with a dense product.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.clocks import Clocks
from benchmarks.gpu.device import gpu_kind
from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.kit import Program, Programs, compile_all, compiled_one, in_words
from benchmarks.gpu.once import guarded
from benchmarks.gpu.products import MOST_ERROR, TABLE, difference, work_of
from benchmarks.render.results import Table, Value
from jax_moe_lb.aot.targets import GPUS
from jax_moe_lb.kernels.backends import BACKENDS, DIMENSIONS, KINDS, Backend, Kind, Product, choose_backend
from jax_moe_lb.kernels.operands import RowGroups

BF16 = jnp.dtype(jnp.bfloat16)

WITHIN = 1.1
"""Largest time of the chosen backend, relative to the fastest kernel."""

RUN_S, REPEATS, MOST_CALLS, LEAST_CALLS = 6e-3, 5, 64, 4
"""Seconds of one timing, timings, and most and least calls in one."""

WRONG = "wrong: "
"""Start of the note of a wrong result."""


class Model(NamedTuple):
    """Experts of one rank of a model, in a group of 8 ranks."""

    groups: int
    hidden: int
    inner: int
    down: int
    rows: int
    slots: int = 2


MODELS = {
    "Qwen3-30B-A3B": Model(16 + 2, 2048, 1536, 768, 65536),
    "DeepSeek-V3": Model(32 + 2, 7168, 2048, 2048, 32768),
    "Mixtral-8x7B": Model(1 + 2, 4096, 14336, 14336, 8192),
    "GPT-OSS-120B": Model(16 + 2, 2880, 2880, 2880, 32768),
}
"""Ranks of models by name; Qwen3-30B multiplies gate and up at once."""

TINY = Model(4, 128, 256, 128, 512)


class Load(NamedTuple):
    """Rows of all groups together, and their distribution."""

    rows: int
    skew: str


def loads(model: Model) -> tuple[Load, ...]:
    """Return the loads of a rank: the mean load, even and skewed, and half of it."""
    return Load(model.rows, "even"), Load(model.rows, "hot"), Load(model.rows // 2, "hot")


def group_sizes(load: Load, groups: int, slots: int) -> np.ndarray:
    """Return the rows of each group.

    An even load has equal rows for all home experts, and no replicas. A hot one has half of all rows in one group, and
    none in a quarter of the groups.
    """
    sizes = np.zeros(groups, np.int64)
    sizes[: groups - slots] = load.rows // (groups - slots)
    if load.skew == "hot":
        empty = max(1, groups // 4)
        sizes = np.zeros(groups, np.int64)
        sizes[1 : groups - empty] = (load.rows // 2) // max(1, groups - empty - 1)
    sizes[0] += load.rows - sizes.sum()
    return sizes.astype(np.int32)


@dataclass(frozen=True)
class Kernel:
    """Kernel with tiles to measure."""

    backend: Backend
    tiles: str
    kinds: tuple[Kind, ...]

    def __str__(self) -> str:
        return f"{self.backend.name}, {self.tiles}"


PRODUCTS: tuple[Kind, ...] = ("product", "transposed")


def _tokamax(product: Product, left: Any, right: Any, groups: RowGroups) -> Any:
    import tokamax
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu

    op = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot
    tiles = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 4, "split_k": 1}
    config = op.config_cls(**tiles, persistent=True, grid_minor_dim=1, grid_tile_width=4)
    return tokamax.ragged_dot_general(
        left,
        right,
        group_sizes=groups.sizes,
        ragged_dot_dimension_numbers=DIMENSIONS[product.kind],
        preferred_element_type=product.dtype,
        implementation=[op(config=config)],
    )


BEST_OF_TOKAMAX = "128 x 128 x 64, 4 stages, persistent, 4 columns"

TOKAMAX = Backend("tokamax.ragged_dot", "cuda", "", lambda _: None, _tokamax, None)
OTHERS = (Kernel(TOKAMAX, BEST_OF_TOKAMAX, PRODUCTS),)
"""Kernel measured beside those of the table: tokamax's with its best tiles."""


@dataclass(frozen=True)
class Case:
    """One product of a layer."""

    name: str
    product: Product

    def __str__(self) -> str:
        one = self.product
        return f"{self.name} {one.kind} of {one.num_rows} rows, {one.widths}, {one.num_groups} groups"


def cases(model: Model) -> list[Case]:
    """Return the products of a layer, forward and backward."""
    widths = {
        ("product", "up"): (model.hidden, model.inner),
        ("transposed", "up"): (model.inner, model.hidden),
        ("outer", "up"): (model.hidden, model.inner),
        ("product", "down"): (model.down, model.hidden),
        ("transposed", "down"): (model.hidden, model.down),
        ("outer", "down"): (model.down, model.hidden),
    }
    return [
        Case(name, Product(kind, model.rows, widths[kind, name], model.groups, (BF16, BF16), BF16))
        for kind in KINDS
        for name in ("up", "down")
    ]


DENSE, COMPARE, OPERANDS = "dense", "compare", "operands"


def programs(case: Case, kernels: Sequence[Kernel]) -> Programs:
    """Return all programs of one product: of its kernels, the dense product, and the comparison of two results."""
    product = case.product
    found: Programs = {
        (case, kernel): Program(partial(_multiply, kernel.backend, product), product.operands()) for kernel in kernels
    }
    dense = partial(_dense, product.kind)
    left, right = product.operands()[:2]
    matrix = jax.ShapeDtypeStruct(right.shape[-2:], right.dtype)
    found[case, DENSE] = Program(dense, (left, matrix))
    (result,) = jax.tree.leaves(jax.eval_shape(partial(_multiply, kernels[0].backend, product), *product.operands()))
    count = jax.ShapeDtypeStruct((), jnp.int32)
    found[case, COMPARE] = Program(partial(_error, product.kind), (result, left, matrix, count))
    found[case, OPERANDS] = Program(partial(_operands, product), (jax.eval_shape(jax.random.key, 0),))
    return found


def _operands(product: Product, key: jax.Array) -> tuple[jax.Array, ...]:
    keys = jax.random.split(key)
    return tuple(
        jax.random.normal(one, array.shape, array.dtype)
        for one, array in zip(keys, product.operands()[:2], strict=True)
    )


def _multiply(backend: Backend, product: Product, left: Any, right: Any, groups: RowGroups) -> Any:
    return backend(product, left, right, groups, None)


def _dense(kind: Kind, left: jax.Array, right: jax.Array) -> jax.Array:
    sides = {"product": (1, 0), "transposed": (1, 1), "outer": (0, 0)}[kind]
    return jax.lax.dot_general(left, right, (((sides[0],), (sides[1],)), ((), ())), preferred_element_type=left.dtype)


def _error(kind: Kind, found: jax.Array, left: jax.Array, right: jax.Array, count: jax.Array) -> jax.Array:
    """Return the largest difference from a dense product in the first group, relative to the largest entry."""
    expected = _dense(kind, jnp.where((jnp.arange(left.shape[0]) < count)[:, None], left, 0), right)
    return difference(kind, found[0] if kind == "outer" else found, expected, count)[0]


class Clock:
    """Measures calls of programs behind a long one, so that the device never waits for its host."""

    def __init__(self, width: int):
        self._matrix = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
        self._product = jax.jit(jnp.matmul)
        self._seconds(lambda: None, 0)

    def _seconds(self, call: Callable[[], Any], calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(2):
            out = self._product(self._matrix, self._matrix)
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call: the median of the differences between many calls and none."""
        jax.block_until_ready(call())
        guess = max(self._seconds(call, LEAST_CALLS) - self._seconds(call, 0), 1e-5) / LEAST_CALLS
        calls = max(LEAST_CALLS, min(MOST_CALLS, round(RUN_S / guess)))
        found = [self._seconds(call, calls) - self._seconds(call, 0) for _ in range(REPEATS)]
        if min(found) <= 0:
            raise ValueError(f"{calls} calls take {min(found) * 1e6:.0f} us more than none")
        return statistics.median(found) / calls


def floor_s(product: Product, sizes: np.ndarray) -> float:
    """Return the least seconds of a product on this GPU: of its operations, or of reading and writing all arrays."""
    (inner, outer), gpu = product.widths, GPUS[gpu_kind() or "h100"]
    groups = product.all_groups if product.kind == "outer" else np.count_nonzero(sizes)
    moved = BF16.itemsize * (sizes.sum() * (inner + outer) + groups * inner * outer)
    return float(max(moved / gpu.bytes_per_s, 2 * sizes.sum() * inner * outer / gpu.flops_per_s))


COLUMNS = dict.fromkeys(("model", "product", "kind", "buffer rows", "rows", "skew", "backend", "tiles"), "")
COLUMNS |= {"us": ".1f", "TFLOP/s": ".0f", "share of dense": ".2f", "floor us": ".1f", "SM MHz": ".0f", "": ""}


def model_programs(model: Model) -> Programs:
    wanted: Programs = {}
    for case in cases(model):
        kind = case.product.kind
        chosen = choose_backend(case.product, "cuda").backend
        rows = [one for one in BACKENDS if one.platform == "cuda" and one.why_not_for(case.product) is None]
        of_table = [Kernel(one, TABLE, (kind,)) for one in dict.fromkeys([chosen, *rows])]
        wanted |= programs(case, [*of_table, *(one for one in OTHERS if kind in one.kinds)])
    return wanted


def fastest(name: str, scale: Scale) -> Finding:
    """Check that the chosen kernels are as fast as the fastest measured, for all products of a model."""
    model = scale.of(MODELS[name], TINY)
    every = cases(model)
    compiled = compile_all(model_programs(model))
    clock = Clock(scale.of(8192, 64))
    rows: list[list[Value]] = []
    with Clocks() as clocks:
        for case in every:
            try:
                rows += _measure(case, compiled, clock, model, name, clocks)
            except Exception as error:  # such as no memory for operands; other products are measured
                start = [name, case.name, case.product.kind, case.product.num_rows]
                rows.append([*start, *[None] * (len(COLUMNS) - len(start) - 1), in_words(error)])
            scale.keep(Table(COLUMNS, rows))
    return _finding(rows, every)


def _measure(
    case: Case, compiled: dict[tuple[Any, ...], Any], clock: Clock, model: Model, name: str, clocks: Clocks
) -> Iterator[list[Value]]:
    """Time all kernels of one product under all loads, and yield the rows of the table."""
    product = case.product
    left, right = compiled_one(compiled, (case, OPERANDS))(jax.random.key(1))
    matrix = right[0] if product.kind != "outer" else right
    for load in loads(model):
        sizes = group_sizes(load, product.all_groups, model.slots)
        on_device, count = jnp.asarray(sizes), jnp.int32(sizes[0])
        operands = left, right, RowGroups(on_device)
        flops = 2 * load.rows * product.widths[0] * product.widths[1]
        start = [name, case.name, product.kind, product.num_rows, load.rows, load.skew]
        floor, dense_s = floor_s(product, sizes) * 1e6, None
        wanted = [key for key in compiled if key[0] == case and key[1] not in (COMPARE, OPERANDS)]
        for key in sorted(wanted, key=lambda one: one[1] != DENSE):
            kernel = key[1]
            if kernel == DENSE and load.rows < product.num_rows:
                continue
            label = [DENSE, "cuBLAS"] if kernel == DENSE else [kernel.backend.name, kernel.tiles]
            seconds, note = None, ""
            clocks.start()
            try:
                program = compiled_one(compiled, key)
                call = partial(program, left, matrix) if kernel == DENSE else partial(program, *operands)
                with guarded(work_of(product.kind, *label)):
                    result = call()
                    if kernel != DENSE:
                        error = float(compiled_one(compiled, (case, COMPARE))(result, left, matrix, count))
                        note = "" if error < MOST_ERROR else f"{WRONG}differs by {error:.2g}"
                    del result
                    seconds = clock.seconds(call)
            except Exception as error:  # a row with the reason; other kernels are measured
                note = in_words(error)
            dense_s = seconds if kernel == DENSE else dense_s
            rate = flops / seconds / 1e12 if seconds else None
            share = dense_s / seconds if seconds and dense_s else None
            yield [*start, *label, seconds and seconds * 1e6, rate, share, floor, clocks.mhz(), note]


def _finding(rows: list[list[Value]], every: Sequence[Case]) -> Finding:
    slow, reached = [], 0
    chosen = {(one.name, one.product.kind): choose_backend(one.product, "cuda").backend.name for one in every}
    table, groups = Table(COLUMNS, rows), defaultdict(list)
    for row in table.dicts():
        if row["us"] is not None and not row[""] and row["backend"] != DENSE:
            groups[row["product"], row["kind"], row["rows"], row["skew"]].append(row)
    for (product, kind, number, skew), found in groups.items():
        best = min(found, key=lambda row: row["us"])
        for row in (row for row in found if (row["backend"], row["tiles"]) == (chosen[product, kind], TABLE)):
            reached += 1
            if (times := row["us"] / best["us"]) > WITHIN:
                other = f"{best['backend']} {best['tiles']}"
                slow.append(f"{kind} {product}, {number} rows, {skew}: {times:.2f} x {other}")
    found_text = f"{len(slow)} of {reached} slower; {'; '.join(slow)}" if slow else f"{reached} products, see the table"
    return Finding(not slow if reached else None, found_text[:1500], table)
