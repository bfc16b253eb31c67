"""Between the tokens of a rank and their copies in the sending order: gathers, and their transposes.

All are gathers and sums along an axis: a scatter, which autodiff would write, adds in no fixed order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb.ops.ragged_all_to_all import as_rows, as_words
from jax_moe_lb.transport.exchange import Copies, Receipt
from jax_moe_lb.types import DType, Tokens, wide_dtype

Weights = Float[Array, "T K"]
"""The router's weight of each token's choices, in float32 at least."""

CopyWeights = Float[Array, "C 1"]
"""The same in the sending order, as rows of width 1, which travel as copies do."""


def to_sending_order(tokens: Tokens, receipt: Receipt, per_token: int) -> Copies:
    """Makes the `K` copies of each token, in the order in which they are sent.

    Args:
        tokens: `[T, H]`, the tokens of this rank, or the gradients of their outputs.
        receipt: it says which copy stands where.
        per_token: `K`, the experts of each token.

    Returns:
        `[T * K, H]`.
    """
    return _rows_at(tokens, receipt.order // per_token)


def sum_of_copies(copies: Copies, receipt: Receipt, per_token: int) -> Tokens:
    """Sums the copies of each token, in the order of choices and in float32 at least: the transpose of
    `to_sending_order`.

    Args:
        copies: `[T * K, H]`, in the sending order of `receipt`.
        receipt: it says which copy stands where; those that go nowhere count as 0.
        per_token: `K`.

    Returns:
        `[T, H]` in the dtype of `copies`.
    """
    place = receipt.place.reshape(-1, per_token)
    total = sum(_of_choice(copies, receipt, place[:, k], wide_dtype(copies)) for k in range(per_token))
    return jnp.asarray(total).astype(copies.dtype)


def combine(copies: Copies, weights: Weights, receipt: Receipt) -> Tokens:
    """Computes the weighted sum of each token's expert outputs: the last step of a layer.

    It takes one gather per choice, added as it comes: XLA:CPU then never writes the `[T, K, H]` products, nor the
    copies in token order.

    Args:
        copies: `[T * K, H]`, the experts' outputs in the sending order of `receipt`.
        weights: `[T, K]`, the router's, in float32 at least; sums are kept in their dtype.
        receipt: it says where each copy stands; those that go nowhere count as 0.

    Returns:
        `[T, H]` in the dtype of `copies`.
    """
    place = receipt.place.reshape(weights.shape)
    total = jnp.zeros((weights.shape[0], copies.shape[1]), weights.dtype)
    # Unrolled over the few choices, in their order, so that equal inputs give equal bits.
    for k in range(weights.shape[1]):
        total = total + _of_choice(copies, receipt, place[:, k], weights.dtype) * weights[:, k, None]
    return total.astype(copies.dtype)


def weights_in_order(weights: Weights, receipt: Receipt) -> CopyWeights:
    """Returns the weight of each copy in the sending order.

    Args:
        weights: `[T, K]`, the router's.
        receipt: it says which copy stands where.
    """
    return weights.reshape(-1, 1)[receipt.order]


def weights_by_token(values: CopyWeights, receipt: Receipt, per_token: int) -> Weights:
    """Returns what each copy has by token and choice, 0 for one that goes nowhere: the transpose of `weights_in_order`.

    Args:
        values: `[T * K, 1]`, in the sending order of `receipt`.
        receipt: it says where each copy stands.
        per_token: `K`.
    """
    return _of_choice(values, receipt, receipt.place, values.dtype).reshape(-1, per_token)


def _of_choice(copies: Copies, receipt: Receipt, place: Int[Array, "T"], dtype: DType) -> Tokens:
    """The copy at each of these places; 0 for one that goes nowhere, which nobody wrote."""
    # Widened after the gather, so that it reads narrow copies.
    return jnp.where((place < receipt.num_going)[:, None], _rows_at(copies, place), 0).astype(dtype)


def _rows_at(rows: Float[Array, "A H"], at: Int[Array, "B"]) -> Float[Array, "B H"]:
    def as_they_are(rows: Array, at: Array) -> Array:
        return rows[at]

    return jax.lax.platform_dependent(rows, at, tpu=rows_by_words, default=as_they_are)


def rows_by_words(rows: Float[Array, "A H"], at: Int[Array, "B"]) -> Float[Array, "B H"]:
    """Returns the rows at these places, `rows[at]`, in the layout that an exchange on a TPU has.

    Gathered so, rows are not turned around before an exchange or after it.

    Args:
        rows: `[A, H]`.
        at: `[B]` int32.
    """
    return as_rows(as_words(rows)[at])
