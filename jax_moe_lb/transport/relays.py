"""By which relays rows travel between domains, and where they stand on the way.

A row from rank `(d, a)` to rank `(f, m)` by the relays of offset `o` makes three hops: to `(d, o)`, to `(f, o)`, and
to `(f, m)`. All ranks know the plan, so all know what every relay holds, and in which order:

========================== ==========================================
the first relay receives    by sender `a`, then receiver `(f, m)`
it sends                    by domain `f`, then sender, then receiver
the second relay receives   by sender `(d, a)`, then receiver `m`
it sends                    by receiver, then sender
the receiver receives       from its own domain by sender; then by relay `o`, then sender
========================== ==========================================
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.rail_hops import Hop
from jax_moe_lb.transport.packing import concatenated, starts
from jax_moe_lb.types import iota

Window = tuple[Int[Array, ""], Int[Array, ""]]
"""The places of every rank's stream that are served in one step: the first, and the first beyond."""


@pytree
class Stretches:
    """Rows from one rank to another by one relay: a stretch of the receiver's stream.

    Args:
        start: where it starts.
        size: its rows.
    """

    start: Int[Array, "*N"]
    size: Int[Array, "*N"]

    def within(self, window: Window) -> tuple[Array, Array]:
        """Of each, the rows that stand before the window, and those in it."""
        first, last = window
        skipped = jnp.clip(first - self.start, 0, self.size)
        return skipped, jnp.clip(last - self.start, 0, self.size) - skipped


@pytree
class Relays:
    """The stretches that a rank has to do with, inside domains too.

    Args:
        leaving: from each rank of this domain, to each rank, by the relays of each offset.
        entering: from each rank, to each rank of this domain, by the relays of each offset.
        passing: from each rank, to each rank, by relays of this rank's offset.
    """

    leaving: Stretches
    entering: Stretches
    passing: Stretches


@dataclass(frozen=True)
class Far:
    """The way of rows between domains.

    Args:
        to_relay: inside the domain of the sender.
        along_rail: between equal offsets of all domains.
        from_relay: inside the domain of the receiver.
        pack: of each row as it leaves, its place in the sending order.
        num_packed: how many leave.
        by_domain: of each row as the first relay sends it, the row as it received it.
        by_rank: likewise on the second relay.
    """

    to_relay: Hop
    along_rail: Hop
    from_relay: Hop
    pack: Int[Array, "C"]
    num_packed: Int[Array, ""]
    by_domain: Int[Array, "B"]
    by_rank: Int[Array, "B"]


@dataclass(frozen=True)
class Way:
    """The ways of all rows of one window.

    Args:
        near: inside the domain.
        far: between domains; `None` where there is only one.
        stream_row: of each row as it is received, its place in the stream; -1 for none.
    """

    near: Hop
    far: Far | None
    stream_row: Int[Array, "A"]


def rail_axes(topology: Topology) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that tell domains apart, and those that tell the ranks of a domain apart.

    Raises:
        ValueError: no innermost axes make up a domain of at least two ranks, or its ranks cannot share the rails.
    """
    members, rails, axes = topology.ranks_per_node, topology.rails_per_node, topology.expert_axes
    if members % rails:
        raise ValueError(f"Topology.rails_per_node is {rails}; expected a divisor of the {members} ranks of a domain")
    sizes = [level.size for level in topology.levels][-len(axes) :]
    for first in range(len(axes)):
        if math.prod(sizes[first:]) == members > 1:
            return axes[:first], axes[first:]
    raise ValueError(
        f"Topology.ranks_per_node is {members} on mesh axes {axes} of sizes {tuple(sizes)}; "
        "expected the innermost axes to make up a domain, of at least 2 ranks, to spray over its rails"
    )


def by_relay(rails: Int[Array, "R R N"], topology: Topology) -> Int[Array, "R R M"]:
    """Rows from rank to rank by the relays of each offset. Inside a domain it is the offset of the receiver.

    Where several ranks share a rail, rows go by the one whose place among them is that of the receiver among its own.

    Raises:
        ValueError: another number of rails than the topology has.
    """
    members, num_rails = topology.ranks_per_node, topology.rails_per_node
    if rails.shape[2] != num_rails:
        raise ValueError(f"plan.rails has {rails.shape[2]} rails; expected the {num_rails} of Topology.rails_per_node")
    rank, offset = iota(rails.shape[0]), iota(members)
    sharing = members // num_rails
    takes = rank[:, None] % sharing == offset[None] % sharing
    sprayed = jnp.where(takes[None], jnp.repeat(rails, sharing, axis=2), 0)
    near = rank[:, None] // members == rank[None] // members
    return jnp.where(near[:, :, None], by_own_rail(rails.sum(2, dtype=jnp.int32), topology), sprayed)


def by_own_rail(rows: Int[Array, "R R"], topology: Topology) -> Int[Array, "R R M"]:
    """All rows by the relay of the receiver's own offset."""
    members = topology.ranks_per_node
    own = iota(rows.shape[0])[:, None] % members == iota(members)[None]
    return jnp.where(own[None], rows[:, :, None], 0)


def relays_of(rows: Int[Array, "R R M"], me: Int[Array, ""]) -> Relays:
    """What rank `me` has to do with, of all rows from rank to rank by relay. A stream is by sender, then relay."""
    num_ranks, _, members = rows.shape
    by_receiver = rows.swapaxes(1, 2).reshape(-1, num_ranks)
    start = _starts(by_receiver, 0).reshape(num_ranks, members, num_ranks).swapaxes(1, 2)
    all_rows = Stretches(start, rows)

    def of_domain(axis: int) -> Stretches:
        return jax.tree.map(lambda table: _members(table, me // members, members, axis), all_rows)

    return Relays(of_domain(0), of_domain(1), jax.tree.map(lambda table: table[:, :, me % members], all_rows))


def fullest(relays: Relays, window: Window, topology: Topology) -> Int[Array, ""]:
    """The most rows that this rank holds as a relay."""
    me, members = jax.lax.axis_index(topology.expert_axes), topology.ranks_per_node
    far = iota(topology.num_ranks) // members != me // members
    offset = me % members
    _, leaving = relays.leaving.within(window)
    _, entering = relays.entering.within(window)
    first = jnp.where(far[None], leaving[:, :, offset], 0).sum(dtype=jnp.int32)
    return jnp.maximum(first, jnp.where(far[:, None], entering[:, :, offset], 0).sum(dtype=jnp.int32))


def find_way(
    relays: Relays, window: Window, num_copies: int, num_relayed: int, num_rows: int, topology: Topology
) -> Way:
    """Where all rows of a window stand on their way.

    Args:
        relays: of this rank.
        window: which places of the streams.
        num_copies: rows that a sender has.
        num_relayed: rows that a relay can hold.
        num_rows: rows that a receiver can.
        topology: its domains are made up of mesh axes; see `rail_axes`.
    """
    outer, inner = rail_axes(topology)
    me, members = jax.lax.axis_index(topology.expert_axes), topology.ranks_per_node
    domain, offset = me // members, me % members
    left, leaving = relays.leaving.within(window)
    entered, entering = relays.entering.within(window)
    sent = relays.leaving.size
    place = _starts(sent.reshape(members, -1), 1).reshape(sent.shape) + left
    lands = relays.entering.start + entered

    def inside(table: Array, axis: int) -> Array:
        """From rank to rank of this domain."""
        return jnp.diagonal(_members(table, domain, members, axis), axis1=1, axis2=2)

    stays = inside(leaving, 1)
    near = Hop(inner, size=stays, first=inside(place, 1), lands=_starts(stays, 0))
    far = iota(topology.num_ranks) // members != domain
    leaving, entering = jnp.where(far[None, :, None], leaving, 0), jnp.where(far[:, None, None], entering, 0)
    size = jnp.concatenate([stays[:, offset], entering[:, offset].T.reshape(-1)])
    first = jnp.concatenate([inside(lands, 0)[:, offset], lands[:, offset].T.reshape(-1)])
    received = iota(num_rows) < size.sum(dtype=jnp.int32)
    stream_row = jnp.where(received, concatenated(first, size, num_rows), -1)
    if not outer:
        return Way(near, None, stream_row)
    out, into = leaving.sum(1, dtype=jnp.int32), entering.sum(0, dtype=jnp.int32).T
    rail = _between_domains(relays.passing.within(window)[1], members)
    return Way(
        near,
        Far(
            to_relay=Hop(inner, size=out, first=_starts(out, 1), lands=_starts(out, 0)),
            along_rail=Hop(outer, size=rail, first=_starts(rail, 1), lands=_starts(rail, 0)),
            from_relay=Hop(
                inner,
                size=into,
                first=_starts(into, 1),
                lands=_starts(into, 0) + stays.sum(0, keepdims=True, dtype=jnp.int32),
            ),
            pack=concatenated(place[offset].T, leaving[offset].T, num_copies),
            num_packed=leaving[offset].sum(dtype=jnp.int32),
            by_domain=_in_order(leaving[:, :, offset].reshape(members, -1, members), (1, 0, 2), num_relayed),
            by_rank=_in_order(entering[:, :, offset], (1, 0), num_relayed),
        ),
        stream_row,
    )


def _members(table: Array, domain: Int[Array, ""], members: int, axis: int) -> Array:
    """The entries of one domain along an axis over ranks."""
    return jax.lax.dynamic_slice_in_dim(table, domain * members, members, axis)


def _between_domains(rows: Int[Array, "R R"], members: int) -> Int[Array, "G G"]:
    num_domains = rows.shape[0] // members
    total = rows.reshape(num_domains, members, num_domains, members).sum((1, 3), dtype=jnp.int32)
    same = iota(num_domains)[:, None] == iota(num_domains)[None]
    return jnp.where(same, 0, total)


def _in_order(size: Int[Array, "*N"], axes: tuple[int, ...], num_rows: int) -> Int[Array, "B"]:
    """Of each row, when blocks of these sizes are put in the order of other axes, where it stood."""
    first = starts(size.reshape(-1)).reshape(size.shape)
    return concatenated(first.transpose(axes), size.transpose(axes), num_rows)


def _starts(size: Int[Array, "P Q"], axis: int) -> Int[Array, "P Q"]:
    return size.cumsum(axis, dtype=jnp.int32) - size
