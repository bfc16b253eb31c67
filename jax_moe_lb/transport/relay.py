"""Replicating expert weights along relays, so that the home of a hot expert sends few copies of it."""

from dataclasses import dataclass, field, replace
from typing import Any

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops._peer import Pending
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.relay import check_relay, relay
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.peer_copy import PeerCopy


@dataclass(frozen=True)
class Relay:
    """UltraEP's adaptive relays (arXiv 2606.04101): of an expert with many replicas, some forward it to the others.

    With `n` replicas these are `min(floor(sqrt(n)), max_relays, n - 1)`, on the ranks that send least so far; see
    `ffi/planning/relay.h`. All ranks plan the same trees from the placement. Slots hold what `PeerCopy` alone would
    put there, and gradients have the same bits: they return home directly, and are added by rank, then by slot.

    Between processes, and where the custom calls were not built, `PeerCopy` is `Gather`, and there are no relays.

    It deviates from the authors' code in that it does not stop to use relays in domains of 8 ranks or less.

    Args:
        copies: makes the copies, and forwards them.
        min_replicas: an expert with fewer is copied from home; at least 2.
        max_relays: of one expert.
        min_gain: copies by which the busiest sender of a tree must be below home alone.
    """

    copies: PeerCopy = field(default_factory=PeerCopy)
    min_replicas: int = 4
    max_relays: int = 8
    min_gain: int = 2

    def __post_init__(self) -> None:
        check_relay(self.min_replicas, self.max_relays, self.min_gain)

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The weights of this rank's slots.

        Differentiable in `experts`: the transpose sums the gradients of all replicas at home.

        Args:
            experts: the `L` home experts of this rank.
            plan: its placement says what the `S` slots hold; an empty slot becomes 0.
            topology: its expert axes.

        Raises:
            ValueError: the plan has relays.
        """
        return self.copies(experts, self.plan(plan), topology)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies of the replicas alone; see `PeerCopy`."""
        return self.copies.start(experts, self.plan(plan), topology)

    def join(self, pending: Pending, after: Any) -> Experts:
        """The replicas, once they are there and `after` has been computed."""
        return self.copies.join(pending, after)

    def sum_at_home(self, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """The transpose of `start` and `join`."""
        return self.copies.sum_at_home(gradients, plan, topology)

    def plan(self, plan: Plan) -> Plan:
        """The same plan with relays; the same on all ranks.

        Raises:
            ValueError: it has some.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Relay plans them; PeerCopy takes them as they are")
        options = self.min_replicas, self.max_relays, self.min_gain
        return replace(plan, relay=relay(plan.placement, plan.num_home, *options))
