"""The plans of a layer, from the balancer that a system has; and who exchanges tokens with whom."""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int

from jax_moe_lb.plan import Plan, plain_plan
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.systems import System
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tokens with each other: those of equal offset in their expert domains, or all.

    Args:
        ranks: of the cluster, by domain.
        cluster: of which they are ranks.
        sizes: members of the group at every level.
    """

    ranks: Int[np.ndarray, "R"]
    cluster: Cluster
    sizes: tuple[int, ...]

    def spread(self, matrix: Int[np.ndarray, "G G"]) -> Int[np.ndarray, "R R"]:
        """A matrix over the group's ranks as one over the cluster's."""
        if len(self.ranks) == self.cluster.num_ranks:
            return matrix
        whole = np.zeros((self.cluster.num_ranks,) * 2, matrix.dtype)
        whole[np.ix_(self.ranks, self.ranks)] = matrix
        return whole


def groups(cluster: Cluster, sizes: tuple[int, ...]) -> list[Group]:
    """All groups, for expert domains of so many members at every level; `ExpertDomains` describes them on a mesh."""
    levels = [level.size for level in cluster.levels]
    ranks = np.arange(cluster.num_ranks).reshape(
        [n for size, s in zip(levels, sizes, strict=True) for n in (size // s, s)]
    )
    depth = len(levels)
    by_offset = ranks.transpose(*range(1, 2 * depth, 2), *range(0, 2 * depth, 2)).reshape(math.prod(sizes), -1)
    inside = tuple(size // s for size, s in zip(levels, sizes, strict=True))
    return [Group(members, cluster, inside) for members in by_offset]


def plan_layer(
    system: System, group: Group, counts: Counts, num_home: int, state: State
) -> tuple[Plan, list[tuple[Counts, Plan]], State]:
    """The plan that the layer would run, from the balancer itself.

    Args:
        system: its balancer, its replication, which may add relays, and its dispatch, which knows its waves.
        group: the ranks that exchange tokens.
        counts: `[R, E]` of these ranks.
        num_home: `L`, experts that a rank holds anyway.
        state: what the balancer remembers.

    Returns:
        The plan, the counts and the plan of each wave, and the new state.

    Raises:
        ValueError: what the balancer refuses, or a plan that is not legal.
    """
    topology = group.cluster.topology(group.sizes)
    slots = num_home + (system.replica_slots if topology.num_ranks > 1 else 0)
    start = plain_plan(counts, topology, min(slots, counts.shape[1]))
    plan, state = system.balancer.rebalance(counts, start, topology, state)
    plan = jax.tree.map(np.asarray, plan)
    waves = system.dispatch.waves(counts, start, plan, system.balancer)
    return system.replicate.plan(plan) if plan.slots > num_home else plan, waves, state
