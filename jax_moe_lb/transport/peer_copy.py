"""`PeerCopy` fills slots by copies that need no compute of the ranks they come from."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import Array, Int

from jax_moe_lb._neighbours import can_copy
from jax_moe_lb.experts import Experts
from jax_moe_lb.ops._peer import Pending, Route
from jax_moe_lb.ops.arrivals import Wanted
from jax_moe_lb.ops.copy_expert_weights import add_at_home, join, start
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.replicate import Replicate


@dataclass(frozen=True)
class PeerCopy(Replicate):
    """Copies the expert of every slot from home, or from the rank that `plan.relay` names, on copy engines.

    Take it inside one NVLink domain, above all with `TwoPhase`, whose static wave hides the copies. All kinds of
    weights travel in one call; `ops/copy_expert_weights.py` says how. Copies equal those of `Gather`. Gradients are
    added by rank, then by slot.

    It works where the ranks of a domain are devices of one process, of one for the whole group or of one for each node;
    and on GPUs where they are processes of one machine with one GPU each, whose memory CUDA can share. Elsewhere, and
    where the custom calls were not built, it is `Gather`, and `plan.relay` changes nothing.

    Args:
        timeout_s: how long ranks wait for one that does not come, in seconds, before all stop with an error that
            names it. The default is 120; a step that legitimately takes longer needs more.
        chunk_bytes: what a relay forwards at once, in bytes. Small chunks reach the end of a chain of relays sooner,
            and each costs a launch; 1 MiB is the default.
        site: what messages call these copies; give another name where one program has several kinds.

    Examples:
        >>> from jax_moe_lb import FEPLB, System, TwoPhase
        >>> System(FEPLB(), PeerCopy(timeout_s=60.0), TwoPhase(), replica_slots=4).replicate.uses_copy_engines
        True
    """

    timeout_s: float = 120.0
    chunk_bytes: int = 1 << 20
    site: str = "PeerCopy"

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies of the replicas; they may still be under way when it returns. See `Replicate.start`."""
        relay = None if plan.relay is None else _of_replicas(plan.relay, plan)
        return start(experts, _of_replicas(plan.placement, plan), relay, route=self.route(topology))

    def join(self, pending: Pending, after: Any) -> Experts:
        """Waits for the copies, after `after` has been computed."""
        return join(pending, after)

    def add_at_home(self, sums: Experts, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """Adds the gradients of all replicas at home, by rank, then by slot, whatever the relays.

        That order depends on the plan alone, so equal gradients give equal bits in every run.
        """
        leaves, tree = jax.tree.flatten(sums)
        wanted, kinds = _of_replicas(plan.placement, plan), tuple(jax.tree.leaves(gradients))
        return jax.tree.unflatten(tree, add_at_home(tuple(leaves), kinds, wanted, plan.num_home, self.route(topology)))

    def route(self, topology: Topology) -> Route:
        """Says who copies from each other: all ranks where one process has them, else those of each domain.

        In the first case a planner in C++ may start the copies itself.
        """
        together, domain = topology.ranks_per_process, topology.ranks_per_domain
        inside = None if together is None or together == topology.num_ranks else domain
        reach = None if together is None else together % domain == 0
        # Asked of the other processes the first time, which trace the same program.
        apart = reach is False and topology.processes and can_copy(topology.processes, domain)
        processes = topology.processes if apart else ()
        return Route(topology.expert_axes, self.site, self.timeout_s, self.chunk_bytes, inside, reach, processes)

    def again(self) -> "PeerCopy":
        """Returns the same under another name: messages then say in which pass ranks wait."""
        return replace(self, site=f"{self.site}, backward")

    @property
    def uses_copy_engines(self) -> bool:
        """Says yes: products run beside these copies."""
        return True


def _of_replicas(slots: Int[Array, "R S"], plan: Plan) -> Wanted:
    """Cuts out the columns of the slots beyond the home experts."""
    return slots[:, plan.num_home :]
