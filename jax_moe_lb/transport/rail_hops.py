"""By which rail ranks rows travel between nodes, and where they stand on the way.

A row from rank `(d, a)` to rank `(f, m)`, each a node and an offset in it, takes the rail of some offset `o` and makes
three hops: to `(d, o)`, to `(f, o)`, and to `(f, m)`. The two ranks of offset `o` are its rail ranks. All ranks know
the plan, so all know what every rail rank holds, and in which order:

=============================== ===========================================
the first rail rank receives    by sender `a`, then receiver `(f, m)`
it sends                        by node `f`, then sender, then receiver
the second rail rank receives   by sender `(d, a)`, then receiver `m`
it sends                        by receiver, then sender
the receiver receives           from its own node by sender; then by offset `o`, then sender
=============================== ===========================================

`M` in the shapes of this module is the ranks of a node.
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
    """One exchange on the way of rows: every rank of a group sends one block to every other, and all know all blocks.

    Use it where the table of blocks follows from the plan, so that nobody has to be told what arrives.

    Args:
        axes: names of the mesh axes whose ranks make up the group.
        size: `[G, G]` int32, the rows that each sender has for each receiver.
        first: `[G, G]` int32, the row of the sender's array at which each block starts.
        lands: `[G, G]` int32, the row of the receiver's array at which each block starts.
        in_one_process: as of `ragged_all_to_all`.
    """

    axes: tuple[str, ...]
    size: GroupMatrix
    first: GroupMatrix
    lands: GroupMatrix
    in_one_process: bool

    def there(self, rows: Shaped[Array, "P H"], into: Shaped[Array, "Q H"], site: str) -> Shaped[Array, "Q H"]:
        """Moves rows from their senders to their receivers.

        Args:
            rows: what this rank sends, in blocks that start at `first`.
            into: the receiver's array, whose other rows stay as they are.
            site: the name of the exchange in errors of ranks that wait in vain.

        Returns:
            `into`, with every block where it lands.
        """
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
        """Moves rows back from their receivers to their senders: the transpose of `there`.

        Args:
            rows: what this rank got by `there`, in blocks that start at `lands`.
            into: the sender's array, whose other rows stay as they are.
            site: the name of the exchange in errors of ranks that wait in vain.

        Returns:
            `into`, with every block where `there` took it from.
        """
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
"""The part of every rank's stream that one step serves: its first place, and the first place beyond it."""


@pytree
class RowRanges:
    """Rows from one rank to another by one rail rank, which stand side by side in the receiver's stream: a stretch of
    it.

    Args:
        start: int32, the place in the stream at which each stretch starts.
        size: int32, the rows of each stretch.
    """

    start: Int[Array, "*N"]
    size: Int[Array, "*N"]

    def within(self, window: StreamWindow) -> tuple[Array, Array]:
        """Returns how many rows of each stretch stand before the window, and how many stand in it."""
        first, last = window
        skipped = jnp.clip(first - self.start, 0, self.size)
        return skipped, jnp.clip(last - self.start, 0, self.size) - skipped


@pytree
class RailRows:
    """The stretches that a rank has to do with, as a sender, a receiver or a rail rank, also those inside its node.

    Args:
        leaving: `[M, R, M]`, from each rank of this node, to each rank, by the rail ranks of each offset.
        entering: `[R, M, M]`, from each rank, to each rank of this node, by the rail ranks of each offset.
        passing: `[R, R]`, from each rank, to each rank, by the rail ranks of this rank's offset.
    """

    leaving: RowRanges
    entering: RowRanges
    passing: RowRanges


@dataclass(frozen=True)
class InterNodeRoute:
    """The way of the rows that leave their node: three hops, and the order of the rows before each.

    Args:
        to_rail: the hop inside the sender's node, to the rank that has the rail.
        along_rail: the hop between the ranks of equal offset in all nodes.
        from_rail: the hop inside the receiver's node, from the rank that has the rail.
        pack: `[C]` int32, for each row as it leaves, its place in the sending order.
        num_packed: how many rows leave; the entries of `pack` beyond them mean nothing.
        by_node: `[B]` int32, for each row as the first rail rank sends it, the row as it was received.
        by_rank: `[B]` int32, the same for the second rail rank.
    """

    to_rail: Hop
    along_rail: Hop
    from_rail: Hop
    pack: Int[Array, "C"]
    num_packed: Int[Array, ""]
    by_node: Int[Array, "B"]
    by_rank: Int[Array, "B"]


@dataclass(frozen=True)
class RailRoute:
    """The ways of all rows of one window.

    Args:
        near: the hop of the rows that stay inside the node.
        far: the hops of those that leave it; `None` where there is only one node.
        stream_row: `[A]` int32, for each row as it is received, its place in the stream; -1 where none is received.
    """

    near: Hop
    far: InterNodeRoute | None
    stream_row: Int[Array, "A"]


def rail_axes(topology: Topology) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits the expert axes into those that tell nodes apart and those that tell the ranks of a node apart.

    Returns:
        The names of the outer axes, which may be none, and those of the inner ones.

    Raises:
        ValueError: no innermost axes make up a node of at least two ranks, or its ranks cannot share the rails.
    """
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
    """Says by rail ranks of which offset the rows of a plan travel, where the plan says it by rails.

    Inside a node there is no rail, and the offset is that of the receiver. Where several ranks share a rail, rows take
    the one whose place among them is that of the receiver among its own: without the last hop where that is possible.

    Args:
        rails: `plan.rails`, `[R, R, N]` int32, the rows from rank to rank on each rail.
        topology: its nodes have `M = ranks_per_node` ranks and `N = rails_per_node` rails.

    Returns:
        `[R, R, M]` int32, the rows from rank to rank by the rail ranks of each offset.

    Raises:
        ValueError: the plan has another number of rails than the topology.
    """
    members, num_rails = topology.ranks_per_node, topology.rails_per_node
    if rails.shape[2] != num_rails:
        raise ValueError(f"plan.rails has {rails.shape[2]} rails; expected the {num_rails} of Topology.rails_per_node")
    rank, offset = iota(rails.shape[0]), iota(members)
    sharing = members // num_rails
    # For each receiver one of the ranks that share a rail takes all rows, so that none is counted twice.
    takes = rank[:, None] % sharing == offset[None] % sharing
    sprayed = jnp.where(takes[None], jnp.repeat(rails, sharing, axis=2), 0)
    near = rank[:, None] // members == rank[None] // members
    return jnp.where(near[:, :, None], by_own_rail(rails.sum(2, dtype=jnp.int32), topology), sprayed)


def by_own_rail(rows: Int[Array, "R R"], topology: Topology) -> Int[Array, "R R M"]:
    """Puts all rows on the way by the receiver's own offset, as plans without rails have it.

    Args:
        rows: `[R, R]` int32, from rank to rank.
        topology: its nodes have `M = ranks_per_node` ranks.

    Returns:
        `[R, R, M]` int32, as `by_rail_rank`.
    """
    members = topology.ranks_per_node
    own = iota(rows.shape[0])[:, None] % members == iota(members)[None]
    return jnp.where(own[None], rows[:, :, None], 0)


def rail_rows_of(rows: Int[Array, "R R M"], me: Int[Array, ""]) -> RailRows:
    """Picks what one rank has to do with out of all rows from rank to rank.

    Args:
        rows: `[R, R, M]` int32, as `by_rail_rank` returns them. A stream holds them by sender, then by offset.
        me: the number of the rank.
    """
    num_ranks, _, members = rows.shape
    by_receiver = rows.swapaxes(1, 2).reshape(-1, num_ranks)
    start = _starts(by_receiver, 0).reshape(num_ranks, members, num_ranks).swapaxes(1, 2)
    all_rows = RowRanges(start, rows)

    def of_node(axis: int) -> RowRanges:
        return jax.tree.map(lambda table: _members(table, me // members, members, axis), all_rows)

    return RailRows(of_node(0), of_node(1), jax.tree.map(lambda table: table[:, :, me % members], all_rows))


def max_buffered_rows(rail_rows: RailRows, window: StreamWindow, topology: Topology) -> Int[Array, ""]:
    """Returns the most rows that this rank holds at once in a window, be it as a first or as a second rail rank.

    Use it to choose windows so small that every rail rank's buffer holds its rows.
    """
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
    """Works out where all rows of a window stand on their way.

    Args:
        rail_rows: of this rank, by `rail_rows_of`.
        window: the places of every stream that travel now.
        num_copies: `C`, the rows of a sender's array.
        num_passing: `B`, the rows that a rail rank's buffer holds; at least what `max_buffered_rows` returns on any
        rank.
        num_rows: `A`, the rows of a receiver's array.
        topology: its nodes are made up of mesh axes; see `rail_axes`.
    """
    outer, inner = rail_axes(topology)
    me, members = jax.lax.axis_index(topology.expert_axes), topology.ranks_per_node
    node, offset = me // members, me % members
    left, leaving = rail_rows.leaving.within(window)
    entered, entering = rail_rows.entering.within(window)
    sent = rail_rows.leaving.size
    place = _starts(sent.reshape(members, -1), 1).reshape(sent.shape) + left
    lands = rail_rows.entering.start + entered

    def inside(table: Array, axis: int) -> Array:
        """From rank to rank of this node."""
        return jnp.diagonal(_members(table, node, members, axis), axis1=1, axis2=2)

    stays = inside(leaving, 1)
    # `size`, `first` and `lands` of all hops are tables of the whole group: `ragged_all_to_all` asks each rank for the
    # rows that it sends and for those that it gets, and only the plan knows the latter.
    local = topology.nodes_in_one_process
    near = Hop(inner, size=stays, first=inside(place, 1), lands=_starts(stays, 0), in_one_process=local)
    # Rows inside the node are taken out of both tables here: they were sent straight, and must not take a rail too.
    far = iota(topology.num_ranks) // members != node
    leaving, entering = jnp.where(far[None, :, None], leaving, 0), jnp.where(far[:, None, None], entering, 0)
    # The order in which a receiver gets rows is that of its array: those of its own node first, for `near` and
    # `from_rail` write into one array.
    size = jnp.concatenate([stays[:, offset], entering[:, offset].T.reshape(-1)])
    first = jnp.concatenate([inside(lands, 0)[:, offset], lands[:, offset].T.reshape(-1)])
    received = iota(num_rows) < size.sum(dtype=jnp.int32)
    # Rows beyond those that were received hold whatever the array held, so they get a place that no stream has.
    stream_row = jnp.where(received, concatenated(first, size, num_rows), -1)
    # With one node the outer group would have one rank, and a collective over no axes does not exist.
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
                # Behind the rows that came from inside the node.
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
    """The entries of one node along an axis over ranks."""
    return jax.lax.dynamic_slice_in_dim(table, node * members, members, axis)


def _between_nodes(rows: Int[Array, "R R"], members: int) -> Int[Array, "G G"]:
    num_nodes = rows.shape[0] // members
    total = rows.reshape(num_nodes, members, num_nodes, members).sum((1, 3), dtype=jnp.int32)
    same = iota(num_nodes)[:, None] == iota(num_nodes)[None]
    # What passes inside one node is not on a rail: rows that start and end there were never sent to a rail rank.
    return jnp.where(same, 0, total)


def _in_order(size: Int[Array, "*N"], axes: tuple[int, ...], num_rows: int) -> Int[Array, "B"]:
    """Takes blocks from row-major order to that of `axes`: returns the old row of each row in the new order."""
    first = starts(size.reshape(-1)).reshape(size.shape)
    return concatenated(first.transpose(axes), size.transpose(axes), num_rows)


def _starts(size: Int[Array, "P Q"], axis: int) -> Int[Array, "P Q"]:
    return size.cumsum(axis, dtype=jnp.int32) - size
