"""Checks of grouped products: values of every backend."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.findings import Finding, Scale
from benchmarks.gpu.kit import Program, Programs, compile_all, compiled_one, in_words
from benchmarks.gpu.once import guarded
from jax_moe_lb.kernels.backends import BACKENDS, KINDS, Backend, Kind, Product
from jax_moe_lb.kernels.blocks import matmul_by_blocks, outer_by_blocks
from jax_moe_lb.kernels.operands import RowGroups

NUM_HOME, NUM_GROUPS = 16, 18
"""Home experts, and all experts of a rank, whose weights are in two arrays."""

MOST_ERROR = 0.02
"""Largest difference from the product by blocks of rows, relative to its largest entry."""


TABLE = "of the table"
"""Tiles of a backend as in the table of backends."""


def work_of(kind: Kind, name: str, tiles: str = TABLE) -> str:
    """Return the name of a kernel in `once`, equal in all checks."""
    return f"{kind}, {name}, {tiles}"


def named(name: str) -> Backend:
    return next(backend for backend in BACKENDS if backend.name == name)


def product_of(kind: Kind, backend: Backend, num_rows: int, widths: tuple[int, int]) -> Product:
    """Return a product of bfloat16, with matrices in the form of the backend."""
    groups = (NUM_HOME, NUM_GROUPS - NUM_HOME) if backend.takes_parts else NUM_GROUPS
    bfloat16 = jnp.dtype(jnp.bfloat16)
    result = jnp.dtype(jnp.float32) if kind == "outer" else bfloat16
    return Product(kind, num_rows, widths, groups, (bfloat16, bfloat16), result)


def operands_of(product: Product, seed: int) -> tuple[Any, Any, jax.Array]:
    """Return both operands and the sizes of the groups; rows of no group are NaN."""
    rng = np.random.default_rng(seed)
    rows = product.num_rows
    sizes = np.floor(0.9 * rng.dirichlet(np.full(NUM_GROUPS, 0.3)) * rows).astype(np.int32)
    sizes[[2, NUM_GROUPS - 1]] = 0
    left, right = (
        jax.random.normal(jax.random.key(seed + i), one.shape, jnp.bfloat16) / 8
        for i, one in enumerate(product.operands()[:2])
    )
    left = left.at[sizes.sum() :].set(jnp.nan)
    if product.kind == "outer":
        right = right.at[sizes.sum() :].set(jnp.nan)
    elif isinstance(product.num_groups, tuple):
        right = (right[:NUM_HOME], right[NUM_HOME:])
    return left, right, jnp.asarray(sizes)


def reference(product: Product) -> Callable[..., jax.Array]:
    """Return the product by blocks of rows."""
    if product.kind == "outer":
        return jax.jit(outer_by_blocks)

    def multiply(left: jax.Array, right: Any, sizes: jax.Array) -> jax.Array:
        matrices = jnp.concatenate(right) if isinstance(right, tuple) else right
        return matmul_by_blocks(left, matrices, sizes, transposed=product.is_transposed)

    return jax.jit(multiply)


SHAPES = ((2048, 1536), (2880, 2880))
"""Widths of products whose values are compared."""

VALUE_ROWS = 8192
RUN, COMPARE, EXPECT = "run", "compare", "expect"


def products_of(backend: Backend, rows: int, shapes: Sequence[tuple[int, int]]) -> list[Product]:
    """Return the compared products of a backend, also those that it does not take."""
    return [product_of(kind, backend, rows, widths) for widths in shapes for kind in KINDS]


def run_key(product: Product, backend: str) -> tuple[str, str, str]:
    """Return the key of the program of a product."""
    return "values", RUN, f"{product.kind} of {product.num_rows} rows, {product.widths}, {backend}"


def value_programs(backend: Backend, products: Sequence[Product]) -> Programs:
    """Return the programs that compare products of a backend with those by blocks of rows."""
    found: Programs = {}
    for product in products:
        if backend.why_not_for(product):
            continue
        label = run_key(product, backend.name)[2]
        operands = jax.eval_shape(partial(operands_of, product, 0))
        result = jax.eval_shape(partial(_run, backend, product), *operands)
        expected = jax.eval_shape(reference(product), *operands)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        found[run_key(product, backend.name)] = Program(partial(_run, backend, product), operands)
        found["values", EXPECT, label] = Program(reference(product), operands)
        for other in (expected, result):
            name = f"{label}, {other.dtype}"
            found["values", COMPARE, name] = Program(partial(difference, product.kind), (result, other, count))
    return found


def values_equal(name: str, scale: Scale) -> Finding:
    """Check a backend against blocks of rows, and for equal bits in repeated calls, to detect races.

    Matrices and sums are in two arrays if the backend takes them; groups are uneven, some empty, and rows of none NaN.
    """
    backend, rows = named(name), scale.of(VALUE_ROWS, 256)
    products = products_of(backend, rows, scale.of(SHAPES, ((128, 256),)))
    compiled = compile_all(value_programs(backend, products))
    reached, false = [], False
    for product in products:
        text = f"{product.kind} of {product.widths[0]} x {product.widths[1]}"
        if reason := backend.why_not_for(product):
            reached.append(f"not {text}: {reason}")
            continue
        try:
            _compare(backend, product, compiled, scale.of(2, 1), scale.of(8, 1))
        except Exception as error:  # other products are compared
            if scale.dry:
                raise
            reached.append(f"not {text}: {in_words(error)}")
            false = True
        else:
            reached.append(text)
    holds = None if all(one.startswith("not ") for one in reached) else True
    return Finding(False if false else holds, f"{rows} rows: {'; '.join(reached)}")


def _run(backend: Backend, product: Product, left: Any, right: Any, sizes: jax.Array) -> jax.Array:
    found = backend(product, left, right, RowGroups(sizes), None)
    return jnp.concatenate(found) if isinstance(found, tuple) else found


def difference(kind: Kind, found: jax.Array, expected: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest difference relative to the largest entry, and the sum of entries, of the first rows."""
    if kind != "outer":
        inside = (jnp.arange(found.shape[0]) < count)[:, None]
        found, expected = jnp.where(inside, found, 0), jnp.where(inside, expected, 0)
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.abs(found - expected).max() / jnp.abs(expected).max(), jnp.abs(found).sum()


def _compare(backend: Backend, product: Product, compiled: Any, seeds: int, repeats: int) -> None:
    label = run_key(product, backend.name)[2]

    def program(what: str, name: str) -> Callable[..., Any]:
        return compiled_one(compiled, ("values", what, name))

    run, expect = program(RUN, label), program(EXPECT, label)
    for seed in range(seeds):
        left, right, sizes = jax.block_until_ready(operands_of(product, seed))
        used = sizes.sum(dtype=jnp.int32)
        with guarded(work_of(product.kind, backend.name)):
            first, expected = run(left, right, sizes), expect(left, right, sizes)
            error, total = program(COMPARE, f"{label}, {expected.dtype}")(first, expected, used)
            assert error < MOST_ERROR, f"{product} differs by {error}"
            same = program(COMPARE, f"{label}, {first.dtype}")
            for _ in range(repeats):
                assert same(run(left, right, sizes), first, used) == (0.0, total), f"calls differ: {product}"
