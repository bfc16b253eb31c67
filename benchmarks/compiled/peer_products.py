"""Kernels for TPUs of JAX, Megablox, and of tokamax as backends of grouped products, for comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import tokamax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array

from jax_moe_lb.core.manual_axes import unvarying_call, vary_alike
from jax_moe_lb.kernels import backends
from jax_moe_lb.kernels.backends import DIMENSIONS, Backend, Product, _then_add, prefer_backend
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


def _outer(product: Product, rows: Array, others: Array, groups: RowGroups) -> Array:
    def multiply(rows: Array, others: Array, sizes: Array) -> Array:
        with _manual_types(rows):
            return tgmm(rows.T, others, sizes, product.dtype, _tile(product, 1024))

    return unvarying_call(multiply, *vary_alike((rows, others, groups.sizes)))


def _by_tokamax(product: Product, left: Array, right: Array, groups: RowGroups) -> Array:
    def multiply(left: Array, right: Array, sizes: Array) -> Array:
        return tokamax.ragged_dot_general(
            left,
            right,
            group_sizes=sizes,
            ragged_dot_dimension_numbers=DIMENSIONS[product.kind],
            preferred_element_type=product.dtype,
            manual_axis_type=jax.typeof(left).manual_axis_type,
            implementation="mosaic_tpu",
        )

    return unvarying_call(multiply, *vary_alike((left, right, groups.sizes)))


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


PEERS = (
    Backend("Megablox", "tpu", why="it is compared", why_not=_why_not, matmul=_matmul, outer=_then_add(_outer)),
    Backend("tokamax", "tpu", why="it is compared", why_not=_why_not, matmul=_by_tokamax, outer=_then_add(_by_tokamax)),
)


@contextmanager
def products_by(name: str) -> Iterator[None]:
    """Prefer a backend as `prefer_backend` does; it may be one of `PEERS`."""
    with mock.patch.object(backends, "BACKENDS", (*PEERS, *backends.BACKENDS)), prefer_backend(name):
        yield
