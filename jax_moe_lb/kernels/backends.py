"""Grouped products by kernels: tokamax's on NVIDIA GPUs, our own where it has none or these are wanted, XLA's on TPUs.

XLA's `ragged_dot` is no choice on GPUs: there it becomes a dense product of every row with every matrix.
"""

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.backend import get_default_device
from jaxtyping import Array, Float

from jax_moe_lb.core.manual_axes import unvarying_call, vary_alike
from jax_moe_lb.core.types import DType, GroupSizes, Rows, iota

TILE_ROWS = 128
"""Kernels take numbers of rows that this divides, and read beyond the last group up to such a number."""

TILE_COLUMNS = 128
"""They take widths that this divides."""

CLEARED_ROWS = 1024
"""So many rows at a time are cleared on TPUs, where all rows beyond the last group are."""

FIRST_WITH_HOPPER_KERNELS = (0, 12)
"""Our own were written for the Pallas of this JAX."""

_Dimensions = jax.lax.RaggedDotDimensionNumbers
PRODUCT = _Dimensions((([1], [1]), ([], [])), [0], [0])
TRANSPOSED = _Dimensions((([1], [2]), ([], [])), [0], [0])
OUTER = _Dimensions((([0], [0]), ([], [])), [0], [])


def has_tokamax() -> bool:
    """Says whether products on NVIDIA GPUs are tokamax's, that is, whether it is installed."""
    return importlib.util.find_spec("tokamax") is not None


def has_hopper_kernels() -> bool:
    """Says whether our own kernels run on the default device."""
    device = get_default_device()
    is_hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    return is_hopper and jax.__version_info__ >= FIRST_WITH_HOPPER_KERNELS


def tokamax_matmul(
    rows: Float[Array, "A I"], weights: Float[Array, "S _ _"], group_sizes: GroupSizes, *, transposed: bool
) -> Float[Array, "A O"] | None:
    """Computes `grouped_matmul` with tokamax's kernel for the default device, or returns `None` where it has none.

    Rows beyond the last group are not written.

    Args:
        rows: `[A, I]`, sorted by group.
        weights: `[S, I, O]`, or `[S, O, I]` where `transposed`.
        group_sizes: `[S]` int32.
        transposed: whether rows are multiplied with the transposes.
    """
    if not _fits(rows, weights):
        return None
    out = _tokamax(rows, weights, group_sizes, TRANSPOSED if transposed else PRODUCT, rows.dtype)
    if out is None and transposed:
        # The kernels of some architectures know no transposes: they get a transposed copy.
        out = _tokamax(rows, weights.mT, group_sizes, PRODUCT, rows.dtype)
    return out


def tokamax_outer(
    rows: Float[Array, "A I"], others: Float[Array, "A O"], group_sizes: GroupSizes, *, dtype: DType
) -> Float[Array, "S I O"] | None:
    """Computes `grouped_outer` with tokamax's kernel for the default device, or returns `None` where it has none.

    Args:
        rows: `[A, I]`, sorted by group, after `clear_tail`.
        others: `[A, O]`, likewise.
        group_sizes: `[S]` int32.
        dtype: that of the result; kernels sum in float32 in any case.
    """
    if not _fits(rows, others):
        return None
    return _tokamax(rows, others, group_sizes, OUTER, dtype)


def triton_outer(
    rows: Float[Array, "A I"], others: Float[Array, "A O"], group_sizes: GroupSizes, *, dtype: DType
) -> Float[Array, "S I O"] | None:
    """Computes `grouped_outer` with our own kernel, or returns `None` where it does not fit or there is no GPU.

    Use it after `tokamax_outer`, which has one for Hopper alone.

    Args:
        rows: `[A, I]`, sorted by group; rows beyond the last group are never read.
        others: `[A, O]`, in the same order.
        group_sizes: `[S]` int32.
        dtype: that of the result; the kernel sums in float32 in any case.
    """
    if get_default_device().platform != "gpu":
        return None
    # Pallas takes a while to import, and programs for CPUs and TPUs have no use for it.
    from jax_moe_lb.kernels.triton_outer import fits, outer

    if not fits(rows, others, group_sizes.shape[0]):
        return None
    return unvarying_call(partial(outer, dtype=dtype), *vary_alike((rows, others, group_sizes)))


def hopper_matmul(
    rows: Float[Array, "A I"], parts: tuple[Float[Array, "_ _ _"], ...], group_sizes: GroupSizes, *, transposed: bool
) -> Float[Array, "A O"] | None:
    """Computes `grouped_matmul` with our own kernel, or returns `None` where it does not fit or the GPU is no Hopper.

    Args:
        rows: `[A, I]`, sorted by group; rows beyond the last group reach nothing.
        parts: `[G, I, O]` each, or `[G, O, I]` where `transposed`: the matrices of the groups, part after part.
        group_sizes: `[S]` int32.
        transposed: whether rows are multiplied with the transposes.
    """
    if not has_hopper_kernels():
        return None
    from jax_moe_lb.kernels.hopper import fits, product

    if not all(fits(rows, part) for part in parts):
        return None

    def multiply(rows: Array, group_sizes: Array, *parts: Array) -> Array:
        return product(rows, *parts, group_sizes=group_sizes, transposed=transposed)

    return unvarying_call(multiply, *vary_alike((rows, group_sizes, *parts)))


def hopper_outer(
    rows: Float[Array, "A I"],
    others: Float[Array, "A O"],
    group_sizes: GroupSizes,
    *,
    parts: tuple[int, ...],
    dtype: DType,
) -> tuple[Float[Array, "_ I O"], ...] | None:
    """Computes `grouped_outer` with our own kernel, or returns `None` where it does not fit or the GPU is no Hopper.

    Args:
        rows: `[A, I]`, sorted by group; rows beyond the last group count as 0, whatever they hold.
        others: `[A, O]`, in the same order.
        group_sizes: `[S]` int32.
        parts: in how many groups each array of the result has.
        dtype: that of the result; the kernel sums in float32 in any case.
    """
    if not has_hopper_kernels():
        return None
    from jax_moe_lb.kernels.hopper import fits, outer

    if not fits(rows, others) or 0 in parts:
        return None
    return unvarying_call(partial(outer, parts=parts, dtype=dtype), *vary_alike((rows, others, group_sizes)))


def ragged_matmul(
    rows: Float[Array, "A I"], weights: Float[Array, "S _ _"], group_sizes: GroupSizes, *, transposed: bool
) -> Float[Array, "A O"]:
    """Computes `grouped_matmul` with XLA's ragged product; see `tokamax_matmul`."""
    return _ragged(rows, weights, group_sizes, TRANSPOSED if transposed else PRODUCT, rows.dtype)


def ragged_outer(
    rows: Float[Array, "A I"], others: Float[Array, "A O"], group_sizes: GroupSizes, *, dtype: DType
) -> Float[Array, "S I O"]:
    """Computes `grouped_outer` with XLA's ragged product; see `tokamax_outer`."""
    sums = _ragged(rows, others, group_sizes, OUTER, dtype)
    return _clear_empty(sums, group_sizes)


def clear_tail(rows: Rows, group_sizes: GroupSizes, *, are_results: bool = False) -> Rows:
    """Returns the rows with zeros where `grouped_outer` reads beyond the last group.

    Kernels mask what they read there by multiplying with 0, which leaves the NaN of a row that nobody wrote.

    Args:
        rows: `[A, ...]`, sorted by group; give up what is passed here, so that it is changed in place.
        group_sizes: `[S]` int32.
        are_results: whether they are computed element by element right before, so that a mask is a part of that.
    """
    on_tpu = _clear_all if are_results else _clear_rest
    return jax.lax.platform_dependent(
        *vary_alike((rows, group_sizes)),
        cuda=_clear_tile,
        tpu=on_tpu,
        default=lambda rows, group_sizes: rows,
    )


def usual_layout(weights: Float[Array, "S ..."]) -> Float[Array, "S ..."]:
    """Holds a GPU's compiler to the usual layout of weights before it turns them around for a product.

    Free to choose, it gives them the layout of the transposed product and carries that out of all loops around: a scan
    over layers then turned the weights of all of them around, and every layer its own back.

    Args:
        weights: `[S, ...]`, the weights of groups, or a bias.
    """

    def pinned(weights: Array) -> Array:
        return with_layout_constraint(weights, Layout(tuple(range(weights.ndim))))

    return jax.lax.platform_dependent(weights, cuda=pinned, default=lambda weights: weights)


def _clear_tile(rows: Rows, group_sizes: GroupSizes) -> Rows:
    # One tile, whatever the number of rows: a mask over all of them would read and write them once more.
    rows = with_layout_constraint(rows, Layout((0, 1)))
    size = min(TILE_ROWS, rows.shape[0])
    used = group_sizes.sum(dtype=jnp.int32)
    start = jnp.minimum(used, rows.shape[0] - size)
    tile = jax.lax.dynamic_slice_in_dim(rows, start, size, 0)
    tile = jnp.where((start + iota(size) < used)[:, None], tile, 0)
    return with_layout_constraint(jax.lax.dynamic_update_slice_in_dim(rows, tile, start, 0), Layout((0, 1)))


def _clear_all(rows: Rows, group_sizes: GroupSizes) -> Rows:
    return jnp.where((iota(rows.shape[0]) < group_sizes.sum(dtype=jnp.int32))[:, None], rows, 0)


def _clear_rest(rows: Rows, group_sizes: GroupSizes) -> Rows:
    # All rows beyond the last group, but block by block from there on: a mask over all rows would read and write those
    # once more that are served.
    if not rows.size:
        return rows
    used = group_sizes.sum(dtype=jnp.int32)
    size = min(CLEARED_ROWS, rows.shape[0])

    def clear_block(i: Array, rows: Array) -> Array:
        # The last block begins earlier where rows are no multiple of blocks.
        start = jnp.minimum(i * size, rows.shape[0] - size)
        block = jax.lax.dynamic_slice_in_dim(rows, start, size, 0)
        block = jnp.where((start + iota(size) < used)[:, None], block, 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, block, start, 0)

    return jax.lax.fori_loop(used // size, -(-rows.shape[0] // size), clear_block, rows)


def _clear_empty(sums: Float[Array, "S I O"], group_sizes: GroupSizes) -> Float[Array, "S I O"]:
    # Nothing is promised of a group without rows. Few have none, so they are cleared one by one: a mask over all would
    # read and write all of them.
    if not group_sizes.size:
        return sums
    is_empty = (group_sizes == 0).astype(jnp.int32)
    so_far = jax.lax.cumsum(is_empty)

    def clear_one(i: Array, sums: Array) -> Array:
        group = (so_far <= i).sum(dtype=jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(sums, jnp.zeros_like(sums[0]), group, 0)

    return jax.lax.fori_loop(0, so_far[-1], clear_one, sums)


def _fits(rows: Array, others: Array) -> bool:
    widths = (rows.shape[1], *others.shape[1:])
    return (
        has_tokamax()
        and rows.dtype == others.dtype == jnp.bfloat16
        and rows.shape[0] % TILE_ROWS == 0
        and rows.size > 0
        and all(width % TILE_COLUMNS == 0 for width in widths)
    )


def _ragged(rows: Array, others: Array, group_sizes: GroupSizes, dimensions: _Dimensions, dtype: Any) -> Array:
    # Of its own it cannot be mapped where only some operands are.
    @jax.custom_batching.sequential_vmap
    def product(rows: Array, others: Array, group_sizes: GroupSizes) -> Array:
        return jax.lax.ragged_dot_general(rows, others, group_sizes, dimensions, preferred_element_type=dtype)

    return product(rows, others, group_sizes)


def _tokamax(rows: Array, others: Array, group_sizes: GroupSizes, dimensions: _Dimensions, dtype: Any) -> Array | None:
    # The package is optional, so only who multiplies with it imports it.
    import tokamax

    def product(rows: Array, others: Array, group_sizes: Array) -> Array:
        return tokamax.ragged_dot_general(
            rows,
            others,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=dimensions,
            preferred_element_type=dtype,
            implementation="mosaic_gpu",
        )

    try:
        return unvarying_call(product, *vary_alike((rows, others, group_sizes)))
    except NotImplementedError:
        # It knows no such kernel for the default device, which on a machine without a GPU is a CPU.
        return None
