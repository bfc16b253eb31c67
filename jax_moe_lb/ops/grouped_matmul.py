"""Products of groups of rows with a matrix each, over the rows that exist.

Each platform has its form: a custom call on CPUs, tokamax's kernels on NVIDIA GPUs, XLA's `ragged_dot` on TPUs, and
blocks of rows (`grouped_blocks.py`) where there is nothing better. None of them multiplies every row with every matrix.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._custom_calls import call, is_built, like
from jax_moe_lb._varying import vary_alike, vary_like
from jax_moe_lb.ops.grouped_blocks import matmul_by_blocks, outer_by_blocks
from jax_moe_lb.ops.grouped_kernels import (
    clear_tail,
    ragged_matmul,
    ragged_outer,
    tokamax_matmul,
    tokamax_outer,
    triton_outer,
)
from jax_moe_lb.types import DType, GroupSizes, wide_dtype

Inputs = Float[Array, "A I"]
Outputs = Float[Array, "A O"]
Weights = Float[Array, "S _ _"]
Sums = Float[Array, "S I O"]


def grouped_matmul(rows: Inputs, weights: Weights, group_sizes: GroupSizes, transposed: bool = False) -> Outputs:
    """Multiplies each row with the matrix of its group.

    Use it for anything that has a matrix per expert. It is differentiable in `rows` and `weights`, and sums are kept in
    float32 at least.

    Args:
        rows: `[A, I]`, sorted by group. Rows beyond `group_sizes.sum()` may hold anything, here and in the backward
            pass. Kernels of GPUs want multiples of 128 for `A`, `I` and `O`; for others blocks are multiplied.
        weights: `[S, I, O]`, in the dtype of `rows`.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.
        transposed: whether `weights` are `[S, O, I]` instead, each the transpose of what a row is multiplied with. So a
            backward pass needs no transposed copy of them.

    Returns:
        The products, `[A, O]` in the dtype of `rows`. Rows beyond `group_sizes.sum()` hold anything, even NaN.

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
    def custom_call(rows: Inputs, weights: Weights, group_sizes: GroupSizes) -> Outputs:
        out = like(rows, (rows.shape[0], weights.shape[1 if transposed else 2]))
        return call("grouped_matmul", out, rows, weights, group_sizes, transposed=int(transposed))

    blocks = partial(matmul_by_blocks, transposed=transposed)

    def on_gpus(*args: Array) -> Outputs:
        out = tokamax_matmul(*args, transposed=transposed)
        return blocks(*args) if out is None else out

    return jax.lax.platform_dependent(
        rows,
        weights,
        group_sizes,
        cpu=custom_call if is_built("cpu") else blocks,
        cuda=on_gpus,
        tpu=partial(ragged_matmul, transposed=transposed),
        default=blocks,
    )


def _save(transposed: bool, *args: Array) -> tuple[Outputs, tuple[Array, ...]]:
    return _matmul(transposed, *args), args


def _backward(transposed: bool, saved: tuple[Array, ...], upstream: Outputs) -> tuple[Inputs, Weights, None]:
    rows, weights, group_sizes = saved
    rows, upstream = (clear_tail(array, group_sizes) for array in (rows, upstream))
    # The gradient has the shape of the weights as they were given, so the factors change places.
    pair = (upstream, rows) if transposed else (rows, upstream)
    # Rounded once, to what autodiff wants.
    sums = grouped_outer(*pair, group_sizes, weights.dtype)
    return _matmul(not transposed, upstream, weights, group_sizes), sums, None


_matmul.defvjp(_save, _backward)


def grouped_outer(
    rows: Inputs, others: Outputs, group_sizes: GroupSizes, dtype: DType | None = None, sums: Sums | None = None
) -> Sums:
    """Computes `rows.T @ others` of each group: the gradient of the weights of `grouped_matmul`.

    It is not differentiable; use it in backward passes that are written by hand.

    Args:
        rows: `[A, I]`, sorted by group, after `clear_tail`: some kernels read beyond `group_sizes.sum()`.
        others: `[A, O]`, in the same order, of the same dtype, and likewise.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.
        dtype: that of the result; `None`, the default, is float32 at least, in which sums are kept in any case. Take
            that of the weights where nothing is added any more: kernels then write half as much in bfloat16.
        sums: `[S, I, O]`, what the products are added to, on CPUs in place; `None`: nothing.

    Returns:
        The sums, `[S, I, O]`; for an empty group exactly those before, or 0.
    """
    wide = wide_dtype(rows)
    dtype = wide if dtype is None else dtype
    shape = (group_sizes.shape[0], rows.shape[1], others.shape[1])

    def custom_call(*args: Array) -> Sums:
        # The call adds to what it is given, block by block of rows.
        before = args[3].astype(wide) if sums is not None else vary_like(jnp.zeros(shape, wide), *args)
        return call("grouped_outer", like(args[0], shape, wide), *args[:3], before, aliases={3: 0}).astype(dtype)

    def added(products: Sums, *before: Sums) -> Sums:
        return products.astype(dtype) if sums is None else (before[0] + products).astype(dtype)

    def by_blocks(*args: Array) -> Sums:
        return added(outer_by_blocks(*args[:3]), *args[3:])

    def on_gpus(*args: Array) -> Sums:
        products = tokamax_outer(*args[:3], dtype=dtype)
        if products is None:
            products = triton_outer(*args[:3], dtype=dtype)
        return by_blocks(*args) if products is None else added(products, *args[3:])

    def on_tpus(*args: Array) -> Sums:
        return added(ragged_outer(*args[:3], dtype=dtype), *args[3:])

    return jax.lax.platform_dependent(
        *vary_alike((rows, others, group_sizes.astype(jnp.int32), *([] if sums is None else [sums]))),
        cpu=custom_call if is_built("cpu") else by_blocks,
        cuda=on_gpus,
        tpu=on_tpus,
        default=by_blocks,
    )


def products_are_by_group() -> bool:
    """Says whether a product on a CPU had better be of rows of one group, since it has no call for several."""
    return not is_built("cpu")
