"""`Direct` moves token copies straight to the ranks that serve them, and their outputs back.

The sender sorts its copies by destination rank and slot. A receiver's stream is the
copies for its slot 0, then for slot 1, and so on, each by source; round `i` takes `A` rows of it, so that
no rank ever holds more, whatever the load. One slice travels for each slot of each rank, so that rows land
where the experts' products want them, and nobody has to sort them again.
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
    """Says which copies go where. `Direct.address` returns it; `send`, `send_back` and `combine` read it.

    Args:
        sent: `[R, S]` int32, how many copies this rank sends to each slot of each rank.
        first_sent: `[R, S]` int32, where those copies start in the sending order.
        first_landed: `[R, S]` int32, where those copies start in the stream of the rank that receives them.
        arriving: `[R, S]` int32, how many copies come from each rank for each of this rank's slots.
        first_in_stream: `[R, S]` int32, where those copies start in this rank's stream.
        first_at_source: `[R, S]` int32, where those copies start in the sending order of each rank.
    """

    sent: PerSlot
    first_sent: PerSlot
    first_landed: PerSlot
    arriving: PerSlot
    first_in_stream: PerSlot
    first_at_source: PerSlot


@dataclass(frozen=True)
class Direct(Dispatch[DirectReceipt]):
    """Sends token copies straight to the rank that serves them.

    It is the default. Take `MultiRailDispatch` where nodes have several network interfaces, and `TwoPhase` where tokens
    shall not wait for the plan.

    Examples:
        >>> from jax_moe_lb import Buffers
        >>> Direct(Buffers(headroom=1.05)).cost().buffer_rows(4096 * 8)  # for 4096 tokens of 8 experts each
        34432
    """

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> DirectReceipt:
        """Decides for every copy of this rank where it goes; see `Dispatch`.

        Raises:
            ValueError: the plan sprays over rails.
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
        # Each rank tells the others where their rows are in its stream and in its sending order. A rank computes its
        # own part of the split alone, since nothing of shape `[E, R, R]` shall exist, so it cannot know these.
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
            # Of the highest load of any rank, so that all ranks take as many and every exchange finds its partners.
            rounds=agreed((load(plan).max() + capacity - 1) // capacity, axes),
            follows_plan=None,
        )

    def send(
        self, copies: Copies, receipt: DirectReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Makes round `i`: the rows that this rank serves, sorted by slot, and the rows of each slot.

        See `Exchange.send`.
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
        """Writes the outputs of round `i` into `out`, in the sending order: the transpose of `send`."""
        capacity = rows.shape[0]
        first, last = i * capacity, (i + 1) * capacity
        going, coming = _departures(receipt, first, last), _landings(receipt, first, last)
        return ragged_all_to_all(
            rows,
            out,
            input_offsets=(receipt.first_in_stream + coming.start - first).reshape(-1),
            send_sizes=coming.size.reshape(-1),
            # What earlier rounds brought of a source's copies has been sent back by them.
            output_offsets=(receipt.first_at_source + coming.start).reshape(-1),
            recv_sizes=going.size.reshape(-1),
            axis_name=topology.expert_axes,
            disjoint=True,
            site="combine",
        )


@dataclass(frozen=True)
class _Slices:
    """Says which of the copies from or for each slot travel in one round."""

    start: PerSlot
    size: PerSlot


def _departures(receipt: DirectReceipt, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    return _inside(receipt.first_landed, receipt.sent, first, last)


def _landings(receipt: DirectReceipt, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    return _inside(receipt.first_in_stream, receipt.arriving, first, last)


def _inside(first_in_stream: PerSlot, size: PerSlot, first: Int[Array, ""], last: Int[Array, ""]) -> _Slices:
    # The round's window on the receiver's stream, seen from each part of it. Clipped, it is empty where the two do not
    # meet, so every round can be computed in the same shapes.
    start = jnp.clip(first - first_in_stream, 0, size)
    return _Slices(start, jnp.clip(last - first_in_stream, 0, size) - start)
