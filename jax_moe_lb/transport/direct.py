"""`Direct` moves token copies straight to the ranks that serve them, and their outputs back.

The sender sorts its copies by destination rank and slot. A receiver's stream is the
copies of rank 0, then of rank 1, and so on; round `i` takes `A` rows of it, so that
no rank ever holds more, whatever the load.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.ops.one_way import agreed
from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all
from jax_moe_lb.plan import Plan, load
from jax_moe_lb.split import nearest_first
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import Copies, Receipt
from jax_moe_lb.transport.packing import arriving_rows, by_slot, landings, sending_order, starts
from jax_moe_lb.types import Counts, GroupSizes, Rows, iota

PerRank = Int[Array, "R"]


@pytree
class DirectReceipt(Receipt):
    """Says which copies go where. `Direct.address` returns it; `send`, `send_back` and `combine` read it.

    Args:
        sent: `[R]` int32, how many copies this rank sends to each rank.
        first_sent: `[R]` int32, where those copies start in the sending order.
        first_landed: `[R]` int32, where those copies start in the stream of the rank that receives them.
        arriving: `[R, S]` int32, how many copies come from each rank for each of this rank's slots.
        first_at_source: `[R]` int32, where the copies for this rank start in the sending order of each rank.
    """

    sent: PerRank
    first_sent: PerRank
    first_landed: PerRank
    arriving: Int[Array, "R S"]
    first_at_source: PerRank


@dataclass(frozen=True)
class Direct(Dispatch[DirectReceipt]):
    """Sends token copies straight to the rank that serves them.

    It is the default. Take `Spray` where nodes have several network interfaces, and `Staged` where tokens shall not
    wait for the plan.

    Examples:
        >>> Direct(headroom=1.05).capacity(4096 * 8)  # rows of the receive buffer, for 4096 tokens of 8 experts each
        34407
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
        arriving = arriving_rows(counts, plan, me)
        sent = going.sum(0, dtype=jnp.int32)
        first_sent, first_in_stream = starts(sent), starts(arriving.sum(1, dtype=jnp.int32))
        # Each rank tells the others where their rows are in its stream and in its sending order. A rank computes its
        # own part of the split alone, since nothing of shape `[E, R, R]` shall exist, so it cannot know these.
        told = jax.lax.all_to_all(jnp.stack([first_in_stream, first_sent], 1), axes, 0, 0, tiled=True)
        capacity = self.capacity(num_copies)
        return DirectReceipt(
            order=order,
            # A permutation is inverted by one scatter of unique indices, which is cheaper than sorting it again.
            place=jnp.zeros_like(order).at[order].set(iota(num_copies)),
            sent=sent,
            first_sent=first_sent,
            first_landed=told[:, 0],
            arriving=arriving,
            first_at_source=told[:, 1],
            # Of the highest load of any rank, so that all ranks take as many and every exchange finds its partners.
            rounds=agreed((load(plan).max() + capacity - 1) // capacity, axes),
        )

    def send(
        self, copies: Copies, receipt: DirectReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Makes round `i`: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group are 0. See `Exchange.send`.
        """
        capacity = self.capacity(copies.shape[0])
        going, coming = _departures(receipt, i, capacity), landings(receipt.arriving, i, capacity)
        rows = ragged_all_to_all(
            copies,
            # Zeros and not memory that nobody wrote, because rows beyond the last group are promised to be 0.
            jnp.zeros_like(copies, shape=(capacity, copies.shape[1])),
            input_offsets=receipt.first_sent + going.start,
            send_sizes=going.size,
            output_offsets=receipt.first_landed + going.start - i * capacity,
            recv_sizes=coming.sum(1, dtype=jnp.int32),
            axis_name=topology.expert_axes,
            site="dispatch",
        )
        # Rows arrive by source, each source's sorted by slot; products want them by slot.
        return rows[by_slot(coming, capacity)], coming.sum(0, dtype=jnp.int32)

    def send_back(
        self, rows: Rows, receipt: DirectReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """Writes the outputs of round `i` into `out`, in the sending order: the transpose of `send`."""
        capacity = rows.shape[0]
        going, coming = _departures(receipt, i, capacity), landings(receipt.arriving, i, capacity)
        by_source = jnp.zeros_like(rows).at[by_slot(coming, capacity)].set(rows)
        per_source = coming.sum(1, dtype=jnp.int32)
        first_in_stream = starts(receipt.arriving.sum(1, dtype=jnp.int32))
        # What earlier rounds brought of a source's copies has been sent back by them.
        skipped = jnp.maximum(i * capacity - first_in_stream, 0)
        return ragged_all_to_all(
            by_source,
            out,
            input_offsets=starts(per_source),
            send_sizes=per_source,
            output_offsets=receipt.first_at_source + skipped,
            recv_sizes=going.size,
            axis_name=topology.expert_axes,
            site="combine",
        )


@dataclass(frozen=True)
class _Slice:
    """Says which of the copies for each rank travel in one round."""

    start: PerRank
    size: PerRank


def _departures(receipt: DirectReceipt, i: Int[Array, ""], capacity: int) -> _Slice:
    # The round's window on the receiver's stream, seen from this rank's part of it. Clipped, it is empty where the two
    # do not meet, so every round can be computed in the same shapes.
    start = jnp.clip(i * capacity - receipt.first_landed, 0, receipt.sent)
    end = jnp.clip((i + 1) * capacity - receipt.first_landed, 0, receipt.sent)
    return _Slice(start, end - start)
