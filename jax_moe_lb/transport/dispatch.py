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
from jax_moe_lb.core.stats import Checks, check_rounds
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens
from jax_moe_lb.core.validation import check_plan, ensure, ensure_legal, fallback_to_plain
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.exchange import Exchange, ReceiptT, Weights
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
    weights: Weights


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
    made: Plan, counts: Counts, dynamic: Bool[Array, "E"] | None, checks: Checks
) -> tuple[Plan, Bool[Array, ""]]:
    """Returns a legal plan to serve by, and whether it is the one that was made.

    Args:
        made: the plan that the balancer made.
        counts: `[R, E]` int32, the counts that it was made for.
        dynamic: `[E]`, false for static experts; `None`: all are dynamic.
        checks: under "callback" the program stops at an illegal plan, under "deferred" that of plain expert parallelism
            takes its place.
    """
    if checks == "callback":
        return ensure_legal(made, counts, dynamic), jnp.bool_(True)
    return fallback_to_plain(made, counts, dynamic)


def abort_unless(
    ok: Bool[Array, ""], receipt: ReceiptT, checks: Checks, check: Callable[..., None], *args: Any
) -> ReceiptT:
    """Returns the receipt; under "callback" the program stops where not `ok`, with what `check` says of `args`.

    Args:
        ok: equal on all ranks of a group.
        receipt: all that follows must read it.
        checks: under "deferred" nothing is done.
        check: refuses `args` with a ValueError.
        *args: pytrees of arrays, equal on all ranks of the group.
    """
    if checks == "deferred":
        return receipt
    return replace(receipt, rounds=receipt.rounds + ensure(ok, check, *args))


@dataclass(frozen=True)
class Dispatch(Exchange[ReceiptT]):
    """Serves tokens. Write the methods of an `Exchange`; then this serves in rounds of it.

    Take `Direct`, `MultiRailDispatch` or `TwoPhase`, or write one when rows can travel in a better way than theirs. A
    dispatch that computes before there is a plan overrides `serve`, as `TwoPhase` does, and `waves` with it. The other
    methods tell the simulator what moves, so that it needs to know no dispatch by name.

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
        checks: Checks,
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
            checks: what to do about a plan that is not legal, or needs more rounds than there are.

        Returns:
            What was served, by a legal plan, and the balancer's new state.
        """
        with jax.named_scope("plan"):
            made, state = balancer.rebalance(routed.counts, plan, topology, state)
            # A bad plan must not reach `address`, which computes offsets of copies from it.
            plan, is_legal = served_plan(made, routed.counts, None, checks)
        with jax.named_scope("address"):
            receipt = self.address(routed.experts, routed.counts, plan, topology)
            if (follows_plan := receipt.follows_plan) is not None:
                receipt = abort_unless(follows_plan, receipt, checks, check_plan, made, routed.counts)
                is_legal = is_legal & follows_plan
            receipt, is_whole = self.within_rounds(receipt, checks)
        # Named, so that a policy of `jax.checkpoint` can keep them, and nobody plans again in the backward pass.
        plan, receipt = checkpoint_name((plan, receipt), "moe_plan")
        outputs = in_rounds(x, routed.weights, experts, plan, receipt, replicate, self, topology)
        return Served(outputs, plan, receipt.rounds, made, None, is_legal, is_whole), state

    def within_rounds(self, receipt: ReceiptT, checks: Checks) -> tuple[ReceiptT, Bool[Array, ""]]:
        """Returns the receipt, and whether `max_rounds` suffices for it; under "callback" the program stops if not.

        Args:
            receipt: what `address` returned.
            checks: what to do where it does not.
        """
        if self.max_rounds is None:
            return receipt, jnp.bool_(True)
        is_whole = receipt.rounds <= self.max_rounds
        limit = np.int32(self.max_rounds)
        return abort_unless(is_whole, receipt, checks, check_rounds, receipt.rounds, limit), is_whole

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """Says what is served together, wave by wave, on a host: one wave of everything, by default.

        The simulator asks for it. Override it together with `serve`.

        Args:
            counts: `[R, E]` integers of NumPy, the copies that each rank routes to each expert.
            start: the plan that the balancer started from.
            plan: the plan that the balancer made of it, in NumPy arrays.
            balancer: the balancer that made it.

        Returns:
            The counts and the plan of each wave. All but the last need no plan.

        Raises:
            ValueError: the plan is not legal, or this dispatch cannot serve by it.
        """
        del start, balancer
        check_plan(plan, counts)
        return [(counts, plan)]

    def hops(self, rows: Int[np.ndarray, "R R"], plan: Plan, topology: Topology) -> tuple[Int[np.ndarray, "R R"], ...]:
        """Says by which exchanges, one after the other, rows come to the ranks that serve them, on a host.

        The simulator asks for it. Override it where rows pass other ranks on their way, as in `MultiRailDispatch`.

        Args:
            rows: `[R, R]` integers, the token copies from rank to rank, as `rows_between` counts them.
            plan: the plan of their wave, in NumPy arrays.
            topology: it says which ranks share a node, and how many rails a node has.

        Returns:
            What each rank sends to each in every exchange: by default one exchange, in which rows go straight there.
        """
        del plan, topology
        return (rows,)

    @property
    def passes_home(self) -> bool:
        """Says whether rows of the second wave come from the homes of their experts, where the first exchange brought
        all rows, and whether their outputs return there before all outputs go back; false by default.

        The simulator asks for it. Override it together with `waves`, whose second counts are then those of homes.
        """
        return False

    def buffer_rows(self, num_copies: int) -> int:
        """Counts the rows that a rank has room for: those that it can receive in one round, by default.

        The simulator asks for it.

        Args:
            num_copies: `T * K`, the copies of every rank.
        """
        return self.capacity(num_copies)

    @property
    def address_bytes(self) -> int:
        """Says in how many bytes a rank tells every other where its rows are, per layer: two integers, 8, by default.

        The simulator asks for it.
        """
        return 8
