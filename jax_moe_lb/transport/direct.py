"""`Direct`: token copies straight to their serving ranks, and outputs straight back.

The sender sorts its copies by destination rank and slot. The stream of a receiver contains the copies for its slot 0,
then for slot 1, and so on, each by source. Round `i` takes `A` rows of the stream, which bounds the memory of every
rank at any load. One slice travels for each slot of each rank, so rows arrive in the order of the experts' products and
need no sort.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.collectives.ragged_all_to_all import empty_buffer, ragged_all_to_all, starts
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, GroupSizes, Rows, pytree
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Copies, Receipt, arriving_rows, inverse_order, sending_order, sent_to_slots

PerSlot = Int[Array, "R S"]


@pytree
class DirectReceipt(Receipt):
    """Offsets of the slices of a rank, made by `Direct.address` and read by `send`, `send_back` and `combine`.

    Args:
        sent: `[R, S]` int32, number of copies from this rank to each slot of each rank.
        first_sent: `[R, S]` int32, offset of these copies in the sending order.
        first_landed: `[R, S]` int32, offset of these copies in the stream of the receiving rank.
        arriving: `[R, S]` int32, number of copies from each rank to each slot of this rank.
        first_in_stream: `[R, S]` int32, offset of these copies in the stream of this rank.
        first_at_source: `[R, S]` int32, offset of these copies in the sending order of each rank.
    """

    sent: PerSlot
    first_sent: PerSlot
    first_landed: PerSlot
    arriving: PerSlot
    first_in_stream: PerSlot
    first_at_source: PerSlot


@dataclass(frozen=True)
class Direct(Dispatch[DirectReceipt]):
    """Dispatch with one exchange per round: copies go straight to their serving ranks.

    It is the default. Use `MultiRailDispatch` for nodes with several network interfaces, and `TwoPhase` to overlap the
    plan with computation.

    Examples:
        >>> from jax_moe_lb import Buffers
        >>> Direct(Buffers(headroom=1.05)).cost().buffer_rows(4096 * 8)  # for 4096 tokens of 8 experts each
        34432
    """

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> DirectReceipt:
        """Compute the offsets of the copies of this rank; see `Exchange.address`.

        Raises:
            ValueError: `plan.rails` is set.
        """
        if plan.rails is not None:
            raise ValueError("plan.rails is set; expected None, as Direct does not spray")
        axes, num_copies = topology.expert_axes, experts.size
        me = jax.lax.axis_index(axes)
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order = sending_order(experts.reshape(-1), going, plan)
        sent, arriving = sent_to_slots(going, plan), arriving_rows(counts, plan, me)
        first_sent = starts(sent.reshape(-1)).reshape(sent.shape)
        first_in_stream = starts(arriving.T.reshape(-1)).reshape(arriving.T.shape).T
        # Exchange the offsets: a rank computes only its own part of the split, because a full `[E, R, R]` split would
        # be too large. So it cannot derive the offsets in the streams and sending orders of the others.
        told = jax.lax.all_to_all(jnp.stack([first_in_stream, first_sent], 1), axes, 0, 0, tiled=True)
        capacity = self.buffers.rows(num_copies)
        return DirectReceipt(
            order=order,
            place=inverse_order(order),
            num_going=sent.sum(dtype=jnp.int32),
            sent=sent,
            first_sent=first_sent,
            first_landed=told[:, 0],
            arriving=arriving,
            first_in_stream=first_in_stream,
            first_at_source=told[:, 1],
            # Use the highest load of all ranks: equal numbers of rounds keep the exchanges of all ranks paired.
            rounds=agreed((load(plan).max() + capacity - 1) // capacity, axes),
            follows_plan=None,
        )

    def send(
        self, copies: Copies, receipt: DirectReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Send the copies of round `i`; see `Exchange.send`.

        Returns:
            Rows `[A, H]` of this rank, sorted by slot, and rows per slot `[S]` int32.
        """
        capacity = self.buffers.rows(copies.shape[0])
        first, last = i * capacity, (i + 1) * capacity
        going, coming = _departures(receipt, first, last), _landings(receipt, first, last)
        rows = ragged_all_to_all(
            copies,
            empty_buffer(copies, capacity),
            input_offsets=(receipt.first_sent + going.start).reshape(-1),
            send_sizes=going.size.reshape(-1),
            output_offsets=(receipt.first_landed + going.start - first).reshape(-1),
            recv_sizes=coming.size.reshape(-1),
            axis_name=topology.expert_axes,
            disjoint=True,
            site="dispatch",
        )
        return rows, coming.size.sum(0, dtype=jnp.int32)

    def send_back(
        self, rows: Rows, receipt: DirectReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """Write the outputs of round `i` into `out`, in the sending order; the transpose of `send`."""
        capacity = rows.shape[0]
        first, last = i * capacity, (i + 1) * capacity
        going, coming = _departures(receipt, first, last), _landings(receipt, first, last)
        return ragged_all_to_all(
            rows,
            out,
            input_offsets=(receipt.first_in_stream + coming.start - first).reshape(-1),
            send_sizes=coming.size.reshape(-1),
            # Earlier rounds have already returned the first `coming.start` copies of each source.
            output_offsets=(receipt.first_at_source + coming.start).reshape(-1),
            recv_sizes=going.size.reshape(-1),
            axis_name=topology.expert_axes,
            disjoint=True,
            site="combine",
        )


@dataclass(frozen=True)
class _Slices:
    """Copies from or to each slot in one round, as an offset and a size in their slice."""

    start: PerSlot
    size: PerSlot


def _departures(receipt: DirectReceipt, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    return _inside(receipt.first_landed, receipt.sent, first, last)


def _landings(receipt: DirectReceipt, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    return _inside(receipt.first_in_stream, receipt.arriving, first, last)


def _inside(first_in_stream: PerSlot, size: PerSlot, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    # Clip the window of the round to each slice of the receiver's stream. An empty intersection gives size 0, so all
    # rounds have the same shapes.
    start = jnp.clip(first - first_in_stream, 0, size)
    return _Slices(start, jnp.clip(last - first_in_stream, 0, size) - start)
