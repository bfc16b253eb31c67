"""Operands and results of grouped products with an epilogue; `mosaic_product` and `tpu_products` have the kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jax_moe_lb.core.types import ReceivedRows


class Factor(NamedTuple):
    """Matrices of all groups in parts, or a slice of their width `F`."""

    parts: tuple[Array, ...]  # `[G, I, O]`, or `[G, O, I]` if transposed: matrices of consecutive groups
    offset: int = 0  # first entry of the slice, along the last dimension; a multiple of 64, 0 by default


class Term(NamedTuple):
    """Rows and the matrices to multiply them with, one factor per accumulator."""

    rows: ReceivedRows  # `[A, I]`; kernels for TPUs alone read other forms
    factors: tuple[Factor, ...]  # factors with `O` columns


class Epilogue(NamedTuple):
    """Elementwise function of the products of all accumulators."""

    # Function of float32 tiles: the products, the tiles of `operands`, and the row weights, which are `None` without
    # `weights`. It returns the results, and a tile to sum over columns or `None`.
    compute: Callable[[list[Array], list[Array], Any], tuple[list[Array], Any]]
    num_results: int = 1  # number of results
    operands: tuple[Float[Array, "A O"], ...] = ()  # arrays `[A, O]` read at the places of the products
    weights: Float[Array, "A"] | None = None  # one for each row; `None` (default) for none
    has_sums: bool = False  # if True, the function returns a tile to sum


def store_products(products: list[Array], operands: list[Array], weights: Array | None) -> tuple[list[Array], Any]:
    """Return the products themselves, for an `Epilogue`."""
    return products, None


class Results(NamedTuple):
    """Results of an epilogue."""

    arrays: tuple[Float[Array, "A O"], ...]  # `[A, O]` in the dtype of the rows; rows of no group are not written
    sums: Float[Array, "A"] | None  # sums over columns, undefined for rows of no group; `None` without sums
