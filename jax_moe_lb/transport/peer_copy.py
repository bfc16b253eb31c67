"""Replicating expert weights into slots by copies that need no compute of the ranks they come from."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops._peer import Pending, Route
from jax_moe_lb.ops.copy_expert_weights import copy_expert_weights, join, start, sum_at_home
from jax_moe_lb.ops.fetch import Wanted
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology


@dataclass(frozen=True)
class PeerCopy:
    """Every slot copies its expert from home, or from the rank that `plan.relay` names.

    All kinds of weights travel in one call: see `ops/copy_expert_weights.py`. Copies equal
    those of `Gather`. Gradients are added by rank, then by slot, with the bits of `Gather` over
    `ragged_all_to_all`; its ring adds in another order.

    Inside one process. Between processes, and where the custom calls were not built, it is `Gather`, and
    `plan.relay` changes nothing.

    Args:
        timeout_s: how long ranks wait for one that does not come, in seconds, before all stop with an
            error that names it.
        chunk_bytes: what a relay forwards at once, in bytes.
    """

    timeout_s: float = 120.0
    chunk_bytes: int = 1 << 20

    def __call__(self, experts: Experts, plan: Plan, topology: Topology) -> Experts:
        """The weights of this rank's slots.

        Differentiable in `experts`: the transpose sums the gradients of all replicas at home.

        Args:
            experts: the `L` home experts of this rank.
            plan: its placement says what the `S` slots hold; an empty slot becomes 0.
            topology: its expert axes.
        """
        wanted = plan.placement[:, plan.num_home :]
        if wanted.shape[1] == 0:
            return experts
        replicas = copy_expert_weights(experts, wanted, _relay(plan), route=self.route(topology))

        def slots(home: Array, copied: Array) -> Array:
            return jnp.concatenate([home, copied])

        return jax.tree.map(slots, experts, replicas)

    def route(self, topology: Topology) -> Route:
        """Between whom it copies."""
        return Route(topology.expert_axes, "PeerCopy", self.timeout_s, self.chunk_bytes)

    def start(self, experts: Experts, plan: Plan, topology: Topology) -> Pending:
        """Begins the copies of the replicas alone; the plan has slots for them. See `ops/copy_expert_weights.py`."""
        return start(experts, plan.placement[:, plan.num_home :], _relay(plan), route=self.route(topology))

    def join(self, pending: Pending, after: Any) -> Experts:
        """The replicas, once they are there and `after` has been computed."""
        return join(pending, after)

    def sum_at_home(self, gradients: Experts, plan: Plan, topology: Topology) -> Experts:
        """The transpose of `start` and `join`: sums of the gradients of all replicas, at home."""
        leaves, tree = jax.tree.flatten(gradients)
        wanted = plan.placement[:, plan.num_home :]
        return jax.tree.unflatten(tree, sum_at_home(tuple(leaves), wanted, plan.num_home, self.route(topology)))


def _relay(plan: Plan) -> Wanted | None:
    return None if plan.relay is None else plan.relay[:, plan.num_home :]
