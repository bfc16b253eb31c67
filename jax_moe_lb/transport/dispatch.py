"""Base class of dispatches: token copies to the serving ranks, expert networks, and outputs back."""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens
from jax_moe_lb.core.validation import fallback_to_plain
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.exchange import DispatchOptions, Exchange, ReceiptT, RoutingWeights
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import in_rounds


class Routed(NamedTuple):
    """Routing of a microbatch, before the plan."""

    experts: Int[Array, "T K"]  # expert of each copy of this rank; `NO_EXPERT` for unrouted copies
    counts: Counts  # copies by source rank and expert; equal on all ranks
    weights: RoutingWeights  # weights of the outputs of a token's copies, float32 or wider


class Served(NamedTuple):
    """Result of a dispatch."""

    outputs: Tokens  # weighted sums of the expert outputs; unrouted copies count as 0
    plan: Plan  # legal plan of the served copies
    rounds: Int[Array, ""]  # rounds over all waves; usually 1 with a balanced plan
    made: Plan  # plan returned by the balancer
    dynamic: Bool[Array, "E"] | None  # experts the balancer may move from home; `None`: all
    is_legal: Bool[Array, ""]  # whether `made` was legal and served
    is_whole: Bool[Array, ""]  # whether all rounds of the plan were run


@dataclass(frozen=True)
@checked_fields
class Dispatch(DispatchOptions[ReceiptT]):
    """Transport of tokens to the experts and back.

    Use `Direct`, `Once`, `Forward`, `MultiRailDispatch` or `TwoPhase`. To transport copies in another way, write a
    subclass of `CopyDispatch`. For rows that are not copies, define `serve_plan`, as `Once` does. To compute before the
    plan exists, override `serve`, as `TwoPhase` does. `cost` describes the traffic to the simulator, which does not
    depend on the class.

    Examples:
        >>> from jax_moe_lb.transport import Direct, MultiRailDispatch, TwoPhase
        >>> [issubclass(kind, Dispatch) for kind in (Direct, MultiRailDispatch, TwoPhase)]
        [True, True, True]
    """

    def serve(
        self,
        x: Tokens,
        routed: Routed,
        experts: Experts,
        plan: Plan,
        state: State,
        *,
        balancer: Balancer,
        replicate: Replicate,
        topology: Topology,
    ) -> tuple[Served, State]:
        """Send every token copy to the expert and return the outputs.

        The base class computes the plan first, then runs all rounds.

        Args:
            x: `[T, H]`, tokens of this rank.
            routed: experts and weights of these tokens, and the counts of all ranks.
            experts: the `L` home experts of this rank.
            plan: initial plan, that is plain expert parallelism.
            state: balancer state.
            balancer: strategy that edits the plan.
            replicate: transport of weights into the slots.
            topology: topology of the layer; its expert axes are the ranks of the group.

        Returns:
            The outputs with the served plan, and the new balancer state.
        """
        with jax.named_scope("plan"):
            made, state = balancer.rebalance(routed.counts, plan, topology, state)
            # Replace an illegal plan before `address`, which computes copy offsets from it.
            plan, is_legal = fallback_to_plain(made, routed.counts)
        with jax.named_scope("address"):
            receipt = self.address(routed.experts, routed.counts, plan, topology)
            if (follows_plan := receipt.follows_plan) is not None:
                is_legal = is_legal & follows_plan
            is_whole = self.within_rounds(receipt)
        # Named for policies of `jax.checkpoint`: a saved plan is not computed again in the backward pass.
        plan, receipt = checkpoint_name((plan, receipt), "moe_plan")
        outputs = self.serve_plan(x, routed.weights, experts, plan, receipt, replicate, topology)
        return Served(outputs, plan, receipt.rounds, made, None, is_legal, is_whole), state

    @abc.abstractmethod
    def serve_plan(
        self,
        x: Tokens,
        weights: RoutingWeights,
        experts: Experts,
        plan: Plan,
        receipt: ReceiptT,
        replicate: Replicate,
        topology: Topology,
    ) -> Tokens:
        """Serve all copies of a legal plan.

        Args:
            x: `[T, H]`, tokens of this rank.
            weights: `[T, K]`, weights of the outputs of a token's copies.
            experts: the `L` home experts of this rank.
            plan: plan, legal and equal on all ranks.
            receipt: return value of `address` for this plan.
            replicate: transport of weights into the slots.
            topology: topology of the layer.

        Returns:
            `[T, H]`, weighted sums; unrouted choices count as 0.
        """

    def limited_to(self, max_nodes: int) -> "Dispatch":
        """Return the dispatch for a router that limits the nodes of a token; the same one if its buffers need no limit.

        Args:
            max_nodes: largest number of nodes with experts of one token.
        """
        del max_nodes
        return self

    def excess_nodes(self, experts: Int[Array, "T K"], num_experts: int, topology: Topology) -> Int[Array, "T"] | None:
        """Return the number of nodes of each token with more nodes than the buffers have room for, and 0 for others.

        `moe` treats such tokens as invalid routing. By default `None`: there is room for any token.

        Args:
            experts: `[T, K]` integers, expert per choice by place; those out of range are ignored.
            num_experts: `E`.
            topology: topology of the layer.
        """
        del experts, num_experts, topology
        return None

    def within_rounds(self, receipt: ReceiptT) -> Bool[Array, ""]:
        """Return whether `max_rounds` suffices.

        Args:
            receipt: return value of `address`.
        """
        limit = self.buffers.max_rounds
        return jnp.bool_(True) if limit is None else receipt.rounds <= limit

    def cost(self) -> TransportCost:
        """Return the waves, hops and buffers of this dispatch for the simulator; by default one wave of one hop."""
        return TransportCost(self.buffers)


@dataclass(frozen=True)
@checked_fields
class CopyDispatch(Dispatch[ReceiptT], Exchange[ReceiptT]):
    """Dispatch of one row per token copy, in rounds of `send` and `send_back`.

    Examples:
        >>> from jax_moe_lb.transport import Direct, MultiRailDispatch, Once
        >>> [issubclass(kind, CopyDispatch) for kind in (Direct, MultiRailDispatch, Once)]
        [True, True, False]
    """

    def serve_plan(
        self,
        x: Tokens,
        weights: RoutingWeights,
        experts: Experts,
        plan: Plan,
        receipt: ReceiptT,
        replicate: Replicate,
        topology: Topology,
    ) -> Tokens:
        """Serve all copies of a legal plan by `in_rounds`, whose inputs these are."""
        return in_rounds((x, weights, experts, plan, receipt), replicate, self, topology)


def check_rails(plan: Plan, dispatch: Dispatch) -> None:
    """Check that a plan has no rails."""
    if plan.rails is not None:
        raise ValueError(f"plan.rails is set; expected None, as {type(dispatch).__name__} does not spray")
