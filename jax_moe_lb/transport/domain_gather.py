"""The replicas of a plan that wants whole expert domains."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_moe_lb.experts import Experts
from jax_moe_lb.hybrid import Domains
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.migrate import Migrate


@dataclass(frozen=True)
class DomainGather:
    """The slots of a plan over all ranks, out of the experts of the domain: `Gather` by an all-gather.

    All experts of the domain come, whatever the plan wants of them; so it suits plans such as `HybridEP`'s, which want
    all.

    Args:
        domains: of the mesh. The plan's domain is at most theirs, and the topology `domains.whole`.
    """

    domains: Domains

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The weights of this rank's slots; 0 in an empty one. Differentiable in `experts`.

        Raises:
            ValueError: the plan's domain or the topology is not that of these domains, or it asks for relays.
        """
        size = self.domains.domain_size
        if topology.expert_axes != self.domains.expert_axes:
            raise ValueError(f"topology has axes {topology.expert_axes}; expected {self.domains.expert_axes}")
        if size % plan.domain:
            raise ValueError(f"plan.domain is {plan.domain}; expected a divisor of the {size} ranks of a domain")
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as DomainGather copies every slot from home")
        held = Migrate(self.domains)(experts)
        rank = jax.lax.axis_index(topology.expert_axes)
        wanted = plan.placement[rank]
        # A domain is a block of ranks and holds a block of experts.
        at = jnp.where(wanted >= 0, wanted - rank // size * size * plan.num_home, 0)
        empty = (wanted < 0)[:, None, None]
        return jax.tree.map(lambda leaf: jnp.where(empty, 0, leaf[at]), held)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The replicas alone, at once."""
        return jax.tree.map(lambda slots: slots[plan.num_home :], self(experts, plan, topology))

    def join(self, pending: Experts, after: Any) -> Experts:
        """What `start` returned."""
        del after
        return pending

    def sum_at_home(self, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """The transpose of `start`."""
        home = jax.tree.map(lambda g: jnp.zeros_like(g, shape=(plan.num_home, *g.shape[1:])), gradients)
        return jax.vjp(lambda home: self.start(home, plan, topology), home)[1](gradients)[0]
