"""A dispatch serves: it sends token copies to the ranks that serve them, and brings the outputs back."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.stats import OnFault, check_rounds
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens
from jax_moe_lb.core.validation import check_plan, ensure, ensure_legal, fallback_to_plain
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.exchange import Exchange, ReceiptT, RoutingWeights
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import in_rounds


class Routed(NamedTuple):
    """Holds what is known before there is a plan: where the tokens want to go.

    Args:
        experts: `[T, K]` int32, the expert of each copy of this rank, `NO_EXPERT` for one that goes nowhere.
        counts: `[R, E]` int32, the copies that each rank routes to each expert; equal on all ranks.
        weights: `[T, K]`, by which the outputs of a token's copies are summed, in float32 at least.
    """

    experts: Int[Array, "T K"]
    counts: Counts
    weights: RoutingWeights


class Served(NamedTuple):
    """Holds what a dispatch has done.

    Args:
        outputs: `[T, H]`, the weighted sums of the experts' outputs; copies that go nowhere count as 0.
        plan: the legal plan by which they were served.
        rounds: int32, how often the receive buffer was filled, over all waves; 1 is usual under a good plan.
        made: the plan as the balancer made it.
        dynamic: `[E]`, which experts it may take from home; `None`: all.
        is_legal: whether the plan was served as it was made; always, under checks that stop the program.
        is_whole: whether all rounds that the plan needs were served, likewise.
    """

    outputs: Tokens
    plan: Plan
    rounds: Int[Array, ""]
    made: Plan
    dynamic: Bool[Array, "E"] | None
    is_legal: Bool[Array, ""]
    is_whole: Bool[Array, ""]


def served_plan(
    made: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None, on_fault: OnFault
) -> tuple[Plan, Bool[Array, ""]]:
    """Returns a legal plan to serve by, and whether it is the one that was made.

    Args:
        made: the plan that the balancer made.
        counts: `[R, E]` int32, the counts that it was made for.
        dynamic: `[E]`, false for static experts; `None`: all are dynamic.
        on_fault: under "raise" the program stops at an illegal plan, under "record" that of plain expert parallelism
            takes its place.
    """
    if on_fault == "raise":
        return ensure_legal(made, counts, dynamic), jnp.bool_(True)
    return fallback_to_plain(made, counts, dynamic)


def abort_unless(
    ok: Bool[Array, ""], receipt: ReceiptT, on_fault: OnFault, check: Callable[..., None], *args: Any
) -> ReceiptT:
    """Returns the receipt; under "raise" the program stops where not `ok`, with what `check` says of `args`.

    Args:
        ok: equal on all ranks of a group.
        receipt: all that follows must read it.
        on_fault: under "record" nothing is done.
        check: refuses `args` with a ValueError.
        *args: pytrees of arrays, equal on all ranks of the group.
    """
    if on_fault == "record":
        return receipt
    return replace(receipt, rounds=receipt.rounds + ensure(ok, check, *args))


@dataclass(frozen=True)
class Dispatch(Exchange[ReceiptT]):
    """Serves tokens. Write the methods of an `Exchange`; then this serves in rounds of it.

    Take `Direct`, `MultiRailDispatch` or `TwoPhase`, or write one when rows can travel in a better way than theirs. A
    dispatch that computes before there is a plan overrides `serve`, as `TwoPhase` does. `cost` describes its traffic to
    the simulator, which tells no dispatch by its class.

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
        on_fault: OnFault,
    ) -> tuple[Served, State]:
        """Brings every copy of every token to its expert and back; the base form plans first, then serves in rounds.

        Args:
            x: `[T, H]`, the tokens of this rank.
            routed: which experts they go to, with what weights, and the counts of all ranks.
            experts: the `L` home experts of this rank.
            plan: the plan that the balancer starts from, that of plain expert parallelism.
            state: what the balancer remembers.
            balancer: it edits the plan.
            replicate: it fills the slots.
            topology: its expert axes are the ranks that serve together.
            on_fault: what to do about a plan that is not legal, or needs more rounds than there are.

        Returns:
            What was served, by a legal plan, and the balancer's new state.
        """
        with jax.named_scope("plan"):
            made, state = balancer.rebalance(routed.counts, plan, topology, state)
            # A bad plan must not reach `address`, which computes offsets of copies from it.
            plan, is_legal = served_plan(made, routed.counts, None, on_fault)
        with jax.named_scope("address"):
            receipt = self.address(routed.experts, routed.counts, plan, topology)
            if (follows_plan := receipt.follows_plan) is not None:
                receipt = abort_unless(follows_plan, receipt, on_fault, check_plan, made, routed.counts)
                is_legal = is_legal & follows_plan
            receipt, is_whole = self.within_rounds(receipt, on_fault)
        # Named, so that a policy of `jax.checkpoint` can keep them, and nobody plans again in the backward pass.
        plan, receipt = checkpoint_name((plan, receipt), "moe_plan")
        outputs = in_rounds(x, routed.weights, experts, plan, receipt, replicate, self, topology)
        return Served(outputs, plan, receipt.rounds, made, None, is_legal, is_whole), state

    def within_rounds(self, receipt: ReceiptT, on_fault: OnFault) -> tuple[ReceiptT, Bool[Array, ""]]:
        """Returns the receipt, and whether `max_rounds` suffices for it; under "raise" the program stops if not.

        Args:
            receipt: what `address` returned.
            on_fault: what to do where it does not.
        """
        if self.buffers.max_rounds is None:
            return receipt, jnp.bool_(True)
        is_whole = receipt.rounds <= self.buffers.max_rounds
        limit = np.int32(self.buffers.max_rounds)
        return abort_unless(is_whole, receipt, on_fault, check_rounds, receipt.rounds, limit), is_whole

    def cost(self) -> TransportCost:
        """Return the waves, hops and buffers of this dispatch, for the simulator: by default one wave of one hop."""
        return TransportCost(self.buffers)
