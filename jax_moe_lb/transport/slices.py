"""Lists of an exchange of token copies: one slice for every slot of a rank, or one slice per rank.

Both forms return rows sorted by slot, then by source, and write outputs back in the sending order.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.ragged_all_to_all import Group, Slices, empty_buffer, ragged_all_to_all, starts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import GroupSizes, Rows, pytree
from jax_moe_lb.transport.exchange import Copies, by_slot, landings

PerSlot = Int[Array, "R S"]
PerRank = Int[Array, "R"]


@pytree
class SlotSlices:
    """Lists with one slice for every slot of a rank: rows land sorted by slot."""

    # A receiver's stream is sorted by slot, then by source.

    sent: PerSlot  # copies of this rank for each slot of each rank
    first_sent: PerSlot  # start of those copies in the sending order
    first_landed: PerSlot  # start of those copies in the receiver's stream
    arriving: PerSlot  # copies from each rank for each slot of this rank
    first_in_stream: PerSlot  # start of those copies in this rank's stream
    first_at_source: PerSlot  # start of those copies in the sending order of their source

    @classmethod
    def of(cls, sent: PerSlot, arriving: PerSlot, topology: Topology) -> "SlotSlices":
        """Exchange the starts of all slices."""
        first_sent = starts(sent.reshape(-1)).reshape(sent.shape)
        first_in_stream = starts(arriving.T.reshape(-1)).reshape(arriving.T.shape).T
        # A rank computes its own part of the split alone, without an array of shape `[E, R, R]`, so the starts on other
        # ranks are exchanged.
        received = _exchange_starts(jnp.stack([first_in_stream, first_sent], 1), topology)
        return cls(sent, first_sent, received[:, 0], arriving, first_in_stream, received[:, 1])

    def send(self, copies: Copies, i: Int[Array, ""], capacity: int, topology: Topology) -> tuple[Rows, GroupSizes]:
        """Send round `i`; see `Exchange.send`."""
        first, going, coming = self._parts(i, capacity)
        out = empty_buffer(copies, capacity)
        there = Slices(
            first=(self.first_sent + going.start).reshape(-1),
            sent=going.size.reshape(-1),
            lands=(self.first_landed + going.start - first).reshape(-1),
            arriving=coming.size.reshape(-1),
        )
        rows = _exchange(copies, out, there, topology, "dispatch")
        return rows, coming.size.sum(0, dtype=jnp.int32)

    def send_back(self, rows: Rows, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """Write the outputs of round `i` into `out`; see `Exchange.send_back`."""
        first, going, coming = self._parts(i, rows.shape[0])
        back = Slices(
            first=(self.first_in_stream + coming.start - first).reshape(-1),
            sent=coming.size.reshape(-1),
            # Copies of earlier rounds precede those of this round in the sending order of their source.
            lands=(self.first_at_source + coming.start).reshape(-1),
            arriving=going.size.reshape(-1),
        )
        return _exchange(rows, out, back, topology, "combine")

    def _parts(self, i: Int[Array, ""], capacity: int) -> tuple[Int[Array, ""], "_Part", "_Part"]:
        """Return the first row of round `i` in a stream, and the parts of the sent and received slices."""
        first, last = i * capacity, (i + 1) * capacity
        going = _inside(self.first_landed, self.sent, first, last)
        return first, going, _inside(self.first_in_stream, self.arriving, first, last)


@pytree
class RankSlices:
    """Lists with one slice per rank: rows land sorted by source, and a gather sorts them by slot."""

    # Take it if each update has a cost of its own. NCCL launches a send and a receive for every update, also for an
    # empty one, about 12 us each (openxla/xla#46982). Its device kernel is fastest with one update per peer
    # (openxla/xla#47868).
    # A receiver's stream is sorted by source, then by slot, so the slice of a rank is contiguous in every round.

    sent: PerRank  # copies of this rank for each rank
    first_sent: PerRank  # start of those copies in the sending order
    first_landed: PerRank  # start of those copies in the receiver's stream
    arriving: PerSlot  # copies from each rank for each slot of this rank
    first_at_source: PerRank  # start of the copies from each rank in its sending order

    @classmethod
    def of(cls, sent: PerSlot, arriving: PerSlot, topology: Topology) -> "RankSlices":
        """Exchange the starts of all slices; see `SlotSlices.of`."""
        to_rank, from_rank = (sizes.sum(1, dtype=jnp.int32) for sizes in (sent, arriving))
        received = _exchange_starts(jnp.stack([starts(from_rank), starts(to_rank)], 1), topology)
        return cls(to_rank, starts(to_rank), received[:, 0], arriving, received[:, 1])

    def send(self, copies: Copies, i: Int[Array, ""], capacity: int, topology: Topology) -> tuple[Rows, GroupSizes]:
        """Send round `i`; see `Exchange.send`."""
        first, last = i * capacity, (i + 1) * capacity
        going = _inside(self.first_landed, self.sent, first, last)
        coming = landings(self.arriving, i, capacity)
        out = empty_buffer(copies, capacity)
        there = Slices(
            first=self.first_sent + going.start,
            sent=going.size,
            lands=self.first_landed + going.start - first,
            arriving=coming.sum(1, dtype=jnp.int32),
        )
        rows = _exchange(copies, out, there, topology, "dispatch")
        return rows[by_slot(coming, capacity)], coming.sum(0, dtype=jnp.int32)

    def send_back(self, rows: Rows, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """Write the outputs of round `i` into `out`; see `Exchange.send_back`."""
        capacity = rows.shape[0]
        first, last = i * capacity, (i + 1) * capacity
        going = _inside(self.first_landed, self.sent, first, last)
        coming = landings(self.arriving, i, capacity)
        from_rank = self.arriving.sum(1, dtype=jnp.int32)
        part = _inside(starts(from_rank), from_rank, first, last)
        # Transposed, `by_slot` sorts rows by source, then by slot.
        rows = rows[by_slot(coming.T, capacity)]
        back = Slices(starts(part.size), part.size, self.first_at_source + part.start, going.size)
        return _exchange(rows, out, back, topology, "combine")

    def order_in_one_chunk(self, i: Int[Array, ""], chunks: int, capacity: int) -> Int[Array, "A"]:
        """Return the index in consecutive chunks of each row that round `i` has in one chunk."""
        # Each chunk is sorted by slot alone. First sort its rows by source again, as they landed.
        parts = [landings(self.arriving, i * chunks + chunk, capacity) for chunk in range(chunks)]
        landed = [chunk * capacity + by_slot(part.T, capacity) for chunk, part in enumerate(parts)]
        return jnp.concatenate(landed)[by_slot(landings(self.arriving, i, chunks * capacity), chunks * capacity)]


def _exchange(rows: Array, out: Array, slices: Slices, topology: Topology, site: str) -> Array:
    return ragged_all_to_all(rows, out, slices, Group.of(topology), disjoint=True, site=site)


def _exchange_starts(first: Int[Array, "R *X"], topology: Topology) -> Int[Array, "R *X"]:
    return jax.lax.all_to_all(first, topology.expert_axes, 0, 0, tiled=True)


@dataclass(frozen=True)
class _Part:
    """Copies per slice that travel in one round."""

    start: Int[Array, "*N"]
    size: Int[Array, "*N"]


def _inside(first_in_stream: Array, size: Array, first: Int[Array, ""], last: Int[Array, ""]) -> _Part:
    # The round's window on the receiver's stream, relative to each slice. Clipping makes a slice outside it empty, so
    # every round has the same shapes.
    start = jnp.clip(first - first_in_stream, 0, size)
    return _Part(start, jnp.clip(last - first_in_stream, 0, size) - start)
