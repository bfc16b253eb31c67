"""What a dispatch is: it serves. It sends token copies to the ranks that serve them, and brings the outputs back."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.experts import Experts
from jax_moe_lb.legality import check_plan, ensure_legal
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.exchange import Copies, Exchange, Receipt, ReceiptT
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import in_rounds, to_sending_order
from jax_moe_lb.types import Counts, State, Tokens


class Routed(NamedTuple):
    """What is known before there is a plan.

    Args:
        experts: the expert of each copy of this rank, `NO_EXPERT` for one that goes nowhere.
        counts: `[R, E]`, the load of all ranks.
    """

    experts: Int[Array, "T K"]
    counts: Counts


class Served(NamedTuple):
    """What a dispatch has done.

    Args:
        copies: outputs of the experts, in the sending order of `receipt`; 0 for copies that go nowhere.
        receipt: which copy stands where in that order.
        plan: who served them.
        rounds: how often the receive buffer was filled, over all waves.
    """

    copies: Copies
    receipt: Receipt
    plan: Plan
    rounds: Int[Array, ""]


@dataclass(frozen=True)
class Dispatch(Exchange[ReceiptT]):
    """How tokens are served. Write the methods of an `Exchange`; then this serves in rounds of it.

    A dispatch that computes before there is a plan overrides `serve`, as `Staged` does, and `waves` with it. The other
    methods tell the simulator what moves, so that it needs to know no dispatch by name.

    Examples:
        >>> from jax_moe_lb import Direct, Spray, Staged
        >>> [issubclass(kind, Dispatch) for kind in (Direct, Spray, Staged)]
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
        """Brings every copy of every token to its expert and back; the base form plans first, then serves in rounds.

        Args:
            x: the tokens of this rank.
            routed: where they go.
            experts: the `L` home experts of this rank.
            plan: what the balancer starts from.
            state: what the balancer remembers.
            balancer: edits the plan.
            replicate: fills the slots.
            topology: its expert axes.

        Returns:
            What was served, by a legal plan, and the balancer's new state.
        """
        plan, state = balancer.rebalance(routed.counts, plan, topology, state)
        # A bad plan must not reach `address`, which computes offsets of copies from it.
        plan = ensure_legal(plan, routed.counts)
        receipt = self.address(routed.experts, routed.counts, plan, topology)
        sent = checkpoint_name(to_sending_order(x, receipt, routed.experts.shape[1]), "moe_sent")
        copies = in_rounds(sent, experts, plan, receipt, replicate, self, topology)
        return Served(copies, receipt, plan, receipt.rounds), state

    def waves(self, counts: Counts, start: Plan, plan: Plan, balancer: Balancer) -> list[tuple[Counts, Plan]]:
        """What is served together, wave by wave, on a host: one wave of everything, by default.

        Args:
            counts: `[R, E]`, NumPy's.
            start: what the balancer started from.
            plan: what the balancer made of it, NumPy's.
            balancer: the one that did.

        Returns:
            The counts and the plan of each wave. All but the last need no plan.

        Raises:
            ValueError: the plan is not legal, or this dispatch cannot serve by it.
        """
        del start, balancer
        check_plan(plan, counts)
        return [(counts, plan)]

    def hops(self, rows: Int[np.ndarray, "R R"], plan: Plan, topology: Topology) -> tuple[Int[np.ndarray, "R R"], ...]:
        """The exchanges, one after the other, by which rows come to the ranks that serve them, on a host.

        Args:
            rows: token copies from rank to rank, of `rows_between`.
            plan: the plan of their wave, NumPy's.
            topology: its nodes and rails.

        Returns:
            What each rank sends to each in every exchange: by default one exchange, in which rows go straight there.
        """
        del plan, topology
        return (rows,)

    @property
    def address_bytes(self) -> int:
        """What a rank tells every other of where its rows are, in bytes per layer; two integers by default."""
        return 8
