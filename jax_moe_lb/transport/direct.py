"""`Direct`: token copies travel straight to the ranks that serve them, and the outputs back.

The sender sorts its copies by destination rank and slot. Round `i` takes `A` rows of each receiver's stream, so a
receive buffer of `A` rows fits any load.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.exchange_paths import exchange_path
from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, GroupSizes, Rows, pytree
from jax_moe_lb.transport.dispatch import CopyDispatch, check_rails
from jax_moe_lb.transport.exchange import Copies, Receipt, arriving_rows, inverse_order, sending_order, sent_to_slots
from jax_moe_lb.transport.slices import RankSlices, SlotSlices


@pytree
class DirectReceipt(Receipt):
    """Destinations of the copies of a rank, as returned by `Direct.address`."""

    slices: SlotSlices | RankSlices  # lists of the exchange


@dataclass(frozen=True)
@checked_fields
class Direct(CopyDispatch[DirectReceipt]):
    """Dispatch of token copies straight to the ranks that serve them; the default.

    Take `MultiRailDispatch` if nodes have several network interfaces, and `TwoPhase` if tokens travel before the plan
    is known. Rows travel as one slice per slot or one slice per rank; see `exchange_path`.

    Examples:
        >>> from jax_moe_lb import Buffers
        >>> Direct(Buffers(headroom=1.05)).cost().buffer_rows(4096 * 8)  # for 4096 tokens of 8 experts each
        34432
    """

    takes_chunks: ClassVar[bool] = True
    takes_saved: ClassVar[bool] = True

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> DirectReceipt:
        """Return the destination of every copy of this rank; see `Dispatch`.

        Raises:
            ValueError: `plan.rails` is set.
        """
        check_rails(plan, self)
        axes, num_copies = topology.expert_axes, experts.size
        me = jax.lax.axis_index(axes)
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order = sending_order(experts.reshape(-1), going, plan)
        sent, arriving = sent_to_slots(going, plan), arriving_rows(counts, plan, me)
        capacity = self.buffers.rows(num_copies)
        slices = RankSlices if self.sends_one_slice_per_rank(topology) else SlotSlices
        return DirectReceipt(
            order=order,
            place=inverse_order(order),
            num_going=sent.sum(dtype=jnp.int32),
            # Rounds of the rank with the highest load: all ranks must take part in every exchange.
            rounds=agreed((load(plan).max() + capacity - 1) // capacity, axes),
            follows_plan=None,
            slices=slices.of(sent, arriving, topology),
        )

    def sends_one_slice_per_rank(self, topology: Topology) -> bool:
        """Return whether rows for a rank travel as one slice; otherwise one slice per slot."""
        return exchange_path(topology).costs_per_update

    def send(
        self, copies: Copies, receipt: DirectReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Send round `i`: return the rows that this rank serves, sorted by slot, and the rows per slot.

        See `Exchange.send`.
        """
        return receipt.slices.send(copies, i, self.buffers.chunk_rows(copies.shape[0]), topology)

    def order_in_one_chunk(self, receipt: DirectReceipt, i: Int[Array, ""]) -> Int[Array, "A"] | None:
        """Return the index in the chunks of round `i` of each row of one chunk; `None` for the same order."""
        # Consecutive chunks that are sorted by slot, and then by source, have the order of one chunk.
        if isinstance(receipt.slices, SlotSlices):
            return None
        rows = self.buffers.chunk_rows(receipt.order.size)
        return receipt.slices.order_in_one_chunk(i, self.buffers.chunks, rows)

    def send_back(
        self, rows: Rows, receipt: DirectReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """Write the outputs of round `i` into `out`, in the sending order: the transpose of `send`."""
        return receipt.slices.send_back(rows, i, out, topology)
