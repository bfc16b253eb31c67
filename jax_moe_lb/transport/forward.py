"""`Forward`: a token travels once to each node with its experts, and from there once to each rank.

The first hop leads along the outer expert axes to the rank of equal offset in the other node, its *rail rank*. Replicas
stay in the node, so this hop follows from the routing alone. It needs no plan: the planner and the copies of weights
can run beside it. Inside a node the rail ranks are the sources of the tokens, and the rest is `Once` on one node.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.collectives.ragged_all_to_all import Group
from jax_moe_lb.core.checks import Count
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Axes, Counts, iota
from jax_moe_lb.transport.cost import RowArrays, TransportCost
from jax_moe_lb.transport.dispatch import check_rails
from jax_moe_lb.transport.lists import Lists, rows_with_padding
from jax_moe_lb.transport.once import ListDispatch, lists_of
from jax_moe_lb.transport.once_rounds import ListReceipt, chunks_between
from jax_moe_lb.transport.wave_rows import EvenRouting, RowsBetween, WaveRows, spread_evenly


@dataclass(frozen=True)
class Forward(ListDispatch):
    """Dispatch of each token once to every node with its experts, and then once to every rank that serves it.

    Use it for several nodes: a row between nodes has all copies of a token in a node, and the sum of the outputs
    returns. The expert axes are outermost first, and the innermost axis is a node. Replicas must stay in the node:
    `ranks_per_domain` is at most the size of the innermost axis, which is its default.

    A rail rank stores the tokens of its offset in all nodes, at most `N T` rows for `N` nodes. Inside a node the rounds
    are those of `Once`; rounds also bound the copies that a rail rank sends.

    With `Buffers(chunks=n)` both hops are `n` exchanges, each with a part of the tokens. The hop between nodes of one
    chunk then depends on no hop inside of another, and may run beside it. Outputs return in the same way if
    `max_rounds` is 1; a loop of rounds carries the sums of all chunks.

    Args:
        max_nodes: largest number of nodes with experts of one token, as in node-limited routing. Buffers of sent rows
            are smaller by it; a token with more nodes is a fault, and its output NaN. `None` (default): `moe` takes it
            from a `TopK` router with `group_limit`, if experts are at home in order, and else allows all nodes.

    Raises:
        ValueError: `max_nodes` is below 1.

    Examples:
        >>> from jax_moe_lb import System
        >>> from jax_moe_lb.balancers import Exact
        >>> System(Exact(), dispatch=Forward(), replica_slots=2).dispatch.transfer is None
        True
    """

    max_nodes: Count | None = None

    def limited_to(self, max_nodes: int) -> "Forward":
        """Return the dispatch with `max_nodes`, unless it has a limit; see `Dispatch.limited_to`."""
        return replace(self, max_nodes=max_nodes) if self.max_nodes is None else self

    def excess_nodes(self, experts: Int[Array, "T K"], num_experts: int, topology: Topology) -> Int[Array, "T"] | None:
        """Return the number of nodes per token with more than `max_nodes`; see `Dispatch.excess_nodes`."""
        nodes = topology.num_ranks // topology.levels[-1].size
        if self.max_nodes is None or self.max_nodes >= min(nodes, experts.shape[1]):
            return None
        # Those out of range are below 0 or above all nodes.
        node = experts // (num_experts // nodes)
        visits = (node[:, None] == iota(nodes)[None, :, None]).any(2).sum(1, dtype=jnp.int32)
        return jnp.where(visits > self.max_nodes, visits, 0)

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ListReceipt:
        """Return the rows of this rank on both hops; see `Dispatch`.

        Raises:
            ValueError: `plan.rails` is set, the domains of the plan are larger than a node, or the expert axes do not
                form nodes.
        """
        check_rails(plan, self)
        inside, between = self.groups(plan.domain, topology)
        nodes, members = jax.lax.axis_size(between.axes), jax.lax.axis_size(inside.axes)
        node, offset = jax.lax.axis_index(between.axes), jax.lax.axis_index(inside.axes)
        per_node = counts.shape[1] // nodes
        # Experts of other nodes have code 0 on arrival.
        to_node = jnp.where(experts < 0, -1, experts // per_node)
        first_hop = Lists.of(to_node, experts % per_node + 1, 1, between, self.max_nodes)
        steps = chunks_between(first_hop, self.buffers, between)
        num_rows, site = nodes * -(-experts.shape[0] // len(steps)), "dispatch of experts, between nodes"
        codes = jnp.concatenate([step.clear(step.exchange(step.codes(), num_rows, site)) for step in steps])

        # [to node, offset, expert of the node]: a rail rank has the tokens of its offset in every node.
        of_rails = counts.reshape(nodes, members, nodes, per_node).sum(0, dtype=jnp.int32).swapaxes(0, 1)
        quota = plan.quota.reshape(nodes, per_node, nodes, members)[node, :, node]
        placement = plan.placement.reshape(nodes, members, plan.slots)[node]
        going = nearest_first(of_rails[node], quota, offset, plan.domain, plan.split)
        capacity = self.buffers.rows(experts.size)
        most = jnp.maximum(load(plan).max(), of_rails.sum(2, dtype=jnp.int32).max())
        rounds = agreed((most + capacity - 1) // capacity, topology.expert_axes)
        held = jnp.where(placement >= 0, placement - node * per_node, -1)
        return ListReceipt(rounds, None, lists_of(codes - 1, going, held, plan.split, rounds, inside), first_hop)

    def groups(self, domain: int, topology: Topology) -> tuple[Group, Group]:
        """Return the ranks of a node, and the ranks of equal offset in all nodes; see `ListDispatch`."""
        outer, inner = axes_of_nodes(topology, domain)
        return Group.of(topology, inner), Group.of(topology, outer)

    def cost(self) -> TransportCost:
        """Return a hop between nodes and one inside, of rows that are tokens instead of copies."""
        return _ForwardCost(self.buffers, self.max_nodes)


@dataclass(frozen=True)
class _ForwardCost(TransportCost):
    max_nodes: Count | None = None

    once_per_member = True
    by_level = True
    early_hops = 1
    address_bytes = 4

    def hops(self, wave: WaveRows, topology: Topology) -> tuple[RowsBetween, ...]:
        num_ranks, members = topology.num_ranks, topology.levels[-1].size
        check_domain_in_node(wave.plan.domain, members)
        rank, nodes = np.arange(num_ranks), num_ranks // members
        # [R, N]: the rank of equal offset in each node.
        rail = np.arange(nodes) * members + rank[:, None] % members
        between = np.zeros((num_ranks, num_ranks))
        between[rank[:, None], rail] = wave.tokens(nodes)
        inside = np.zeros_like(between)
        np.add.at(inside, (rail.repeat(members, 1), rank[None]), wave.tokens(num_ranks))
        return between, inside

    def even_hops(self, routing: EvenRouting, sizes: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
        num_ranks, members = math.prod(sizes), sizes[-1]
        nodes = num_ranks // members
        between = spread_evenly(nodes * routing.tokens(nodes), (*sizes[:-1], 1))
        # A rail rank forwards the tokens of its offset in all nodes.
        inside = (*(0.0 for _ in sizes[1:]), nodes * (members - 1) * routing.tokens(num_ranks))
        return between, inside

    def chunks_of_hops(self) -> tuple[int, int]:
        # A loop over rounds carries the sums of all chunks, so the way back begins with the last round.
        return self.buffers.chunks, self.buffers.chunks if self.buffers.max_rounds == 1 else 1

    def rounds(self, wave: WaveRows, topology: Topology, num_copies: int) -> int:
        members = topology.levels[-1].size
        nodes, capacity = topology.num_ranks // members, self.buffers.rows(num_copies)
        # [offset, node]: a rail rank sends at most a buffer of copies in a round.
        of_rails = wave.counts.reshape(nodes, members, nodes, -1).sum((0, 3), dtype=np.int64)
        return max(super().rounds(wave, topology, num_copies), -(-int(of_rails.max()) // capacity))

    def row_arrays(self, num_tokens: int, per_token: int, topology: Topology) -> RowArrays:
        members = topology.levels[-1].size
        nodes = topology.num_ranks // members
        entries, first = nodes * num_tokens, num_tokens * min(per_token, nodes, self.max_nodes or nodes)
        room = rows_with_padding(self.buffers.rows(num_tokens * per_token), per_token, members)
        sent = min(room, entries * min(per_token, members))
        return RowArrays(sent, room, room, entries, carries_sums=True, sent_first=first, forwarded=entries)


def axes_of_nodes(topology: Topology, domain: int) -> tuple[Axes, Axes]:
    """Return the expert axes between nodes and inside a node."""
    axes, members = topology.expert_axes, topology.levels[-1].size
    if len(axes) < 2:
        raise ValueError(f"expert_axes is {axes}; expected axes of nodes and of the ranks of a node, as for Forward")
    check_domain_in_node(domain, members)
    return axes[:-1], axes[-1:]


def check_domain_in_node(domain: int, members: int) -> None:
    """Check that replicas stay in the node."""
    if domain > members:
        raise ValueError(
            f"plan.domain is {domain}; expected at most {members}, the ranks of a node, as Forward plans inside nodes"
        )
