"""Grouped products out of dense products of blocks of rows: the form for everything that has no better one.

It takes a number of blocks that is known when a program is compiled, at most one partly filled for each group. So its
arithmetic is at most a quarter more than that of the rows, its memory that of the result, and no host waits for
the length of a loop, as the one around each group's own blocks would make it.

Products of groups of rows with a matrix each, over the rows that exist.

Each platform has its form: a custom call on CPUs, tokamax's kernels on NVIDIA GPUs, XLA's `ragged_dot` on TPUs, and
blocks of rows (`grouped_matmul.py`) where there is nothing better. None of them multiplies every row with every matrix.
Matrices may be in several arrays, which kernels of our own take as they are (`hopper.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.custom_calls import call, is_built, like
from jax_moe_lb.core.manual_axes import vary_alike, vary_like
from jax_moe_lb.core.types import DType, GroupSizes, iota, wide_dtype
from jax_moe_lb.kernels.backends import (
    clear_tail,
    hopper_matmul,
    hopper_outer,
    ragged_matmul,
    ragged_outer,
    tokamax_matmul,
    tokamax_outer,
    triton_outer,
)

Carry = TypeVar("Carry")

MAX_BLOCK_ROWS = 512
"""A product of more rows with one matrix gains little on any device."""


class Block(NamedTuple):
    """Says which rows a block holds, all of one group.

    Args:
        group: int32, the group.
        start: int32, the first row of the window that is read.
        inside: `[B]`, which rows of that window are the block's.
    """

    group: Int[Array, ""]
    start: Int[Array, ""]
    inside: Bool[Array, "B"]


def matmul_by_blocks(
    rows: Float[Array, "A I"], weights: Float[Array, "S _ _"], group_sizes: GroupSizes, *, transposed: bool
) -> Float[Array, "A O"]:
    """Computes `grouped_matmul` block by block.

    Args:
        rows: `[A, I]`, sorted by group.
        weights: `[S, I, O]`, or `[S, O, I]` where `transposed`.
        group_sizes: `[S]` int32.
        transposed: whether rows are multiplied with the transposes.
    """
    width = weights.shape[1 if transposed else 2]
    if weights.shape[0] == 1:
        return _product(rows, weights[0], transposed)

    def step(block: Block, out: Array) -> Array:
        product = _product(_window(rows, block), weights[block.group], transposed)
        # Rows of the window that are another block's keep what that one wrote.
        mixed = jnp.where(block.inside[:, None], product, _window(out, block))
        return jax.lax.dynamic_update_slice_in_dim(out, mixed, block.start, 0)

    out = jnp.zeros((rows.shape[0], width), rows.dtype)
    return each_block(step, vary_like(out, rows, weights), rows.shape[0], group_sizes)


def outer_by_blocks(
    rows: Float[Array, "A I"], others: Float[Array, "A O"], group_sizes: GroupSizes
) -> Float[Array, "S I O"]:
    """Computes `grouped_outer` block by block.

    Args:
        rows: `[A, I]`, sorted by group.
        others: `[A, O]`, in the same order.
        group_sizes: `[S]` int32.
    """
    if group_sizes.shape[0] == 1:
        inside = (iota(rows.shape[0]) < group_sizes)[:, None]
        mine, theirs = (jnp.where(inside, array, 0) for array in (rows, others))
        return jnp.matmul(mine.T, theirs, preferred_element_type=wide_dtype(rows))[None]

    def step(block: Block, sums: Array) -> Array:
        # Both factors are masked: 0 times the NaN of a row that nobody wrote is NaN.
        mine, theirs = (jnp.where(block.inside[:, None], _window(array, block), 0) for array in (rows, others))
        return sums.at[block.group].add(jnp.matmul(mine.T, theirs, preferred_element_type=sums.dtype))

    sums = jnp.zeros((group_sizes.shape[0], rows.shape[1], others.shape[1]), wide_dtype(rows))
    return each_block(step, vary_like(sums, rows, others), rows.shape[0], group_sizes)


def block_rows(num_rows: int, num_groups: int) -> int:
    """Computes the rows of a block: the partly filled ones of all groups shall hold a quarter of the rows at most.

    Args:
        num_rows: `A`.
        num_groups: `S`.
    """
    return max(1, min(MAX_BLOCK_ROWS, num_rows // (4 * num_groups)))


def each_block(
    step: Callable[[Block, Carry], Carry], carry: Carry, num_rows: int, group_sizes: Int[Array, "S"]
) -> Carry:
    """Runs a step for each block, some of which are empty; each row of a group is inside of one block.

    Args:
        step: takes a block and the carry, and returns the new carry.
        carry: it varies over the mesh axes of what the step reads.
        num_rows: `A`.
        group_sizes: `[S]` int32.
    """
    num_groups = group_sizes.shape[0]
    if num_rows == 0 or num_groups == 0:
        return vary_like(carry, group_sizes)
    size = block_rows(num_rows, num_groups)
    # Each group has as many whole blocks as it fills, and at most one more.
    num_blocks = num_rows // size + num_groups
    ends, blocks_of = group_sizes.cumsum(dtype=jnp.int32), (group_sizes + size - 1) // size
    last_block = blocks_of.cumsum(dtype=jnp.int32)

    def one(carry: Carry, i: Array) -> tuple[Carry, None]:
        # Blocks beyond the last are of the last group, beyond its rows, and so empty.
        group = jnp.minimum((last_block <= i).sum(dtype=jnp.int32), num_groups - 1)
        first = ends[group] - group_sizes[group] + (i - last_block[group] + blocks_of[group]) * size
        # The window of a last block would reach beyond the rows; moved back, it holds some of the block before.
        start = jnp.clip(first, 0, num_rows - size)
        row = start + iota(size)
        inside = (row >= first) & (row < jnp.minimum(first + size, ends[group]))
        return step(Block(group, start, inside), carry), None

    return jax.lax.scan(one, vary_like(carry, group_sizes), vary_like(iota(num_blocks), group_sizes))[0]


def _product(rows: Array, matrix: Array, transposed: bool) -> Array:
    product = jnp.matmul(rows, matrix.T if transposed else matrix, preferred_element_type=wide_dtype(rows))
    return product.astype(rows.dtype)


def _window(array: Array, block: Block) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, block.start, block.inside.shape[0], 0)


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
