"""Products of groups of rows with a matrix each, over the rows that exist.

Each platform has its form: a custom call on CPUs, tokamax's kernels on NVIDIA GPUs, XLA's `ragged_dot` on TPUs, and
blocks of rows (`grouped_blocks.py`) where there is nothing better. None of them multiplies every row with every matrix.
Matrices may be in several arrays, which kernels of our own take as they are (`hopper_kernels.py`).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_moe_lb._custom_calls import call, is_built, like
from jax_moe_lb._varying import vary_alike, vary_like
from jax_moe_lb.ops.grouped_blocks import matmul_by_blocks, outer_by_blocks
from jax_moe_lb.ops.grouped_kernels import (
    clear_tail,
    hopper_matmul,
    hopper_outer,
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
Parts = tuple[Float[Array, "_ _ _"], ...]
Sums = Float[Array, "S I O"]


def grouped_matmul(
    rows: Inputs, weights: Weights | Parts, group_sizes: GroupSizes, transposed: bool = False
) -> Outputs:
    """Multiplies each row with the matrix of its group.

    Use it for anything that has a matrix per expert. It is differentiable in `rows` and `weights`, and sums are kept in
    float32 at least.

    Args:
        rows: `[A, I]`, sorted by group. Rows beyond `group_sizes.sum()` may hold anything, here and in the backward
            pass. Kernels of GPUs want multiples of 128 for `A`, `I` and `O`; for others blocks are multiplied.
        weights: `[S, I, O]`, in the dtype of `rows`; or a tuple of such arrays, whose groups follow one another. Those
            our own kernels on Hopper read where they are; all others get a copy of them in one.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.
        transposed: whether `weights` are `[S, O, I]` instead, each the transpose of what a row is multiplied with. So a
            backward pass needs no transposed copy of them.

    Returns:
        The products, `[A, O]` in the dtype of `rows`. Rows beyond `group_sizes.sum()` hold anything, even NaN.

    Raises:
        ValueError: shapes or dtypes that do not fit. Bad sizes stop the program on a CPU with the custom call.
    """
    parts = list(weights) if isinstance(weights, tuple) else [weights]
    inner = {part.shape[2 if transposed else 1] for part in parts}
    num_groups, dtypes = sum(part.shape[0] for part in parts), {part.dtype for part in parts}
    if ({rows.shape[1]}, group_sizes.shape[0], {rows.dtype}) != (inner, num_groups, dtypes):
        given = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
        raise ValueError(
            f"rows {rows.dtype}{list(rows.shape)}, weights {given} and group_sizes {list(group_sizes.shape)} do not "
            f"fit; transposed is {transposed}"
        )
    # The custom call takes no other integers. A custom call's operands must vary over the same mesh axes, too.
    rows, group_sizes, *parts = vary_alike((rows, group_sizes.astype(jnp.int32), *parts))
    return _matmul(transposed, rows, tuple(parts) if isinstance(weights, tuple) else parts[0], group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(transposed: bool, rows: Inputs, weights: Weights | Parts, group_sizes: GroupSizes) -> Outputs:
    if isinstance(weights, tuple):
        return _matmul_of_parts(transposed, rows, weights, group_sizes)

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


def _matmul_of_parts(transposed: bool, rows: Inputs, parts: Parts, group_sizes: GroupSizes) -> Outputs:
    def in_one(rows: Inputs, parts: Parts, group_sizes: GroupSizes) -> Outputs:
        return _matmul(transposed, rows, jnp.concatenate(parts), group_sizes)

    def on_gpus(*args: Any) -> Outputs:
        out = hopper_matmul(*args, transposed=transposed)
        return in_one(*args) if out is None else out

    return jax.lax.platform_dependent(rows, parts, group_sizes, cuda=on_gpus, default=in_one)


def _save(transposed: bool, *args: Any) -> tuple[Outputs, tuple[Any, ...]]:
    return _matmul(transposed, *args), args


def _backward(transposed: bool, saved: tuple[Any, ...], upstream: Outputs) -> tuple[Inputs, Weights | Parts, None]:
    rows, weights, group_sizes = saved
    rows, upstream = (clear_tail(array, group_sizes) for array in (rows, upstream))
    # The gradient has the shape of the weights as they were given, so the factors change places.
    pair = (upstream, rows) if transposed else (rows, upstream)
    # Rounded once, to what autodiff wants.
    sums = grouped_outer(*pair, group_sizes, jax.tree.leaves(weights)[0].dtype, parts=_groups_of(weights))
    return _matmul(not transposed, upstream, weights, group_sizes), sums, None


def _groups_of(weights: Weights | Parts) -> tuple[int, ...] | None:
    return tuple(part.shape[0] for part in weights) if isinstance(weights, tuple) else None


_matmul.defvjp(_save, _backward)


def grouped_outer(
    rows: Inputs,
    others: Outputs,
    group_sizes: GroupSizes,
    dtype: DType | None = None,
    sums: Sums | Parts | None = None,
    parts: tuple[int, ...] | None = None,
) -> Sums | Parts:
    """Computes `rows.T @ others` of each group: the gradient of the weights of `grouped_matmul`.

    It is not differentiable; use it in backward passes that are written by hand.

    Args:
        rows: `[A, I]`, sorted by group, after `clear_tail`: some kernels read beyond `group_sizes.sum()`.
        others: `[A, O]`, in the same order, of the same dtype, and likewise.
        group_sizes: `[S]`, the rows of each group, at least 0; their sum must be at most `A`.
        dtype: that of the result; `None`, the default, is float32 at least, in which sums are kept in any case. Take
            that of the weights where nothing is added any more: kernels then write half as much in bfloat16.
        sums: what the products are added to, in the form of the result, on CPUs in place; `None`: nothing.
        parts: in how many groups each array of a result in several arrays has; `None`: it is one array.

    Returns:
        The sums, `[S, I, O]`; for an empty group exactly those before, or 0.
    """
    args = rows, others, group_sizes, wide_dtype(rows) if dtype is None else dtype, sums
    return _outer(*args) if parts is None else _outer_of_parts(*args, parts)


def _outer_of_parts(
    rows: Inputs, others: Outputs, group_sizes: GroupSizes, dtype: DType, sums: Any, parts: tuple[int, ...]
) -> Parts:
    def in_one(rows: Inputs, others: Outputs, group_sizes: GroupSizes) -> Parts:
        return tuple(jnp.split(_outer(rows, others, group_sizes, dtype, None), np.cumsum(parts)[:-1]))

    def on_gpus(*args: Array) -> Parts:
        products = hopper_outer(*args, parts=parts, dtype=dtype)
        return in_one(*args) if products is None else products

    operands = vary_alike((rows, others, group_sizes.astype(jnp.int32)))
    products = jax.lax.platform_dependent(*operands, cuda=on_gpus, default=in_one)
    return products if sums is None else jax.tree.map(jnp.add, sums, products)


def _outer(rows: Inputs, others: Outputs, group_sizes: GroupSizes, dtype: DType, sums: Any) -> Sums:
    wide = wide_dtype(rows)
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
