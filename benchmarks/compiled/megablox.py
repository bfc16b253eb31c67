"""JAX's Megablox kernels for TPUs as a backend of grouped products, for comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array

from jax_moe_lb.core.manual_axes import unvarying_call, vary_alike
from jax_moe_lb.kernels import backends
from jax_moe_lb.kernels.backends import Backend, Product, prefer_backend
from jax_moe_lb.kernels.operands import RowGroups

ROWS = 128
"""Rows of a tile, which must divide those of the product."""


def _tile(product: Product, columns: int) -> tuple[int, int, int]:
    return ROWS, min(columns, product.widths[0]), min(1024, product.widths[1])


def _matmul(product: Product, rows: Array, weights: Array, groups: RowGroups) -> Array:
    tile = _tile(product, 2048)

    def multiply(rows: Array, weights: Array, sizes: Array) -> Array:
        with _manual_types(rows):
            return gmm(rows, weights, sizes, product.dtype, tile, transpose_rhs=product.is_transposed)

    return unvarying_call(multiply, *vary_alike((rows, weights, groups.sizes)))


def _outer(product: Product, rows: Array, others: Array, groups: RowGroups, sums: Array | None) -> Array:
    def multiply(rows: Array, others: Array, sizes: Array) -> Array:
        with _manual_types(rows):
            return tgmm(rows.T, others, sizes, product.dtype, _tile(product, 1024))

    result = unvarying_call(multiply, *vary_alike((rows, others, groups.sizes)))
    return result if sums is None else sums + result


@contextmanager
def _manual_types(rows: Array) -> Iterator[None]:
    # Inside `shard_map` results need a type that Megablox does not give them.
    typed = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(rows).manual_axis_type)
    with mock.patch.object(jax, "ShapeDtypeStruct", typed):
        yield


def _why_not(product: Product) -> str | None:
    if product.num_rows % ROWS or any(dtype != jnp.bfloat16 for dtype in product.dtypes):
        return "it takes whole tiles of bfloat16 rows"
    return None


MEGABLOX = Backend("Megablox", "tpu", why="it is compared", why_not=_why_not, matmul=_matmul, outer=_outer)


@contextmanager
def products_by(name: str) -> Iterator[None]:
    """Prefer a backend, which may be Megablox, as `prefer_backend` does."""
    with mock.patch.object(backends, "BACKENDS", (MEGABLOX, *backends.BACKENDS)), prefer_backend(name):
        yield
