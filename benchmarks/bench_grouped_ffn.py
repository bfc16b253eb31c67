"""Grouped products and the grouped FFN on a CPU against dense ones with the same number of operations.

Run it with `python -m benchmarks.bench_grouped_ffn`.

The lower bound is the dense form: one matrix, or one SwiGLU expert, for all rows. Each ratio of wall times is reported
with the ratio of CPU times of all threads. Other load on the machine changes the latter less, but it does not include
waiting between threads. A product "in place" adds to sums that exist, as training does in all rounds but the first.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.results import Table, Value, out_alone, report, spread
from jax_moe_lb import Experts
from jax_moe_lb.core.experts import dense_ffn
from jax_moe_lb.kernels.grouped_ffn import grouped_ffn
from jax_moe_lb.kernels.grouped_matmul import grouped_matmul, grouped_outer

REPEATS = 15
CASES = (  # groups, rows per group, width, inner width
    (8, 512, 256, 512),
    (32, 128, 256, 512),
    (64, 64, 256, 512),
    (256, 64, 256, 512),
    (16, 100, 256, 512),
    (8, 256, 512, 1024),
    (16, 64, 512, 1024),
    (256, 16, 256, 512),
)
UNEVEN = (  # distribution, groups, mean rows per group, width, inner width
    ("Zipf", 32, 64, 256, 512),
    ("Zipf", 32, 512, 256, 512),
    ("random", 32, 100, 256, 512),
)


def sizes_of(kind: str, num_groups: int, mean: int) -> np.ndarray:
    """Return rows per group: equal, proportional to `1 / rank` in random order, or between 40 % and 160 % of the
    mean.
    """
    rng = np.random.default_rng(0)
    if kind == "equal":
        return np.full(num_groups, mean)
    if kind == "random":
        return rng.integers(mean * 4 // 10, mean * 16 // 10, num_groups)
    share = 1 / np.arange(1, num_groups + 1)
    return rng.permutation(np.floor(share / share.sum() * mean * num_groups).astype(int))


def interleaved_s(functions: dict[str, Callable[[], object]]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return wall and CPU seconds of interleaved calls, after two warm-up calls each."""
    wall_s: dict[str, list[float]] = {name: [] for name in functions}
    processor_s: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(REPEATS + 2):
        for name, function in functions.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(function())
            if i >= 2:
                wall_s[name].append(time.perf_counter() - start[0])
                processor_s[name].append(time.process_time() - start[1])
    wall, processor = ({name: np.array(s) for name, s in times.items()} for times in (wall_s, processor_s))
    return wall, processor


def ratios(functions: dict[str, Callable[[], object]], pairs: dict[str, str], inverse: bool = False) -> list[Value]:
    """Return table cells: the ratio of each pair in wall time and in CPU time."""
    wall_s, processor_s = interleaved_s(functions)
    cells: list[Value] = []
    for grouped, dense in pairs.items():
        top, bottom = (dense, grouped) if inverse else (grouped, dense)
        # Other load affects both, so the lower quartile is more accurate than the median.
        processor = np.quantile(processor_s[top], 0.25) / np.quantile(processor_s[bottom], 0.25)
        cells += [spread(wall_s[top] / wall_s[bottom]), float(processor)]
    return cells


def measure_products(kind: str, num_groups: int, mean: int, width: int, inner: int, dtype: str) -> list[Value]:
    """Return one row of the first table."""
    rng = np.random.default_rng(0)
    sizes = sizes_of(kind, num_groups, mean)
    num_rows = int(sizes.sum())
    shapes = ((num_rows, width), (num_rows, inner), (num_groups, width, inner))
    rows, others, weights = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    group_sizes, one = jnp.asarray(sizes, jnp.int32), weights[0]
    wide = jnp.promote_types(dtype, jnp.float32)
    product, back = jax.jit(grouped_matmul), jax.jit(lambda y, w, s: grouped_matmul(y, w, s, transposed=True))
    outer = jax.jit(grouped_outer)
    add = jax.jit(lambda x, y, s, sums: grouped_outer(x, y, s, sums=sums), donate_argnums=3)
    sums = [jnp.zeros((num_groups, width, inner), wide)]

    def in_place() -> jax.Array:
        sums.append(add(rows, others, group_sizes, sums.pop()))
        return sums[0]

    dense, dense_back = jax.jit(jnp.matmul), jax.jit(lambda y, w: y @ w.T)
    dense_outer = jax.jit(lambda x, y: jnp.matmul(x.T, y, preferred_element_type=wide))
    batched = jax.jit(lambda x, y: jnp.einsum("gmk,gmn->gkn", x, y, preferred_element_type=wide))
    functions: dict[str, Callable[[], object]] = {
        "product": lambda: product(rows, weights, group_sizes),
        "dense product": lambda: dense(rows, one),
        "back": lambda: back(others, weights, group_sizes),
        "dense back": lambda: dense_back(others, one),
        "outer": lambda: outer(rows, others, group_sizes),
        "in place": in_place,
        "dense outer": lambda: dense_outer(rows, others),
    }
    pairs = {"product": "dense product", "back": "dense back", "outer": "dense outer", "in place": "dense outer"}
    if kind == "equal":
        split = rows.reshape(num_groups, mean, width), others.reshape(num_groups, mean, inner)
        functions["batched"] = lambda: batched(*split)
        pairs["batched"] = "dense outer"
    cells = ratios(functions, pairs, inverse=True)
    missing = [] if kind == "equal" else [None, None]
    return [dtype, num_groups, f"{mean} {kind}", f"{width} x {inner}", *cells, *missing]


def measure_ffn(num_groups: int, rows_per_group: int, width: int, inner: int) -> list[Value]:
    """Return one row of the second table: forward and both gradients."""
    rng = np.random.default_rng(0)
    num_rows = num_groups * rows_per_group
    rows = jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float32)
    up, gate = (jnp.asarray(0.05 * rng.normal(size=(num_groups, width, inner)), jnp.float32) for _ in range(2))
    experts = Experts(up, jnp.asarray(0.05 * rng.normal(size=(num_groups, inner, width)), jnp.float32), gate)
    one = jax.tree.map(lambda w: w[0], experts)
    sizes = jnp.full((num_groups,), rows_per_group, jnp.int32)
    grouped, dense = jax.jit(grouped_ffn), jax.jit(dense_ffn)
    grouped_gradients = jax.jit(jax.grad(lambda r, e: grouped_ffn(r, e, sizes).sum(), argnums=(0, 1)))
    dense_gradients = jax.jit(jax.grad(lambda r, e: dense_ffn(r, e).sum(), argnums=(0, 1)))
    cells = ratios(
        {
            "grouped": lambda: grouped(rows, experts, sizes),
            "dense": lambda: dense(rows, one),
            "grouped gradients": lambda: grouped_gradients(rows, experts),
            "dense gradients": lambda: dense_gradients(rows, one),
        },
        {"grouped": "dense", "grouped gradients": "dense gradients"},
    )
    return [num_groups, rows_per_group, f"{width} x {inner}", *cells]


def columns_of(first: tuple[str, ...], ratios: tuple[str, ...]) -> dict[str, str]:
    """Return the columns; each ratio has one column for wall times and one for CPU times."""
    return dict.fromkeys(first, "") | {f"{name}{of}": ".2f" for name in ratios for of in ("", ", processor")}


def main() -> None:
    """Report the tables."""
    out = out_alone(__doc__)
    sized = [("equal", *case) for case in CASES] + list(UNEVEN)
    products = Table(
        columns_of(
            ("dtype", "groups", "rows each", "width"), ("rows @ w", "rows @ w.T", "outer", "outer, in place", "einsum")
        ),
        [measure_products(*one, dtype) for dtype in ("float32", "bfloat16") for one in sized],
        "FLOP/s over those of the dense product",
    )
    ffn = Table(
        columns_of(("groups", "rows each", "expert"), ("forward", "gradients")),
        [measure_ffn(*case) for case in CASES],
        "Time over that of the dense FFN",
    )
    report({"products": products, "ffn": ffn}, out)


if __name__ == "__main__":
    main()
