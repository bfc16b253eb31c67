"""Addresses of `TwoPhase`: copies to their homes without a plan, and blocks of rows onward with one.

FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3). In a rank's stream, rows of static experts come first. The
static wave then consists of products of the first rows, before the plan decides which other rows stay.
"""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.collectives.peer_copy_rows import CopyWindow, MovedRows
from jax_moe_lb.collectives.ragged_all_to_all import concatenated
from jax_moe_lb.core.plan import plain_plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, GroupSizes, iota, pytree
from jax_moe_lb.transport.direct import Direct, DirectReceipt

Dynamic = Bool[Array, "E"]
"""Whether the plan may move each expert; False for static experts, which only their homes serve."""


@pytree
class Streams:
    """Positions of the rows of each expert in the stream of its home."""

    first: Int[Array, "X"]  # first row of each expert; `[L]` for one rank
    size: Int[Array, "X"]  # number of rows of each expert; `[L]` for one rank

    def of_rank(self, me: Int[Array, ""], num_ranks: int) -> "Streams":
        """Return the rows of the home experts of rank `me`."""
        return Streams(*(array.reshape(num_ranks, -1)[me] for array in (self.first, self.size)))


@pytree
class Phases:
    """Addresses of both phases."""

    receipt: DirectReceipt  # receipt of phase 1, whose streams have static experts first
    streams: Streams  # positions of the rows of each expert after phase 1
    moved: MovedRows  # rows that move in phase 2

    @property
    def staying(self) -> Streams:
        """Rows of each expert that stay at home, the last ones of its block."""
        taken = self.moved.taken.sum(1, dtype=jnp.int32)
        return Streams(self.streams.first + taken, self.streams.size - taken)


class Blocks(NamedTuple):
    """Permutation that makes the rows of some blocks contiguous, as products require."""

    of_row: Int[Array, "A"]  # source row of each row
    to_row: Int[Array, "A"]  # position of each row after `take`; only valid if `inside`
    inside: Bool[Array, "A"]  # whether each row belongs to a block
    sizes: GroupSizes  # rows of each block

    @classmethod
    def of(cls, first: Int[Array, "L"], size: Int[Array, "L"], num_rows: int) -> "Blocks":
        """Return the permutation of some blocks."""
        of_row, row = concatenated(first, size, num_rows), iota(num_rows)
        # Rows beyond the blocks get an index out of range, which the scatter drops.
        target = jnp.where(row < size.sum(dtype=jnp.int32), of_row, num_rows)
        to_row = jnp.full_like(row, -1).at[target].set(row, mode="drop")
        return cls(of_row, jnp.maximum(to_row, 0), to_row >= 0, size)

    def take(self, rows: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Return the rows of the blocks contiguously; the rows after them are undefined."""
        return rows[self.of_row]

    def put(self, rows: Float[Array, "A H"], out: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Write rows moved by `take` back to their positions in `out`."""
        return jnp.where(self.inside[:, None], rows[self.to_row], out)


def address_home(
    direct: Direct, experts: Int[Array, "T K"], counts: Counts, dynamic: Dynamic, topology: Topology
) -> tuple[DirectReceipt, Streams]:
    """Compute the home destination of every copy of this rank, without a plan."""
    plan = plain_plan(counts, topology)
    moving, size = (array.reshape(topology.num_ranks, -1) for array in (dynamic, counts.sum(0, dtype=jnp.int32)))
    # Stable: static experts come first, then dynamic ones, each in the order of their weights. Both are then groups in
    # weight order, with empty groups for the experts of the other kind.
    order = jnp.argsort(moving, axis=1, stable=True).astype(jnp.int32)
    in_order = plan.placement[:, :1] + order
    static, others = jnp.where(moving, 0, size), jnp.where(moving, size, 0)
    behind = static.sum(1, keepdims=True, dtype=jnp.int32) + _starts(others)
    first = jnp.where(moving, behind, _starts(static))
    receipt = direct.address(experts, counts, replace(plan, placement=in_order), topology)
    return receipt, Streams(first.reshape(-1), size.reshape(-1))


def window(i: Int[Array, ""], capacity: int) -> CopyWindow:
    """Return the part of the streams at home in round `i`."""
    return CopyWindow(i * capacity, (i + 1) * capacity)


def _starts(sizes: Int[Array, "R L"]) -> Int[Array, "R L"]:
    return sizes.cumsum(1, dtype=jnp.int32) - sizes
