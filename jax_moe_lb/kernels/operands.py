"""Operands of grouped products: groups of rows, rows of a backward pass, and zeros beyond the last group."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float

from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import GroupSizes, ReceivedRows, Rows, iota

TILE_ROWS = 128
"""Row multiple up to which kernels on GPUs read beyond the last group."""

CLEARED_ROWS = 1024
"""Rows per loop step that clears rows beyond the last group on TPUs."""


class RowGroups(NamedTuple):
    """Consecutive groups of rows, one per matrix or sum."""

    sizes: GroupSizes  # number of rows of each group
    # Whether the sums of a group are read. If not, sums of a group without rows may stay uninitialized; otherwise they
    # are 0. `None` (default): all are read.
    is_read: Bool[Array, "S"] | None = None

    @property
    def has_sums(self) -> Bool[Array, "S"]:
        """Whether a kernel writes the sums of a group."""
        return jnp.ones_like(self.sizes, bool) if self.is_read is None else (self.sizes > 0) | self.is_read


class BackwardRows(NamedTuple):
    """Rows of a backward pass, in the order of groups."""

    rows: ReceivedRows  # inputs of the experts
    weights: Float[Array, "A 1"]  # factors of the outputs
    # Gradients of the weighted outputs. As an exchange wrote them, products that do not read them run beside it
    upstream: ReceivedRows
    # Products before the activation, saved by the forward pass; `None` (default) to compute them
    products: tuple[Float[Array, "A _"], ...] | None = None

    @property
    def in_rows(self) -> "BackwardRows":
        """The same, with both as matrices."""
        return self._replace(rows=in_rows(self.rows), upstream=in_rows(self.upstream))


def in_rows(received: ReceivedRows) -> Rows:
    """Return received rows as a matrix."""
    return received.reshape(received.shape[0], -1)


def clear_tail(
    rows: Rows, group_sizes: GroupSizes, *, are_results: bool = False, on: Collection[str] = ("cuda", "tpu")
) -> Rows:
    """Set the rows beyond the last group to 0 on platforms whose `grouped_outer` reads them, as far as it does."""
    # Kernels mask these rows by a product with 0, which propagates the NaN of uninitialized rows.
    clear = {"cuda": _clear_tile, "tpu": _clear_all if are_results else _clear_rest}
    return jax.lax.platform_dependent(
        *vary_alike((rows, group_sizes)),
        **{platform: clear[platform] for platform in on},
        default=lambda rows, group_sizes: rows,
    )


def _clear_tile(rows: Rows, group_sizes: GroupSizes) -> Rows:
    # Clear a single tile: a mask would read and write all rows once more.
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
    # Clear block by block from the last group on: a mask would also read and write the rows of groups.
    if not rows.size:
        return rows
    used = group_sizes.sum(dtype=jnp.int32)
    size = min(CLEARED_ROWS, rows.shape[0])

    def clear_block(i: Array, rows: Array) -> Array:
        # The last block starts earlier if the number of rows is no multiple of the block size.
        start = jnp.minimum(i * size, rows.shape[0] - size)
        block = jax.lax.dynamic_slice_in_dim(rows, start, size, 0)
        block = jnp.where((start + iota(size) < used)[:, None], block, 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, block, start, 0)

    return jax.lax.fori_loop(used // size, -(-rows.shape[0] // size), clear_block, rows)
