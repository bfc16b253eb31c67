"""Products of groups of rows with a matrix each, over exactly the rows that exist.

The custom call runs on CPUs, where `lax.ragged_dot` multiplies every row with every matrix. Elsewhere the plain forms
at the end of this file run, in `S` times the arithmetic: use `lax.ragged_dot` there.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._custom_calls import by_platform, call, like
from jax_moe_lb._varying import vary_alike
from jax_moe_lb.types import GroupSizes, iota, wide_dtype

Inputs = Float[Array, "A I"]
Outputs = Float[Array, "A O"]
Weights = Float[Array, "S _ _"]
Sums = Float[Array, "S I O"]


def grouped_matmul(rows: Inputs, weights: Weights, group_sizes: GroupSizes, transposed: bool = False) -> Outputs:
    """Multiplies each row with the matrix of its group.

    Use it on CPUs for anything that has a matrix per expert. It is differentiable in `rows` and `weights`, and sums are
    kept in float32 at least.

    Args:
        rows: `[A, I]`, sorted by group. Rows beyond `group_sizes.sum()` are not read, here and in the backward pass.
        weights: `[S, I, O]`, in the dtype of `rows`.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.
        transposed: whether `weights` are `[S, O, I]` instead, each the transpose of what a row is multiplied with. So a
            backward pass needs no transposed copy of them.

    Returns:
        The products, `[A, O]` in the dtype of `rows`, which are 0 in rows beyond `group_sizes.sum()`.

    Raises:
        ValueError: shapes or dtypes that do not fit. Bad sizes stop the program on a CPU with the custom call.
    """
    inner = weights.shape[2 if transposed else 1]
    if (rows.shape[1], group_sizes.shape[0]) != (inner, weights.shape[0]) or rows.dtype != weights.dtype:
        raise ValueError(
            f"rows {rows.dtype}{list(rows.shape)}, weights {weights.dtype}{list(weights.shape)} and group_sizes "
            f"{list(group_sizes.shape)} do not fit; transposed is {transposed}"
        )
    # The custom call takes no other integers. A custom call's operands must vary over the same mesh axes, too.
    group_sizes = group_sizes.astype(jnp.int32)
    return _matmul(transposed, *vary_alike((rows, weights, group_sizes)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(transposed: bool, rows: Inputs, weights: Weights, group_sizes: GroupSizes) -> Outputs:
    def native(rows: Inputs, weights: Weights, group_sizes: GroupSizes) -> Outputs:
        out = like(rows, (rows.shape[0], weights.shape[1 if transposed else 2]))
        return call("grouped_matmul", out, rows, weights, group_sizes, transposed=int(transposed))

    def reference(rows: Inputs, weights: Weights, group_sizes: GroupSizes) -> Outputs:
        return grouped_matmul_reference(rows, weights, group_sizes, transposed)

    return by_platform(rows, weights, group_sizes, native=native, reference=reference, platforms=("cpu",))


def _save(transposed: bool, *args: Array) -> tuple[Outputs, tuple[Array, ...]]:
    return _matmul(transposed, *args), args


def _backward(transposed: bool, saved: tuple[Array, ...], upstream: Outputs) -> tuple[Inputs, Weights, None]:
    rows, weights, group_sizes = saved
    # The gradient has the shape of the weights as they were given, so the factors change places.
    pair = (upstream, rows) if transposed else (rows, upstream)
    sums = grouped_outer(*pair, group_sizes)
    # Sums are kept wide in `grouped_outer` and rounded once, to what autodiff wants.
    return _matmul(not transposed, upstream, weights, group_sizes), sums.astype(weights.dtype), None


_matmul.defvjp(_save, _backward)


def grouped_outer(rows: Inputs, others: Outputs, group_sizes: GroupSizes) -> Sums:
    """Computes `rows.T @ others` of each group: the gradient of the weights of `grouped_matmul`.

    It is not differentiable; use it in backward passes that are written by hand.

    Args:
        rows: `[A, I]`, sorted by group. Rows beyond `group_sizes.sum()` are not read.
        others: `[A, O]`, in the same order, and of the same dtype.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.

    Returns:
        The sums, `[S, I, O]` in float32 at least; exactly 0 for an empty group.
    """

    def native(rows: Inputs, others: Outputs, group_sizes: GroupSizes) -> Sums:
        out = like(rows, (group_sizes.shape[0], rows.shape[1], others.shape[1]), wide_dtype(rows))
        return call("grouped_outer", out, rows, others, group_sizes)

    args = vary_alike((rows, others, group_sizes.astype(jnp.int32)))
    return by_platform(*args, native=native, reference=grouped_outer_reference, platforms=("cpu",))


# ---- in plain JAX --------------------------------------------------------------


def grouped_matmul_reference(
    rows: Inputs, weights: Weights, group_sizes: GroupSizes, transposed: bool = False
) -> Outputs:
    """Computes `grouped_matmul` as one product of all rows per group, in `S` times the arithmetic: tests compare with
    it.
    """
    used = _rows_of(jnp.int32(0), group_sizes.sum(dtype=jnp.int32), rows)
    rows = jnp.where(used, rows, 0)

    def step(out: Outputs, group: Any) -> tuple[Outputs, None]:
        matrix, start, end = group
        product = jnp.matmul(rows, matrix.T if transposed else matrix, preferred_element_type=wide_dtype(rows))
        return jnp.where(_rows_of(start, end, rows), product.astype(rows.dtype), out), None

    ends = group_sizes.cumsum(dtype=jnp.int32)
    zeros = jnp.zeros((rows.shape[0], weights.shape[1 if transposed else 2]), rows.dtype)
    # A scan's carry must vary over the same mesh axes as what its body returns.
    (out,) = vary_alike((zeros,), rows, weights, group_sizes)
    return jax.lax.scan(step, out, (weights, ends - group_sizes, ends))[0]


def grouped_outer_reference(rows: Inputs, others: Outputs, group_sizes: GroupSizes) -> Sums:
    """Computes `grouped_outer` as one product of all rows per group, in `S` times the arithmetic: tests compare with
    it.
    """

    def step(_: None, group: Any) -> tuple[None, Array]:
        start, end = group
        inside = _rows_of(start, end, rows)
        # Both factors are masked: 0 times the NaN of a row that nobody wrote is NaN.
        mine = jnp.where(inside, rows, 0).T
        return None, jnp.matmul(mine, jnp.where(inside, others, 0), preferred_element_type=wide_dtype(rows))

    ends = group_sizes.cumsum(dtype=jnp.int32)
    return jax.lax.scan(step, None, (ends - group_sizes, ends))[1]


def _rows_of(start: Array, end: Array, rows: Inputs) -> Array:
    index = iota(rows.shape[0])[:, None]
    return (index >= start) & (index < end)
