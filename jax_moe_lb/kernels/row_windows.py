"""Windows of the rows of all groups, to store the hidden activations of one window at a time.

CPUs compute in windows: a product of a few hundred rows is as fast per row as one of all rows, and the operands stay in
the cache. Kernels on accelerators process all rows at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import Carry, GroupSizes, iota
from jax_moe_lb.kernels.blocks import RowBlock, each_block

WINDOW_ROWS = 512
"""Smallest window; a product reads the weights once per window."""

MAX_WINDOWS = 16
"""Largest number of windows: arrays up to twice as wide as the rows take at most an eighth of their memory."""


def num_windows(num_rows: int) -> int:
    """Return the number of windows."""
    return max(1, min(num_rows // WINDOW_ROWS, MAX_WINDOWS))


class RowWindow(NamedTuple):
    """Rows read and written by one step."""

    start: Int[Array, ""]  # first row
    inside: Bool[Array, "B"]  # `[B]` mask of its own rows; others belong to the previous window, or to no group
    group_sizes: GroupSizes  # rows of each group, from `start` on
    group: Int[Array, ""] | None = None  # group of all its rows; `None` (default) if they can belong to several groups

    def take(self, rows: Array) -> Array:
        """Read the rows; 0 for rows of others, which may be uninitialized."""
        part = jax.lax.dynamic_slice_in_dim(rows, self.start, self.inside.shape[0], 0)
        return jnp.where(self.inside[:, None], part, 0)

    def put(self, part: Array, rows: Array) -> Array:
        """Write the rows in place."""
        before = jax.lax.dynamic_slice_in_dim(rows, self.start, self.inside.shape[0], 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, jnp.where(self.inside[:, None], part, before), self.start, 0)

    def of_groups(self, tree: PyTree) -> PyTree:
        """Read the entries of its groups from arrays `[S, ...]`."""
        group = self.group
        if group is None:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, group, 1, 0), tree)

    def put_of_groups(self, part: PyTree, tree: PyTree) -> PyTree:
        """Write the entries of its groups in place."""
        group = self.group
        if group is None:
            return part
        return jax.tree.map(lambda new, leaf: jax.lax.dynamic_update_slice_in_dim(leaf, new, group, 0), part, tree)


def each_window(
    step: Callable[[RowWindow, Carry], Carry],
    carry: Carry,
    num_rows: int,
    group_sizes: GroupSizes,
    *,
    of_one_group: bool,
) -> Carry:
    """Run a step for each window of the rows of all groups; each row is in exactly one window."""
    if of_one_group:

        def of_block(block: RowBlock, carry: Carry) -> Carry:
            sizes = vary_like(jnp.full(1, block.inside.shape[0], jnp.int32), block.group)
            return step(RowWindow(block.start, block.inside, sizes, block.group), carry)

        return each_block(of_block, carry, num_rows, group_sizes)
    size = -(-num_rows // num_windows(num_rows))
    ends = group_sizes.cumsum(dtype=jnp.int32)
    used = group_sizes.sum(dtype=jnp.int32)

    def one(i: Array, carry: Carry) -> Carry:
        first = i * size
        # Move the last window back to stay inside the array; it then overlaps the previous window.
        start = jnp.minimum(first, num_rows - size)
        row = start + iota(size)
        upto = jnp.clip(ends - start, 0, size)
        sizes = jnp.diff(upto, prepend=0)
        return step(RowWindow(start, (row >= first) & (row < used), sizes), carry)

    # The loop ends at the last used row; a dynamic length is free on CPUs.
    return jax.lax.fori_loop(0, (used + size - 1) // max(size, 1), one, vary_like(carry, group_sizes))
