"""Groups of ranks of a simulated layer, and the weights and gradients that their plans move."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.sim.cluster import Cluster

ExpertMatrix = Int[np.ndarray, "R R"]
"""Number of experts from rank (row) to rank (column), int64."""


def replicas_between(plan: Plan) -> ExpertMatrix:
    """Count the experts whose weights each rank copies to each rank, from the home or from the plan's relay."""
    sender = _homes(plan)
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        # -1 stands for no relay: the copy comes from home.
        sender = np.where(relay >= 0, relay, sender)
    return _between(sender, plan)


def gradients_between(plan: Plan) -> ExpertMatrix:
    """Count the gradients of replicas that each rank sends to each home; relays do not forward gradients."""
    return _between(_homes(plan), plan).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Count the rows served by each slot."""
    # The -1 of an empty slot is read as expert 0, and its rows are then masked.
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def _homes(plan: Plan) -> Int[np.ndarray, "R X"]:
    """Return the home rank per replica; -1 for an empty slot."""
    replicas = plan.placement[:, plan.num_home :]
    return np.where(replicas >= 0, replicas // plan.num_home, -1)


def _between(sender: Int[np.ndarray, "R X"], plan: Plan) -> ExpertMatrix:
    there = sender >= 0
    receiver = np.broadcast_to(np.arange(plan.num_ranks)[:, None], sender.shape)
    copies = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    # With repeated indices, `+=` would count each pair of ranks only once.
    np.add.at(copies, (sender[there], receiver[there]), 1)
    return copies


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tokens: the ranks of equal offset in the expert domains, or all ranks."""

    ranks: Int[np.ndarray, "R"]  # ranks of the cluster in the order of their expert domains
    cluster: Cluster  # machine of these ranks
    sizes: tuple[int, ...]  # members of the group at every level, outermost first

    @cached_property
    def topology(self) -> Topology:
        """Topology of the group, for balancers."""
        return self.cluster.topology(self.sizes)


def groups(cluster: Cluster, sizes: tuple[int, ...]) -> list[Group]:
    """Return all groups for expert domains of the given sizes; `ExpertDomains` describes them on a mesh."""
    levels = [level.size for level in cluster.levels]
    ranks = np.arange(cluster.num_ranks).reshape(
        [n for size, s in zip(levels, sizes, strict=True) for n in (size // s, s)]
    )
    depth = len(levels)
    # Split every level into domains and offsets; offsets come first, so that ranks of equal offset are adjacent.
    by_offset = ranks.transpose(*range(1, 2 * depth, 2), *range(0, 2 * depth, 2)).reshape(math.prod(sizes), -1)
    inside = tuple(size // s for size, s in zip(levels, sizes, strict=True))
    return [Group(members, cluster, inside) for members in by_offset]


def between_all(found: Sequence[Group], matrices: Sequence[Num[np.ndarray, "G G"]]) -> Num[np.ndarray, "R R"]:
    """Return the matrix over the cluster's ranks with the matrices of all groups, 0 between groups."""
    # A single group is the whole cluster in the same order, so no copy is needed.
    if len(found) == 1:
        return matrices[0]
    ranks, blocks = np.stack([group.ranks for group in found]), np.stack(matrices)
    whole = np.zeros((ranks.size,) * 2, blocks.dtype)
    whole[ranks[:, :, None], ranks[:, None]] = blocks
    return whole
