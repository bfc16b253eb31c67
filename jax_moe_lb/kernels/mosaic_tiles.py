"""Tiles of rows of one group each, for persistent kernels, and their order.

The number of tiles follows from the group sizes on the device, so an empty group has no tile. Bulk copies start at
multiples of 8 rows. A tile therefore also contains rows of its neighbors, which it does not store.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.types import GroupSizes, iota

ALIGNMENT = 8
"""Rows and columns of bulk copies start at multiples of it."""

NEIGHBORS = 16
"""Row tiles that are multiplied with the same columns of matrices at about the same time, from the L2 cache."""


class RowTiles(NamedTuple):
    """Tiles of rows in global memory; entries beyond `total` are unused."""

    group: Int[Array, "P"]  # group of each tile
    first: Int[Array, "P"]  # first row, a multiple of 8
    begin: Int[Array, "P"]  # first row of the group in the tile, from `first` on
    end: Int[Array, "P"]  # end of these rows, from `first` on
    total: Int[Array, "1"]  # number of tiles


def row_tiles(group_sizes: GroupSizes, size: int, num_rows: int) -> RowTiles:
    """Return the tiles of all groups."""
    starts, aligned, tiles = _of_groups(group_sizes, size)
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    index = iota(-(-num_rows // size) + group_sizes.shape[0])
    group = jnp.minimum((last[None] <= index[:, None]).sum(1, dtype=jnp.int32), group_sizes.shape[0] - 1)
    start = aligned[group] + (index - last[group] + tiles[group]) * size
    # The last tile starts earlier if it would exceed the array.
    first = jnp.minimum(start, num_rows - size)
    begin = jnp.maximum(start, starts[group]) - first
    end = jnp.minimum(start + size, starts[group] + group_sizes[group]) - first
    return RowTiles(group, first, begin, jnp.maximum(end, begin), last[-1:])


def tile_of_rows(group_sizes: GroupSizes, tiles: RowTiles, size: int, num_rows: int) -> tuple[Array, Array]:
    """Return the tile that stores each row, and the row's place in it; any of them for rows of no group."""
    starts, aligned, count = _of_groups(group_sizes, size)
    row = iota(num_rows)
    ends = starts + group_sizes
    group = jnp.minimum((ends[None] <= row[:, None]).sum(1, dtype=jnp.int32), group_sizes.shape[0] - 1)
    before = jnp.cumsum(count, dtype=jnp.int32) - count
    tile = before[group] + jnp.maximum(row - aligned[group], 0) // size
    return tile, jnp.clip(row - tiles.first[tile], 0, size - 1)


def _of_groups(group_sizes: GroupSizes, size: int) -> tuple[Array, Array, Array]:
    """Return the first row per group, the first row of its first tile, and its number of tiles."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    aligned = starts // ALIGNMENT * ALIGNMENT
    return starts, aligned, jnp.where(group_sizes > 0, -(-(ends - aligned) // size), 0)


def place(index: Array, num_rows: Array, num_columns: int) -> tuple[Any, Any]:
    """Return the row tile and the column tile of a tile of the result."""
    band = jax.lax.div(index, NEIGHBORS * num_columns)
    inside = index - band * NEIGHBORS * num_columns
    # The last band has fewer row tiles.
    height = jnp.minimum(num_rows - band * NEIGHBORS, NEIGHBORS)
    return band * NEIGHBORS + jax.lax.rem(inside, height), jax.lax.div(inside, height)
