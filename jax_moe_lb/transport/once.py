"""`Once`: a token travels once to each rank that serves copies of it, and one sum of the outputs returns.

A row carries the token, the slots of the copies on the receiving rank, and the weights. The receiver gathers the
copies in the order of slots, multiplies their outputs by the weights, and sums them per row. The source adds the sums
of all ranks. Partial sums are computed in float32 or wider and travel in the dtype of the tokens.
"""

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.collectives.ragged_all_to_all import Group
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import Split, nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, Placement, Tokens, iota
from jax_moe_lb.transport.cost import RowArrays, TransportCost
from jax_moe_lb.transport.dispatch import Dispatch, check_rails
from jax_moe_lb.transport.exchange import RoutingWeights
from jax_moe_lb.transport.lists import Lists, PerChoice, rows_with_padding
from jax_moe_lb.transport.once_rounds import ListReceipt, Route, serve_lists
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.serving_ranks import in_order, preferring
from jax_moe_lb.transport.wave_rows import EvenRouting, RowsBetween, WaveRows, spread_evenly


@dataclass(frozen=True)
class ListDispatch(Dispatch[ListReceipt]):
    """Base class of dispatches whose rows are tokens in lists: `Once` and `Forward`."""

    takes_chunks: ClassVar[bool] = True
    takes_saved: ClassVar[bool] = True

    @abc.abstractmethod
    def groups(self, domain: int, topology: Topology) -> tuple[Group, Group | None]:
        """Return the ranks that exchange lists in the last hop and in the first of two hops.

        Args:
            domain: ranks per domain of the plan.
            topology: topology of the layer.

        Raises:
            ValueError: the dispatch does not support the domain or the axes.
        """

    def serve_plan(
        self,
        x: Tokens,
        weights: RoutingWeights,
        experts: Experts,
        plan: Plan,
        receipt: ListReceipt,
        replicate: Replicate,
        topology: Topology,
    ) -> Tokens:
        """Serve all copies of a plan, in rounds of lists; see `Dispatch.serve_plan`."""
        route = Route(self, *self.groups(plan.domain, topology))
        outputs = serve_lists((x, weights, experts, plan, receipt), replicate, route, topology)
        # Choices with invalid routing are in no list: without NaN, their loss would be silent.
        return jnp.where(jnp.isfinite(weights).all(1, keepdims=True), outputs, jnp.nan)


@dataclass(frozen=True)
class Once(ListDispatch):
    """Dispatch of each token once to every rank that serves copies of it.

    Use it if tokens often have several experts on one rank: few ranks, or many experts per token. Of 8 experts per
    token on 8 ranks, uniformly routed, 5.3 rows travel. The rounds are those of `Direct`. Outputs differ from those of
    `Direct` by rounding, because sums have another order. A `transfer` quantizes tokens only: sums return in the dtype
    of the tokens.

    Examples:
        >>> from jax_moe_lb import Buffers, System
        >>> from jax_moe_lb.balancers import Exact
        >>> system = System(Exact(), dispatch=Once(Buffers(headroom=1.1)), replica_slots=2)
        >>> system.dispatch.buffers.headroom
        1.1
    """

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ListReceipt:
        """Return the rows of this rank; see `Dispatch`.

        Raises:
            ValueError: `plan.rails` is set.
        """
        check_rails(plan, self)
        axes = topology.expert_axes
        going = nearest_first(counts, plan.quota, jax.lax.axis_index(axes), plan.domain, plan.split)
        capacity = self.buffers.rows(experts.size)
        # The rounds of `Direct`: in each, a rank receives at most a receive buffer of copies.
        rounds = agreed((load(plan).max() + capacity - 1) // capacity, axes)
        group, _ = self.groups(plan.domain, topology)
        lists = lists_of(experts, going, plan.placement, plan.split, rounds, group, self.buffers.chunks)
        return ListReceipt(rounds, None, lists, None)

    def groups(self, domain: int, topology: Topology) -> tuple[Group, Group | None]:
        """Return all ranks as one group, and no first hop; see `ListDispatch`."""
        return Group.of(topology, topology.expert_axes), None

    def cost(self) -> TransportCost:
        """Return one hop of rows that are tokens instead of copies."""
        return _OnceCost(self.buffers)


class _OnceCost(TransportCost):
    once_per_member = True
    # An all-gather of the sizes of all lists: one integer for each pair of ranks.
    address_bytes = 4

    def hops(self, wave: WaveRows, topology: Topology) -> tuple[RowsBetween, ...]:
        return (wave.tokens(topology.num_ranks),)

    def even_hops(self, routing: EvenRouting, sizes: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
        num_ranks = math.prod(sizes)
        return (spread_evenly(num_ranks * routing.tokens(num_ranks), sizes),)

    def row_arrays(self, num_tokens: int, per_token: int, topology: Topology) -> RowArrays:
        room = rows_with_padding(self.buffers.rows(num_tokens * per_token), per_token, topology.num_ranks)
        sent = num_tokens * min(per_token, topology.num_ranks)
        return RowArrays(sent, room, room, num_tokens, carries_sums=True)


def lists_of(
    experts: PerChoice,
    going: Int[Array, "E P"],
    placement: Placement,
    split: Split,
    rounds: Int[Array, ""],
    group: Group,
    chunks: int = 1,
) -> Lists:
    """Make the lists of a rank for the ranks that serve its choices."""
    # With a proportional split, a source sends copies of an expert to several ranks, and `preferring` chooses among
    # them. With the nearest split, most experts have one rank, so copies take their ranks in the order of entries.
    num_experts, num_ranks = going.shape
    rank = preferring(experts, going) if split.tier == "proportional" else in_order(experts, going)
    # Empty slots have an expert out of range, which the scatter drops.
    held = jnp.where(placement < 0, num_experts, placement)
    code = jnp.zeros_like(held, shape=(num_ranks, num_experts))
    code = code.at[iota(num_ranks)[:, None], held].set(iota(held.shape[1]) + 1, mode="drop")
    return Lists.of(rank, code[jnp.maximum(rank, 0), jnp.maximum(experts, 0)], rounds, group, chunks=chunks)
