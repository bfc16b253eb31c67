"""Replicating expert weights into slots, straight from their homes; gradients return the same way.

Home experts never travel; see `ops/fetch.py` for how replicas do.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.fetch import fetch, fetch_transpose
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology


@dataclass(frozen=True)
class Gather:
    """Every slot copies its expert from the expert's home."""

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The weights of this rank's slots.

        Differentiable in `experts`: the transpose sums the gradients of all replicas at
        home, in an order that depends on the plan alone.

        Args:
            experts: the `L` home experts of this rank.
            plan: its placement says what the `S` slots hold; an empty slot becomes 0.
            topology: its expert axes.

        Raises:
            ValueError: the plan asks for relays.
        """
        if plan.slots == plan.num_home:
            return experts
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), experts, self.start(experts, plan, topology))

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The replicas alone, at once; the plan has slots for them.

        Raises:
            ValueError: the plan asks for relays.
        """
        if plan.relay is not None:
            raise ValueError("plan.relay is set; expected None, as Gather copies every slot from home")
        wanted = plan.placement[:, plan.num_home :]
        return jax.tree.map(lambda home: fetch(home, wanted, plan.num_home, topology.expert_axes), experts)

    def join(self, pending: Experts, after: Any) -> Experts:
        """What `start` returned."""
        del after
        return pending

    def sum_at_home(self, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """The transpose of `start`."""
        wanted = plan.placement[:, plan.num_home :]
        return jax.tree.map(lambda g: fetch_transpose(g, wanted, plan.num_home, topology.expert_axes), gradients)
