"""Dispatch of token copies over all rails of a node (RailS).

A copy for another node makes three hops. The first is inside its own node to the rail rank. The second is along the
rail to the rank of equal offset in the other node. The third is from there to the serving rank. All bytes of a copy
between nodes stay on its rail. Copies inside a node travel directly.

The rounds are those of `Direct`: the same `A` copies of every rank's stream in the same order, so outputs are bitwise
equal. Rail ranks also have receive buffers. A round with more copies than fit takes several steps. `rows_of_hops`
counts the rows of every hop for the simulator.

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
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.collectives.ragged_all_to_all import Group, concatenated, empty_buffer, starts
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, GroupSizes, Rows, iota, pytree
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.dispatch import CopyDispatch
from jax_moe_lb.transport.exchange import (
    Copies,
    Receipt,
    arriving_rows,
    by_slot,
    inverse_order,
    landings,
    sending_order,
)
from jax_moe_lb.transport.lists import Hop
from jax_moe_lb.transport.wave_rows import RowsBetween, WaveRows

RowMatrix = Int[np.ndarray, "R R"]
"""Numbers of rows, from source rank (row of the matrix) to destination rank (column)."""


def rows_of_hops(rows: RowMatrix, plan: Plan, ranks_per_node: int) -> tuple[RowMatrix, RowMatrix, RowMatrix]:
    """Count the rows of the three hops of `MultiRailDispatch`."""
    # It implements the `hops` of its cost. If the source is the rail rank itself, its rows are on the diagonal and
    # cross no link.
    num_ranks, members = len(rows), ranks_per_node
    far = np.arange(num_ranks)[:, None] // members != np.arange(num_ranks)[None] // members
    nodes = num_ranks // members
    shape, same = (nodes, members, nodes, members), np.arange(nodes)
    to_rail, rail, last = (np.zeros(shape, np.int64) for _ in range(3))
    for offset in range(members):
        # Source (d, a), destination (f, m), through the rail ranks of this offset in both nodes.
        passing = _by_rail_rank(rows, plan, members, offset, far).reshape(shape)
        to_rail[same, :, same, offset] += passing.sum((2, 3))
        rail[:, offset, :, offset] += passing.sum((1, 3))
        last[same, offset, same, :] += passing.sum((0, 1))
    near = np.where(far, 0, rows)
    return near + to_rail.reshape(rows.shape), rail.reshape(rows.shape), last.reshape(rows.shape)


def _by_rail_rank(rows: RowMatrix, plan: Plan, members: int, offset: int, far: Bool[np.ndarray, "R R"]) -> RowMatrix:
    """Count the inter-node rows through the rail ranks of one offset, as the traced `by_rail_rank`."""
    receiver = np.arange(len(rows))[None] % members
    if plan.rails is None:
        return np.where(far & (receiver == offset), rows, 0)
    sharing = members // plan.rails.shape[2]
    # If ranks share a rail, count each row once: the rank takes it whose index among its sharing ranks equals the
    # receiver's.
    takes = far & (receiver % sharing == offset % sharing)
    return np.where(takes, plan.rails[:, :, offset // sharing], 0)


# ---- routes ------------------------------------------------------------------------
StreamWindow = tuple[Int[Array, ""], Int[Array, ""]]
"""Part of every rank's stream in one step: its first position, and the first position after it."""


@pytree
class RowRanges:
    """Rows from one rank to another through one rail rank, contiguous in the receiver's stream."""

    start: Int[Array, "*N"]  # first position of each range in the stream
    size: Int[Array, "*N"]  # rows of each range

    def within(self, window: StreamWindow) -> tuple[Array, Array]:
        """Return the rows per range before the window, and inside it."""
        first, last = window
        skipped = jnp.clip(first - self.start, 0, self.size)
        return skipped, jnp.clip(last - self.start, 0, self.size) - skipped


@pytree
class RailRows:
    """Ranges of a rank as sender, receiver and rail rank, including those inside the node."""

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
    if topology.limited_routing:
        # Its program would end the process in the compiler.
        raise ValueError("dispatch is MultiRailDispatch on a slice of TPU v5e with over 16 chips; expected another one")
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
    start = starts(by_receiver, 0).reshape(num_ranks, members, num_ranks).swapaxes(1, 2)
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
    place = starts(sent.reshape(members, -1), 1).reshape(sent.shape) + left
    lands = rail_rows.entering.start + entered

    def inside(table: Array, axis: int) -> Array:
        """Return the entries between ranks of this node."""
        return jnp.diagonal(_members(table, node, members, axis), axis1=1, axis2=2)

    stays = inside(leaving, 1)
    # `size`, `first` and `lands` of all hops are tables of the whole group: `ragged_all_to_all` takes sizes to send and
    # to receive, and each rank computes both from the plan.
    node_group = Group(inner, topology.nodes_in_one_process, topology.limited_routing)
    near = Hop(node_group, size=stays, first=inside(place, 1), lands=starts(stays, 0))
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
            to_rail=Hop(node_group, size=out, first=starts(out, 1), lands=starts(out, 0)),
            along_rail=Hop(
                Group(outer, topology.in_one_process, topology.limited_routing),
                size=rail,
                first=starts(rail, 1),
                lands=starts(rail, 0),
            ),
            from_rail=Hop(
                node_group,
                size=into,
                first=starts(into, 1),
                # After the rows from inside the node.
                lands=starts(into, 0) + stays.sum(0, keepdims=True, dtype=jnp.int32),
            ),
            pack=concatenated(place[offset].T, leaving[offset].T, num_copies),
            num_packed=leaving[offset].sum(dtype=jnp.int32),
            by_node=_in_order(leaving[:, :, offset].reshape(members, -1, members), (1, 0, 2), num_passing),
            by_rank=_in_order(entering[:, :, offset], (1, 0), num_passing),
        ),
        stream_row,
    )


def _members(table: Array, node: Int[Array, ""], members: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(table, node * members, members, axis)


def _between_nodes(rows: Int[Array, "R R"], members: int) -> Int[Array, "G G"]:
    num_nodes = rows.shape[0] // members
    total = rows.reshape(num_nodes, members, num_nodes, members).sum((1, 3), dtype=jnp.int32)
    same = iota(num_nodes)[:, None] == iota(num_nodes)[None]
    # Rows inside one node take no rail.
    return jnp.where(same, 0, total)


def _in_order(size: Int[Array, "*N"], axes: tuple[int, ...], num_rows: int) -> Int[Array, "B"]:
    """Return the source row per row after blocks move from row-major order to the order of `axes`."""
    first = starts(size.reshape(-1)).reshape(size.shape)
    return concatenated(first.transpose(axes), size.transpose(axes), num_rows)


# ---- dispatch ----------------------------------------------------------------------
@pytree
class SprayReceipt(Receipt):
    """Addresses of copies and their rail ranks, made by `MultiRailDispatch.address`."""

    arriving: Int[Array, "R S"]  # copies from each rank to each slot of this rank
    rail_rows: RailRows  # rows that this rank sends, receives or forwards, by rail rank
    step: Int[Array, ""]  # rows of each stream per step, limited by the buffers of the rail ranks
    steps: Int[Array, ""]  # number of steps of a round; 1 if the plan loads ranks and rails evenly


@dataclass(frozen=True)
@checked_fields
class MultiRailDispatch(CopyDispatch[SprayReceipt]):
    """Dispatch of token copies between nodes over all rails, by `plan.rails`.

    Use it with a plan of `RailS`, on nodes with several network interfaces and unequal traffic per rank. Without
    `plan.rails`, copies take the rail of the serving rank. On one node it equals `Direct` at a higher cost.

    A rail rank buffers at most `max(A, R)` rows. This suffices for one step per round if the plan loads ranks and rails
    evenly. More rows take more steps; none are dropped.

    Examples:
        >>> from jax_moe_lb import Chain, System
        >>> from jax_moe_lb.balancers import Greedy, RailS
        >>> from jax_moe_lb.transport import MultiRailDispatch
        >>> system = System(Chain((Greedy(), RailS())), dispatch=MultiRailDispatch(), replica_slots=2)
        >>> system.dispatch.cost().buffer_rows(4096)  # rows for 4096 token copies per rank
        4352
    """

    takes_saved: ClassVar[bool] = True

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> SprayReceipt:
        """Compute the destination and the rail ranks of every copy of this rank; see `Exchange.address`.

        Raises:
            ValueError: no innermost expert axes form a node, or the plan has another number of rails. If the rails do
                not sum to the sent rows, `follows_plan` is False instead.
        """
        rail_axes(topology)
        me = jax.lax.axis_index(topology.expert_axes)
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order = sending_order(experts.reshape(-1), going, plan)
        by_rail, follows_plan = _rows_by_rail_rank(going.sum(0, dtype=jnp.int32), plan, topology)
        rail_rows = rail_rows_of(by_rail, me)
        capacity = self.buffers.rows(experts.size)
        rounds = agreed((load(plan).max() + capacity - 1) // capacity, topology.expert_axes)
        step = _rows_per_step(rail_rows, capacity, rounds, topology)
        return SprayReceipt(
            order=order,
            place=inverse_order(order),
            num_going=going.sum(dtype=jnp.int32),
            rounds=rounds,
            follows_plan=follows_plan,
            arriving=arriving_rows(counts, plan, me),
            rail_rows=rail_rows,
            step=step,
            steps=(capacity + step - 1) // step,
        )

    def send(
        self, copies: Copies, receipt: SprayReceipt, i: Int[Array, ""], topology: Topology
    ) -> tuple[Rows, GroupSizes]:
        """Send the copies of round `i`, directly inside a node and over the rails between nodes.

        See `Exchange.send`.
        """
        num_copies = copies.shape[0]
        capacity = self.buffers.rows(num_copies)
        coming = landings(receipt.arriving, i, capacity)
        slot_rows = _slot_rows(coming, capacity)
        landed = empty_buffer(copies, capacity)
        # Never updated in place: the hops of every step write into copies of it, so one array suffices.
        passing = empty_buffer(copies, _passing_rows(capacity, topology))

        def step(k: Array, rows: Rows) -> Rows:
            route = _route(receipt, i, k, num_copies, capacity, topology)
            arrived = route.near.there(copies, landed, "dispatch, inside a node")
            if route.far is not None:
                far = route.far
                at_rail = far.to_rail.there(copies[far.pack], passing, "dispatch, to a rail")
                at_rail = far.along_rail.there(at_rail[far.by_node], passing, "dispatch, along a rail")
                arrived = far.from_rail.there(at_rail[far.by_rank], arrived, "dispatch, from a rail")
            # Buffer rows without a copy have an index out of range, which the scatter drops.
            return rows.at[_rows_of_route(route, slot_rows, i)].set(arrived, mode="drop")

        return jax.lax.fori_loop(0, receipt.steps, step, landed), coming.sum(0, dtype=jnp.int32)

    def send_back(
        self, rows: Rows, receipt: SprayReceipt, i: Int[Array, ""], out: Copies, topology: Topology
    ) -> Copies:
        """Return the outputs of round `i` along the routes of `send`; see `Exchange.send_back`."""
        num_copies, (capacity, width) = out.shape[0], rows.shape
        slot_rows = _slot_rows(landings(receipt.arriving, i, capacity), capacity)
        passing = jnp.zeros_like(rows, shape=(_passing_rows(capacity, topology), width))

        def step(k: Array, out: Copies) -> Copies:
            route = _route(receipt, i, k, num_copies, capacity, topology)
            # The transpose of the scatter in `send`: rows without a copy read 0 and are not sent.
            arrived = rows.at[_rows_of_route(route, slot_rows, i)].get(mode="fill", fill_value=0)
            out = route.near.back(arrived, out, "combine, inside a node")
            if route.far is None:
                return out
            far = route.far
            at_rail = far.from_rail.back(arrived, passing, "combine, to a rail")
            at_rail = far.along_rail.back(passing.at[far.by_rank].set(at_rail), passing, "combine, along a rail")
            packed = far.to_rail.back(passing.at[far.by_node].set(at_rail), jnp.zeros_like(out), "combine, from a rail")
            # Entries of `pack` beyond the packed rows are undefined, and their positions belong to other rows: drop
            # them.
            place = jnp.where(iota(num_copies) < far.num_packed, far.pack, num_copies)
            return out.at[place].set(packed, mode="drop")

        return jax.lax.fori_loop(0, receipt.steps, step, out)

    def cost(self) -> TransportCost:
        """Return three hops: inside nodes and to rail ranks, along rails, and from rail ranks."""
        return _MultiRailCost(self.buffers)


class _MultiRailCost(TransportCost):
    def hops(self, wave: WaveRows, topology: Topology) -> tuple[RowsBetween, ...]:
        return rows_of_hops(wave.copies, wave.plan, topology.ranks_per_node)


def _rows_by_rail_rank(
    sent: Int[Array, "R"], plan: Plan, topology: Topology
) -> tuple[Int[Array, "R R M"], Bool[Array, ""] | None]:
    """Return rows by rail rank, after each rank compares the rails of the plan with the rows by the split rule."""
    axes = topology.expert_axes
    own = by_own_rail(jax.lax.all_gather(sent, axes, to="invarying"), topology)
    if plan.rails is None:
        return own, None
    adds_up = (plan.rails[jax.lax.axis_index(axes)].sum(1, dtype=jnp.int32) == sent).all() & (plan.rails >= 0).all()
    # All ranks must agree: if the rails of any rank are wrong, all take the receiver's own rail.
    follows_plan = jax.lax.pmin(adds_up.astype(jnp.int32), axes) == 1
    return jnp.where(follows_plan, by_rail_rank(plan.rails, topology), own), follows_plan


def _window(i: Int[Array, ""], k: Int[Array, ""], step: Int[Array, ""], capacity: int) -> StreamWindow:
    """Return the part of every stream in step `k` of round `i`, for rounds of `capacity` rows."""
    first = i * capacity + k * step
    return first, jnp.minimum(first + step, (i + 1) * capacity)


def _rows_per_step(rail_rows: RailRows, capacity: int, rounds: Int[Array, ""], topology: Topology) -> Int[Array, ""]:
    """Return the rows of a stream in a step: the first halving of `A` that fits the buffers of all rail ranks."""

    def most_held(step: Array) -> Array:
        steps = (capacity + step - 1) // step

        def one(number: Array, most: Array) -> Array:
            window = _window(number // steps, number % steps, step, capacity)
            return jnp.maximum(most, max_buffered_rows(rail_rows, window, topology))

        # The loop carry must vary over the same mesh axes as the result of the body.
        none = vary_like(jnp.int32(0), rail_rows.passing.size)
        # All ranks must take the same number of steps, because each step contains exchanges.
        most = jax.lax.pmax(jax.lax.fori_loop(0, rounds * steps, one, none), topology.expert_axes)
        return agreed(most, topology.expert_axes)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step = (carry[0] + 1) // 2
        return step, most_held(step)

    whole = jnp.full_like(rounds, capacity)
    limit = _passing_rows(capacity, topology)
    return jax.lax.while_loop(lambda carry: carry[1] > limit, halve, (whole, most_held(whole)))[0]


def _passing_rows(capacity: int, topology: Topology) -> int:
    """Return the buffer rows of a rail rank, at least `R`: a step of one row per stream needs at most one per rank."""
    return max(capacity, topology.num_ranks)


def _route(
    receipt: SprayReceipt, i: Int[Array, ""], k: Int[Array, ""], num_copies: int, capacity: int, topology: Topology
) -> RailRoute:
    window, num_passing = _window(i, k, receipt.step, capacity), _passing_rows(capacity, topology)
    return find_route(receipt.rail_rows, window, num_copies, num_passing, capacity, topology)


def _slot_rows(coming: Int[Array, "R S"], capacity: int) -> Int[Array, "A"]:
    """Return the position in slot order per row of a round's part of the stream."""
    order = by_slot(coming, capacity)
    return jnp.zeros_like(order).at[order].set(iota(capacity))


def _rows_of_route(route: RailRoute, slot_rows: Int[Array, "A"], i: Int[Array, ""]) -> Int[Array, "A"]:
    """Return the position in slot order per received row; `A` for buffer rows without a copy."""
    capacity = slot_rows.shape[0]
    # Buffer rows without a copy have stream position -1: clip it into range, then replace the result.
    row = jnp.clip(route.stream_row - i * capacity, 0, capacity - 1)
    return jnp.where(route.stream_row < 0, capacity, slot_rows[row])
