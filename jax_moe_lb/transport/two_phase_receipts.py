"""Copies are addressed home without a plan, and blocks of them onwards when there is one.

FEPLB's Two-Phase Dispatch (arXiv 2604.19654, section 3.3). In a rank's stream the rows of static experts stand in
front, so that their wave is products of the first rows, while it is open which of the others stay.
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
"""Whether each expert may leave its home; false for static experts, which only their homes serve."""


@pytree
class Streams:
    """Says where the rows of experts stand in their home's stream.

    Args:
        first: `[E]` int32, the first row of each expert; `[L]` for one rank's.
        size: `[E]` int32, its rows.
    """

    first: Int[Array, "X"]
    size: Int[Array, "X"]

    def of_rank(self, me: Int[Array, ""], num_ranks: int) -> "Streams":
        """Returns those of the home experts of one rank."""
        return Streams(*(array.reshape(num_ranks, -1)[me] for array in (self.first, self.size)))


@pytree
class Phases:
    """Holds who sent what where.

    Args:
        receipt: the exchange of plain expert parallelism, whose streams have static experts in front.
        streams: where the rows of each expert are then.
        moved: which of them move on.
    """

    receipt: DirectReceipt
    streams: Streams
    moved: MovedRows

    @property
    def staying(self) -> Streams:
        """The rows of each expert that stay at home: the last ones."""
        taken = self.moved.taken.sum(1, dtype=jnp.int32)
        return Streams(self.streams.first + taken, self.streams.size - taken)


class Blocks(NamedTuple):
    """Says how rows of some blocks come to stand one after the other, as products want them.

    Args:
        of_row: `[A]` int32, the row that each one comes from.
        to_row: `[A]` int32, where each row went; only what `inside` names counts.
        inside: `[A]`, which rows belong to a block.
        sizes: `[L]` int32, the rows of each block.
    """

    of_row: Int[Array, "A"]
    to_row: Int[Array, "A"]
    inside: Bool[Array, "A"]
    sizes: GroupSizes

    @classmethod
    def of(cls, first: Int[Array, "L"], size: Int[Array, "L"], num_rows: int) -> "Blocks":
        """Finds the rows of blocks.

        Args:
            first: `[L]` int32, where each block starts.
            size: `[L]` int32, its rows.
            num_rows: `A`.
        """
        of_row, row = concatenated(first, size, num_rows), iota(num_rows)
        # Beyond the blocks is a number that no row has, and is dropped.
        target = jnp.where(row < size.sum(dtype=jnp.int32), of_row, num_rows)
        to_row = jnp.full_like(row, -1).at[target].set(row, mode="drop")
        return cls(of_row, jnp.maximum(to_row, 0), to_row >= 0, size)

    def take(self, rows: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Puts the rows of the blocks one after the other; the others hold anything."""
        return rows[self.of_row]

    def put(self, rows: Float[Array, "A H"], out: Float[Array, "A H"]) -> Float[Array, "A H"]:
        """Writes rows that `take` has moved back to their places in `out`."""
        return jnp.where(self.inside[:, None], rows[self.to_row], out)


def address_home(
    direct: Direct, experts: Int[Array, "T K"], counts: Counts, dynamic: Dynamic, topology: Topology
) -> tuple[DirectReceipt, Streams]:
    """Decides for every copy of this rank how it comes home, which needs no plan.

    Args:
        direct: the exchange by which copies travel.
        experts: `[T, K]` int32, the expert of each copy, `NO_EXPERT` for one that goes nowhere.
        counts: `[R, E]` int32, the copies that each rank routes to each expert.
        dynamic: `[E]`, which experts may move; equal on all ranks.
        topology: its expert axes are the ranks that copies travel between.

    Returns:
        The receipt, and where rows then stand.
    """
    plan = plain_plan(counts, topology)
    moving, size = (array.reshape(topology.num_ranks, -1) for array in (dynamic, counts.sum(0, dtype=jnp.int32)))
    # Stable: static experts keep their order, in front, and so do dynamic ones behind them. Both are then groups of
    # rows in the order of the weights, among which groups of the others have no rows.
    order = jnp.argsort(moving, axis=1, stable=True).astype(jnp.int32)
    in_order = plan.placement[:, :1] + order
    static, others = jnp.where(moving, 0, size), jnp.where(moving, size, 0)
    behind = static.sum(1, keepdims=True, dtype=jnp.int32) + _starts(others)
    first = jnp.where(moving, behind, _starts(static))
    receipt = direct.address(experts, counts, replace(plan, placement=in_order), topology)
    return receipt, Streams(first.reshape(-1), size.reshape(-1))


def window(i: Int[Array, ""], capacity: int) -> CopyWindow:
    """Returns the part of the streams that is at home in round `i`.

    Args:
        i: int32, the round.
        capacity: `A`.
    """
    return CopyWindow(i * capacity, (i + 1) * capacity)


def _starts(sizes: Int[Array, "R L"]) -> Int[Array, "R L"]:
    return sizes.cumsum(1, dtype=jnp.int32) - sizes
