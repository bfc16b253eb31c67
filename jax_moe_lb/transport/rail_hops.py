"""Routes of rows between nodes: rail ranks, and positions of rows on each hop.

A row from rank `(d, a)` to rank `(f, m)`, each a node and an offset in it, takes the rail of some offset `o`. It makes
three hops: to `(d, o)`, to `(f, o)`, and to `(f, m)`. The two ranks of offset `o` are its rail ranks. All ranks have
the plan, so each can compute the contents and order of every buffer:

=============================== ===========================================
the first rail rank receives    by sender `a`, then receiver `(f, m)`
it sends                        by node `f`, then sender, then receiver
the second rail rank receives   by sender `(d, a)`, then receiver `m`
it sends                        by receiver, then sender
the receiver receives           from its own node by sender; then by offset `o`, then sender
=============================== ===========================================

`M` in the shapes of this module is the number of ranks per node.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jax_moe_lb.collectives.ragged_all_to_all import concatenated, ragged_all_to_all, starts
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import iota, pytree

GroupMatrix = Int[Array, "G G"]
"""One number for each sender and receiver of a group of `G` ranks."""


@dataclass(frozen=True)
class Hop:
    """Exchange on the route of rows: each rank of a group sends one block to each other rank, with known sizes."""

    # Use it if the table of blocks follows from the plan: ranks then need not exchange sizes.

    axes: tuple[str, ...]  # names of the mesh axes of the group
    size: GroupMatrix  # rows from each sender to each receiver
    first: GroupMatrix  # first row of each block in the sender's array
    lands: GroupMatrix  # first row of each block in the receiver's array
    in_one_process: bool  # as in `ragged_all_to_all`

    def there(self, rows: Shaped[Array, "P H"], into: Shaped[Array, "Q H"], site: str) -> Shaped[Array, "Q H"]:
        """Send rows to their receivers."""
        me = jax.lax.axis_index(self.axes)
        return ragged_all_to_all(
            rows,
            into,
            input_offsets=self.first[me],
            send_sizes=self.size[me],
            output_offsets=self.lands[me],
            recv_sizes=self.size[:, me],
            axis_name=self.axes,
            in_one_process=self.in_one_process,
            site=site,
        )

    def back(self, rows: Shaped[Array, "Q H"], into: Shaped[Array, "P H"], site: str) -> Shaped[Array, "P H"]:
        """Return rows to their senders; the transpose of `there`."""
        me = jax.lax.axis_index(self.axes)
        return ragged_all_to_all(
            rows,
            into,
            input_offsets=self.lands[:, me],
            send_sizes=self.size[:, me],
            output_offsets=self.first[:, me],
            recv_sizes=self.size[me],
            axis_name=self.axes,
            in_one_process=self.in_one_process,
            site=site,
        )


StreamWindow = tuple[Int[Array, ""], Int[Array, ""]]
"""Part of every rank's stream in one step: its first position, and the first position after it."""


@pytree
class RowRanges:
    """Rows from one rank to another through one rail rank, contiguous in the receiver's stream."""

    start: Int[Array, "*N"]  # first position of each range in the stream
    size: Int[Array, "*N"]  # rows of each range

    def within(self, window: StreamWindow) -> tuple[Array, Array]:
        """Return the rows of each range before the window, and inside it."""
        first, last = window
        skipped = jnp.clip(first - self.start, 0, self.size)
        return skipped, jnp.clip(last - self.start, 0, self.size) - skipped


@pytree
class RailRows:
    """Ranges of a rank as sender, receiver and rail rank, including those inside its node."""

    leaving: RowRanges  # from each rank of this node to each rank, through the rail ranks of each offset
    entering: RowRanges  # from each rank to each rank of this node, through the rail ranks of each offset
    passing: RowRanges  # from each rank to each rank, through the rail ranks of this rank's offset


@dataclass(frozen=True)
class InterNodeRoute:
    """Route of rows that leave their node: three hops, and the order of the rows before each."""

    to_rail: Hop  # hop inside the sender's node, to the rail rank
    along_rail: Hop  # hop between the ranks of equal offset in all nodes
    from_rail: Hop  # hop inside the receiver's node, from the rail rank
    pack: Int[Array, "C"]  # position in sending order of each row of the first hop
    num_packed: Int[Array, ""]  # number of rows that leave the node; further entries of `pack` are undefined
    by_node: Int[Array, "B"]  # received row of each row sent by the first rail rank
    by_rank: Int[Array, "B"]  # received row of each row sent by the second rail rank


@dataclass(frozen=True)
class RailRoute:
    """Routes of all rows of one window."""

    near: Hop  # hop of the rows inside the node
    far: InterNodeRoute | None  # hops of the rows between nodes; `None` on a single node
    stream_row: Int[Array, "A"]  # stream position of each received row; -1 for unused rows


def rail_axes(topology: Topology) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the expert axes into axes between nodes and axes inside a node."""
    members, rails, axes = topology.ranks_per_node, topology.rails_per_node, topology.expert_axes
    if members % rails:
        raise ValueError(f"Topology.rails_per_node is {rails}; expected a divisor of the {members} ranks of a node")
    sizes = [level.size for level in topology.levels][-len(axes) :]
    for first in range(len(axes)):
        if math.prod(sizes[first:]) == members > 1:
            return axes[:first], axes[first:]
    raise ValueError(
        f"Topology.ranks_per_node is {members} on mesh axes {axes} of sizes {tuple(sizes)}; "
        "expected the innermost axes to make up a node, of at least 2 ranks, to spray over its rails"
    )


def by_rail_rank(rails: Int[Array, "R R N"], topology: Topology) -> Int[Array, "R R M"]:
    """Convert rows per rail to rows per offset of the rail ranks."""
    # Rows inside a node take no rail; their offset is the receiver's. If several ranks share a rail, a row takes the
    # one whose index among them equals the receiver's index among its own sharing ranks. This avoids the last hop if
    # possible.
    members, num_rails = topology.ranks_per_node, topology.rails_per_node
    if rails.shape[2] != num_rails:
        raise ValueError(f"plan.rails has {rails.shape[2]} rails; expected the {num_rails} of Topology.rails_per_node")
    rank, offset = iota(rails.shape[0]), iota(members)
    sharing = members // num_rails
    # For each receiver, exactly one of the ranks sharing a rail takes the rows.
    takes = rank[:, None] % sharing == offset[None] % sharing
    sprayed = jnp.where(takes[None], jnp.repeat(rails, sharing, axis=2), 0)
    near = rank[:, None] // members == rank[None] // members
    return jnp.where(near[:, :, None], by_own_rail(rails.sum(2, dtype=jnp.int32), topology), sprayed)


def by_own_rail(rows: Int[Array, "R R"], topology: Topology) -> Int[Array, "R R M"]:
    """Route all rows through the receiver's own offset, as for plans without rails."""
    members = topology.ranks_per_node
    own = iota(rows.shape[0])[:, None] % members == iota(members)[None]
    return jnp.where(own[None], rows[:, :, None], 0)


def rail_rows_of(rows: Int[Array, "R R M"], me: Int[Array, ""]) -> RailRows:
    """Select the ranges of one rank from the rows between all ranks."""
    num_ranks, _, members = rows.shape
    by_receiver = rows.swapaxes(1, 2).reshape(-1, num_ranks)
    start = _starts(by_receiver, 0).reshape(num_ranks, members, num_ranks).swapaxes(1, 2)
    all_rows = RowRanges(start, rows)

    def of_node(axis: int) -> RowRanges:
        return jax.tree.map(lambda table: _members(table, me // members, members, axis), all_rows)

    return RailRows(of_node(0), of_node(1), jax.tree.map(lambda table: table[:, :, me % members], all_rows))


def max_buffered_rows(rail_rows: RailRows, window: StreamWindow, topology: Topology) -> Int[Array, ""]:
    """Return the maximum number of rows buffered on this rank in a window, as first or as second rail rank."""
    # Use it to choose windows that fit the buffers of all rail ranks.
    me, members = jax.lax.axis_index(topology.expert_axes), topology.ranks_per_node
    far = iota(topology.num_ranks) // members != me // members
    offset = me % members
    _, leaving = rail_rows.leaving.within(window)
    _, entering = rail_rows.entering.within(window)
    first = jnp.where(far[None], leaving[:, :, offset], 0).sum(dtype=jnp.int32)
    return jnp.maximum(first, jnp.where(far[:, None], entering[:, :, offset], 0).sum(dtype=jnp.int32))


def find_route(
    rail_rows: RailRows, window: StreamWindow, num_copies: int, num_passing: int, num_rows: int, topology: Topology
) -> RailRoute:
    """Compute the routes and positions of all rows of a window."""
    outer, inner = rail_axes(topology)
    me, members = jax.lax.axis_index(topology.expert_axes), topology.ranks_per_node
    node, offset = me // members, me % members
    left, leaving = rail_rows.leaving.within(window)
    entered, entering = rail_rows.entering.within(window)
    sent = rail_rows.leaving.size
    place = _starts(sent.reshape(members, -1), 1).reshape(sent.shape) + left
    lands = rail_rows.entering.start + entered

    def inside(table: Array, axis: int) -> Array:
        """Return the entries between ranks of this node."""
        return jnp.diagonal(_members(table, node, members, axis), axis1=1, axis2=2)

    stays = inside(leaving, 1)
    # `size`, `first` and `lands` of all hops are tables of the whole group: `ragged_all_to_all` takes sizes to send and
    # to receive, and each rank computes both from the plan.
    local = topology.nodes_in_one_process
    near = Hop(inner, size=stays, first=inside(place, 1), lands=_starts(stays, 0), in_one_process=local)
    # Remove the rows inside the node from both tables: the `near` hop sends them directly.
    far = iota(topology.num_ranks) // members != node
    leaving, entering = jnp.where(far[None, :, None], leaving, 0), jnp.where(far[:, None, None], entering, 0)
    # Received rows are in array order: rows of the own node first, because `near` and `from_rail` write into one array.
    size = jnp.concatenate([stays[:, offset], entering[:, offset].T.reshape(-1)])
    first = jnp.concatenate([inside(lands, 0)[:, offset], lands[:, offset].T.reshape(-1)])
    received = iota(num_rows) < size.sum(dtype=jnp.int32)
    # Unused rows get a position outside of every stream.
    stream_row = jnp.where(received, concatenated(first, size, num_rows), -1)
    # With one node the outer group has one rank and no axes, and collectives require at least one axis.
    if not outer:
        return RailRoute(near, None, stream_row)
    out, into = leaving.sum(1, dtype=jnp.int32), entering.sum(0, dtype=jnp.int32).T
    rail = _between_nodes(rail_rows.passing.within(window)[1], members)
    return RailRoute(
        near,
        InterNodeRoute(
            to_rail=Hop(inner, size=out, first=_starts(out, 1), lands=_starts(out, 0), in_one_process=local),
            along_rail=Hop(
                outer,
                size=rail,
                first=_starts(rail, 1),
                lands=_starts(rail, 0),
                in_one_process=topology.in_one_process,
            ),
            from_rail=Hop(
                inner,
                size=into,
                first=_starts(into, 1),
                # After the rows from inside the node.
                lands=_starts(into, 0) + stays.sum(0, keepdims=True, dtype=jnp.int32),
                in_one_process=local,
            ),
            pack=concatenated(place[offset].T, leaving[offset].T, num_copies),
            num_packed=leaving[offset].sum(dtype=jnp.int32),
            by_node=_in_order(leaving[:, :, offset].reshape(members, -1, members), (1, 0, 2), num_passing),
            by_rank=_in_order(entering[:, :, offset], (1, 0), num_passing),
        ),
        stream_row,
    )


def _members(table: Array, node: Int[Array, ""], members: int, axis: int) -> Array:
    """Return the entries of one node along an axis over ranks."""
    return jax.lax.dynamic_slice_in_dim(table, node * members, members, axis)


def _between_nodes(rows: Int[Array, "R R"], members: int) -> Int[Array, "G G"]:
    num_nodes = rows.shape[0] // members
    total = rows.reshape(num_nodes, members, num_nodes, members).sum((1, 3), dtype=jnp.int32)
    same = iota(num_nodes)[:, None] == iota(num_nodes)[None]
    # Rows inside one node take no rail.
    return jnp.where(same, 0, total)


def _in_order(size: Int[Array, "*N"], axes: tuple[int, ...], num_rows: int) -> Int[Array, "B"]:
    """Return the source row of each row after blocks move from row-major order to the order of `axes`."""
    first = starts(size.reshape(-1)).reshape(size.shape)
    return concatenated(first.transpose(axes), size.transpose(axes), num_rows)


def _starts(size: Int[Array, "P Q"], axis: int) -> Int[Array, "P Q"]:
    return size.cumsum(axis, dtype=jnp.int32) - size
