"""The experts' feed-forward network over rows sorted by slot, out of products of groups of rows."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._varying import vary_like
from jax_moe_lb.activations import swiglu
from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.grouped_kernels import clear_tail
from jax_moe_lb.ops.grouped_matmul import grouped_matmul, grouped_outer
from jax_moe_lb.types import DType, GroupSizes, Rows, wide_dtype


@jax.custom_vjp
def grouped_ffn(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> Rows:
    """Sends each row through the expert of its group.

    `moe` calls it for the rows that a rank has received; call it yourself in a transport of your own.

    Args:
        rows: `[A, H]`, sorted by group. Rows beyond `group_sizes.sum()` may hold anything, even NaN.
        experts: the weights of the `S` groups, in the dtype of `rows`.
        group_sizes: `[S]` int32, the rows of each group. It may be 0, and then the expert's gradient is exactly 0.

    Returns:
        The outputs, `[A, H]`, in which rows beyond `group_sizes.sum()` hold anything. Only `rows` and `experts` are
        kept for the backward pass, which computes the hidden activations again.
    """
    # All hidden activations at once, in `O(A F)` memory. A row meets no other, so what stands beyond the groups reaches
    # nothing, and nothing is masked.
    return dense_ffn(rows, experts, lambda x, weights: grouped_matmul(x, weights, group_sizes))


def _save(rows: Rows, experts: Experts, group_sizes: GroupSizes) -> tuple[Rows, tuple[Rows, Experts, GroupSizes]]:
    return grouped_ffn(rows, experts, group_sizes), (rows, experts, group_sizes)


def grouped_ffn_gradients(
    rows: Rows,
    weights: Float[Array, "A 1"],
    experts: Experts,
    group_sizes: GroupSizes,
    upstream: Rows,
    sums_dtype: DType,
) -> tuple[Rows, Float[Array, "A 1"], Experts]:
    """Computes the gradients of `weights * grouped_ffn(rows, experts, group_sizes)`.

    Use it in a backward pass that is written by hand, as that of the rounds is.

    Args:
        rows: `[A, H]`, as `grouped_ffn` was given them.
        weights: `[A, 1]`, what the output of each row is multiplied with, in float32 at least.
        experts: the weights of the `S` groups.
        group_sizes: `[S]` int32, the rows of each group.
        upstream: `[A, H]`, the gradients of the weighted outputs, in the dtype of `rows`. Like `rows` and `weights`,
            they may hold anything beyond `group_sizes.sum()`.
        sums_dtype: that of the gradients of the experts. They are summed over rows in float32 at least; give that where
            they are summed on, so that nothing is rounded twice.

    Returns:
        The gradients of the rows and of the weights, in their dtypes, which hold anything beyond `group_sizes.sum()`,
        and those of the experts.
    """
    # Gradients of weights sum over rows, and there what stands beyond the groups would count.
    rows, upstream = clear_tail(rows, group_sizes), clear_tail(upstream, group_sizes)
    inner = inner_weights(experts)
    products = tuple(grouped_matmul(rows, matrix, group_sizes) for matrix in inner)
    hidden, pull_back = jax.vjp(partial(activate, experts), products)
    # With `y = hidden down`, the gradient of the weight, `y upstream`, is `hidden (upstream down^T)`: of the outputs,
    # which this pass does not have, only what they are made of is needed. The weights are multiplied with hidden
    # activations for the same reason, and because these are narrower.
    of_hidden = grouped_matmul(upstream, experts.down, group_sizes, transposed=True).astype(weights.dtype)
    of_weights = (hidden.astype(weights.dtype) * of_hidden).sum(1, keepdims=True)
    (upstreams,) = pull_back((of_hidden * weights).astype(rows.dtype))
    hidden = (hidden.astype(weights.dtype) * weights).astype(rows.dtype)
    hidden, *upstreams = (clear_tail(array, group_sizes) for array in (hidden, *upstreams))
    back = [
        grouped_matmul(part, matrix, group_sizes, transposed=True)
        for part, matrix in zip(upstreams, inner, strict=True)
    ]
    inner_gradients = [grouped_outer(rows, part, group_sizes, sums_dtype) for part in upstreams]
    down = grouped_outer(hidden, upstream, group_sizes, sums_dtype)
    of_gate = None if experts.gate is None else inner_gradients[1]
    of_experts = Experts(inner_gradients[0], down, of_gate, experts.activation)
    return sum(back[1:], start=back[0]), of_weights, of_experts


def _backward(saved: tuple[Rows, Experts, GroupSizes], upstream: Rows) -> tuple[Rows, Experts, None]:
    rows, experts, group_sizes = saved
    ones = vary_like(jnp.ones((rows.shape[0], 1), wide_dtype(rows)), rows)
    of_rows, _, of_experts = grouped_ffn_gradients(rows, ones, experts, group_sizes, upstream, experts.up.dtype)
    return of_rows, of_experts, None


grouped_ffn.defvjp(_save, _backward)


def dense_ffn(
    rows: Float[Array, "*B H"], expert: Experts, matmul: Callable[[Array, Array], Array] = jnp.matmul
) -> Array:
    """Sends all rows through one expert: the reference that `grouped_ffn` is held against.

    Args:
        rows: `[..., H]`, none of which is left out.
        expert: the weights of one expert, without the leading dimension of experts.
        matmul: the product that is used, of rows and a matrix. Another one than `jnp.matmul` may read weights that do
            have a leading dimension, as `grouped_matmul` does.
    """
    products = tuple(matmul(rows, weights) for weights in inner_weights(expert))
    return matmul(activate(expert, products), expert.down)


def inner_weights(experts: Experts) -> tuple[Array, ...]:
    """Returns the weights that rows are multiplied with first: `up`, and `gate` where it is beside that."""
    return (experts.up,) if experts.gate is None else (experts.up, experts.gate)


def activate(experts: Experts, products: tuple[Array, ...]) -> Array:
    """Returns the hidden activations, given the products with `inner_weights`."""
    if experts.is_fused:
        products = tuple(jnp.split(products[0], 2, -1))
    up, *gate = products
    if gate:
        return (experts.activation or swiglu)(gate[0], up)
    return (experts.activation or jax.nn.gelu)(up)
