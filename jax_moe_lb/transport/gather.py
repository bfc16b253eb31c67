"""`Gather` copies weights into slots straight from their homes, by XLA's collectives; gradients return the same way."""

from dataclasses import dataclass
from typing import Any

import jax

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.fetch import add_at_home, fetch
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.replicate import Replicate


@dataclass(frozen=True)
class Gather(Replicate):
    """Copies the expert of every slot from the expert's home.

    It is the default and runs everywhere, also between processes; `ops/fetch.py` says how. Take `PeerCopy` where copies
    shall run beside the experts' products, and `Relay` where some experts have many replicas.

    Examples:
        >>> from jax_moe_lb import Greedy, System
        >>> System(Greedy(), Gather(), replica_slots=2).replicate
        Gather()
    """

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """Fetches the replicas at once; see `Replicate.start`.

        Raises:
            ValueError: the plan asks for relays.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Gather copies every slot from home")
        wanted = plan.placement[:, plan.num_home :]
        return jax.tree.map(lambda home: fetch(home, wanted, plan.num_home, topology.expert_axes), experts)

    def join(self, pending: Experts, after: Any) -> Experts:
        """Returns what `start` returned."""
        del after
        return pending

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home, in an order that depends on the plan alone."""
        wanted = plan.placement[:, plan.num_home :]
        leaves, tree = jax.tree.flatten(sums)
        kinds, axes = tuple(jax.tree.leaves(gradients)), topology.expert_axes
        return jax.tree.unflatten(tree, add_at_home(tuple(leaves), kinds, wanted, plan.num_home, plan.domain, axes))
