"""`Relay` replicates expert weights along relays, so that the home of a hot expert sends few copies of it."""

from dataclasses import dataclass, field, replace
from typing import Any

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops._peer import Pending
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.relay import check_relay, relay
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.peer_copy import PeerCopy
from jax_moe_lb.transport.replicate import Replicate


@dataclass(frozen=True)
class Relay(Replicate):
    """Plans UltraEP's adaptive relays (arXiv 2606.04101): of an expert's many replicas, some forward it to the others.

    Take it inside one NVLink domain where single experts have four replicas or more; elsewhere it does what `PeerCopy`
    does.

    With `n` replicas these are `min(floor(sqrt(n)), max_relays, n - 1)`, on the ranks that send least so far; see
    `ffi/planning/relay.h`. All ranks plan the same trees from the placement. Slots hold what `PeerCopy` alone would
    put there, and gradients have the same bits: they return home directly, and are added by rank, then by slot.

    Where `PeerCopy` is `Gather`, there are no relays.

    It deviates from the authors' code in that it does not stop to use relays in domains of 8 ranks or less.

    Args:
        copies: makes the copies, and forwards them.
        min_replicas: an expert with fewer replicas is copied from home; at least 2. The authors' code has 4.
        max_relays: the most relays of one expert; 8 in the authors' code.
        min_gain: how many copies fewer the busiest sender of a tree must send than home alone would; 2 in the
            authors' code.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb import Plan, traffic
        >>> placement = np.full((8, 2), -1, np.int32)
        >>> placement[:, 0], placement[1:, 1] = np.arange(8), 0  # expert 0 has seven replicas
        >>> plan = Plan(placement, np.zeros((8, 8), np.int32), domain=8)
        >>> counts = np.zeros((8, 8), np.int32)
        >>> print(traffic(plan, counts).fan_out, traffic(Relay().plan(plan), counts).fan_out)
        [7 0 0 0 0 0 0 0] [2 3 2 0 0 0 0 0]
    """

    copies: PeerCopy = field(default_factory=PeerCopy)
    min_replicas: int = 4
    max_relays: int = 8
    min_gain: int = 2

    def __post_init__(self) -> None:
        check_relay(self.min_replicas, self.max_relays, self.min_gain)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies, along relays.

        Raises:
            ValueError: the plan has relays already.
        """
        return self.copies.start(experts, self.plan(plan), topology)

    def join(self, pending: Pending, after: Any) -> Experts:
        """Waits for the copies, after `after` has been computed."""
        return self.copies.join(pending, after)

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home: they return straight there, without relays."""
        return self.copies.add_at_home(sums, gradients, plan, topology)

    def plan(self, plan: Plan) -> Plan:
        """Returns the plan with relays, which follow from its placement alone, so that all ranks plan the same.

        Args:
            plan: a plan without relays, equal on all ranks.

        Raises:
            ValueError: it has relays already.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Relay plans them; PeerCopy takes them as they are")
        options = self.min_replicas, self.max_relays, self.min_gain
        return replace(plan, relay=relay(plan.placement, plan.num_home, *options))

    @property
    def uses_copy_engines(self) -> bool:
        """Says whether copy engines move the weights, which is up to `copies`: yes."""
        return self.copies.uses_copy_engines

    def again(self) -> "Relay":
        """Returns the same relays over copies of another name."""
        return replace(self, copies=self.copies.again())
