"""Biases of groups of rows: spread over the rows, and summed back over them.

Both are products with a matrix of zeros and ones, `[A, S]`. It has a small part of the entries that an expert has, and
unlike a scatter it adds in the same order every time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_moe_lb.types import DType, GroupSizes, iota, wide_dtype


def bias_rows(bias: Float[Array, "S O"], group_sizes: GroupSizes, num_rows: int) -> Float[Array, "A O"]:
    """Returns the bias of each row's group; 0 for rows beyond the groups.

    Args:
        bias: `[S, O]`, one for each group.
        group_sizes: `[S]` int32, the rows of each group.
        num_rows: `A`.
    """
    member = _members(group_sizes, num_rows).astype(bias.dtype)
    # Full precision: by default a TPU would round a float32 bias to bfloat16, for a product that adds nothing up.
    return jnp.matmul(member, bias, precision=jax.lax.Precision.HIGHEST)


def bias_sums(of_rows: Float[Array, "A O"], group_sizes: GroupSizes, dtype: DType) -> Float[Array, "S O"]:
    """Sums the gradients of the rows of each group, in float32 at least: the transpose of `bias_rows`.

    Args:
        of_rows: `[A, O]`, which may hold anything beyond the groups, even NaN.
        group_sizes: `[S]` int32, the rows of each group.
        dtype: that of the result.
    """
    member = _members(group_sizes, of_rows.shape[0])
    written = jnp.where(member.any(1, keepdims=True), of_rows, 0)
    sums = jnp.matmul(
        member.T.astype(of_rows.dtype),
        written,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=wide_dtype(of_rows),
    )
    return sums.astype(dtype)


def _members(group_sizes: GroupSizes, num_rows: int) -> Bool[Array, "A S"]:
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    row = iota(num_rows)[:, None]
    return (row >= (ends - group_sizes)[None]) & (row < ends[None])
