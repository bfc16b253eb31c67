"""`Once`: a token travels once to each rank that serves copies of it, and one sum of their outputs returns.

A row carries the token, the slots of its copies on the receiving rank, and their weights. The receiver gathers the
copies in the order of slots, multiplies their outputs by the weights, and sums them per row. The source adds the sums
of all ranks. Partial sums are computed in float32 or wider and travel in the dtype of the tokens.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.permutes import agreed
from jax_moe_lb.core.plan import Plan, load
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, Placement, Tokens, iota
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.exchange import RoutingWeights
from jax_moe_lb.transport.lists import Group, Lists, PerChoice
from jax_moe_lb.transport.once_rounds import ListReceipt, Route, serve_lists
from jax_moe_lb.transport.replicate import Replicate


@dataclass(frozen=True)
class Once(Dispatch[ListReceipt]):
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
        lists = lists_of(experts, going, plan.placement, rounds, Group.of(axes, topology))
        return ListReceipt(rounds, None, lists, None)

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
        route = Route(self, Group.of(topology.expert_axes, topology), None)
        return serve_lists(x, weights, experts, plan, receipt, replicate, route, topology)

    def cost(self) -> TransportCost:
        """Return one hop of rows that are tokens instead of copies."""
        return _OnceCost(self.buffers)


class _OnceCost(TransportCost):
    once_per_member = True
    # An all-gather of the sizes of all lists: one integer for each pair of ranks.
    address_bytes = 4


def check_rails(plan: Plan, dispatch: Dispatch) -> None:
    """Check that a plan has no rails.

    Raises:
        ValueError: `plan.rails` is set.
    """
    if plan.rails is not None:
        raise ValueError(f"plan.rails is set; expected None, as {type(dispatch).__name__} does not spray")


def lists_of(
    experts: PerChoice, going: Int[Array, "E P"], placement: Placement, steps: Int[Array, ""], group: Group
) -> Lists:
    """Make the lists of a rank for the ranks that serve its choices.

    In the order of entries, the first copies of an expert go to the lowest rank, as in `exchange.sending_order`.

    Args:
        experts: `[N, K]` int32, expert of each choice; negative for none.
        going: `[E, P]` int32, copies of each expert to each rank.
        placement: `[P, S]` int32, expert in each slot; -1 for an empty slot.
        steps: int32, number of steps.
        group: ranks of the lists.
    """
    (num_experts, num_ranks), flat = going.shape, experts.reshape(-1)
    by_expert = jnp.argsort(jnp.where(flat < 0, num_experts, flat), stable=True)
    ranks = jnp.tile(iota(num_ranks), num_experts)
    in_order = jnp.repeat(ranks, going.reshape(-1), total_repeat_length=flat.shape[0])
    rank = jnp.zeros_like(in_order).at[by_expert].set(in_order, unique_indices=True).reshape(experts.shape)
    # Empty slots have an expert out of range, which the scatter drops.
    held = jnp.where(placement < 0, num_experts, placement)
    code = jnp.zeros_like(held, shape=(num_ranks, num_experts))
    code = code.at[iota(num_ranks)[:, None], held].set(iota(held.shape[1]) + 1, mode="drop")
    code = code[rank, jnp.maximum(experts, 0)]
    return Lists.of(jnp.where(experts < 0, -1, rank), code, steps, group)
