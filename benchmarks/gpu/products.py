"""Checks of grouped products: values of every backend, and its rate beside the recorded one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.device import kernel_seconds
from benchmarks.gpu.findings import Check, Finding, Scale
from benchmarks.results import Table
from jax_moe_lb.kernels.backends import BACKENDS, KINDS, Backend, Kind, Product, choose_backend
from jax_moe_lb.kernels.blocks import matmul_by_blocks, outer_by_blocks
from jax_moe_lb.kernels.recorded_rates import recorded_tflops

NUM_HOME, NUM_GROUPS = 16, 18
"""Home experts, and all experts of a rank, whose weights are in two arrays."""

WITHIN = 0.8
"""Least share of a recorded rate."""


def named(name: str) -> Backend:
    """Return the backend of a name."""
    return next(backend for backend in BACKENDS if backend.name == name)


def product_of(kind: Kind, backend: Backend, num_rows: int, widths: tuple[int, int]) -> Product:
    """Return a product of bfloat16, with matrices in the form of the backend."""
    groups = (NUM_HOME, NUM_GROUPS - NUM_HOME) if backend.takes_parts else NUM_GROUPS
    bfloat16 = jnp.dtype(jnp.bfloat16)
    result = jnp.dtype(jnp.float32) if kind == "outer" else bfloat16
    return Product(kind, num_rows, widths, groups, (bfloat16, bfloat16), result)


def operands_of(product: Product, seed: int, *, full: bool = False) -> tuple[Any, Any, jax.Array]:
    """Return both operands and the sizes of the groups; rows of no group are NaN."""
    rng = np.random.default_rng(seed)
    rows = product.num_rows
    shares = np.full(NUM_GROUPS, 1 / NUM_GROUPS) if full else 0.9 * rng.dirichlet(np.full(NUM_GROUPS, 0.3))
    sizes = np.floor(shares * rows).astype(np.int32)
    sizes[0] += rows - sizes.sum() if full else 0
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


def values_equal(name: str, repeats: int = 50) -> Check:
    """Return the check of a backend against blocks of rows, and of equal bits in repeated calls, to detect races."""

    def check(scale: Scale) -> Finding:
        backend, rows = named(name), scale.of(34432, 256)
        for widths in scale.of(((2048, 1536), (768, 2048)), ((128, 256),)):
            for kind in KINDS:
                product = product_of(kind, backend, rows, widths)
                if kind != "outer" and backend.matmul is None:
                    continue
                if reason := backend.why_not(product):
                    return Finding(None, reason)
                for seed in range(scale.of(3, 1)):
                    _compare(backend, product, seed, scale.of(repeats, 1))
        return Finding(True, f"{rows} rows, all kinds of product")

    return check


def _compare(backend: Backend, product: Product, seed: int, repeats: int) -> None:
    left, right, sizes = operands_of(product, seed)
    used = None if product.kind == "outer" else int(sizes.sum())

    @jax.jit
    def run(left: Any, right: Any, sizes: jax.Array) -> jax.Array:
        found = backend(product, left, right, sizes, None)
        return jnp.concatenate(found) if isinstance(found, tuple) else found

    first, want = run(left, right, sizes)[:used], reference(product)(left, right, sizes)[:used]
    np.testing.assert_allclose(np.float32(first), np.float32(want), rtol=2e-2, atol=2e-2, err_msg=str(product))
    for _ in range(repeats):
        assert bool((run(left, right, sizes)[:used] == first).all()), f"calls differ in their bits: {product}"


def rates(scale: Scale) -> Finding:
    """Measure every backend on every kind of product, and compare the recorded kernels with their records."""
    shape, tiny = (36864, (2048, 1536)), (256, (128, 256))
    rows, slow = [], []
    for backend in (one for one in BACKENDS if one.platform in ("cuda", None)):
        for kind in KINDS:
            if kind != "outer" and backend.matmul is None:
                continue
            product = product_of(kind, backend, *scale.of(shape, tiny))
            if reason := backend.why_not(product):
                rows.append([backend.name, kind, None, None, None, reason])
                continue
            seconds = _kernel_s(backend, product)
            flops = 2 * product.num_rows * product.widths[0] * product.widths[1]
            reached = flops / seconds / 1e12 if seconds else None
            capability = getattr(jax.devices()[0], "compute_capability", "")
            recorded = recorded_tflops(capability, kind, backend.recorded)
            chosen = "chosen" if choose_backend(product, "cuda").backend is backend else ""
            rows.append([backend.name, kind, seconds and seconds * 1e6, reached, recorded, chosen])
            if reached and recorded and reached < WITHIN * recorded:
                slow.append(f"{backend.name}, {kind}: {reached:.0f} TFLOP/s; recorded {recorded:.0f}")
    columns = {"kernel": "", "product": "", "us": ".0f", "TFLOP/s": ".0f", "recorded TFLOP/s": ".0f", "": ""}
    reached_any = any(row[3] and row[4] for row in rows)
    table = Table(columns, rows)
    return Finding(not slow if reached_any else None, "; ".join(slow) or "see the table", table)


def _kernel_s(backend: Backend, product: Product, calls: int = 10) -> float | None:
    left, right, sizes = operands_of(product, 0, full=True)
    run = jax.jit(lambda left, right, sizes: backend(product, left, right, sizes, None))
    durations = kernel_seconds(lambda: run(left, right, sizes), calls)
    # All kernels of a call: some products have copies of operands beside them.
    return sum(map(sum, durations.values())) / calls if durations else None
