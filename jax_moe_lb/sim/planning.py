"""`plan_layer` makes the plan of a layer by the system's own balancer; `groups` says who exchanges tokens with whom."""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.plan import Plan, plain_plan
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.systems import System
from jax_moe_lb.types import Counts, State


@dataclass(frozen=True)
class Group:
    """Holds ranks that exchange tokens with each other: those of equal offset in their expert domains, or all.

    Args:
        ranks: `[G]`, their numbers in the cluster, in the order of their expert domains.
        cluster: the machine of which they are ranks.
        sizes: how many members the group has at every level, outermost first.
    """

    ranks: Int[np.ndarray, "R"]
    cluster: Cluster
    sizes: tuple[int, ...]

    def spread(self, matrix: Num[np.ndarray, "G G"]) -> Num[np.ndarray, "R R"]:
        """Writes a matrix over the group's ranks as one over the cluster's, which is 0 elsewhere.

        Args:
            matrix: `[G, G]` numbers, from rank to rank of the group.
        """
        # One group is the whole cluster, in the same order: nothing has to be copied.
        if len(self.ranks) == self.cluster.num_ranks:
            return matrix
        whole = np.zeros((self.cluster.num_ranks,) * 2, matrix.dtype)
        whole[np.ix_(self.ranks, self.ranks)] = matrix
        return whole


def groups(cluster: Cluster, sizes: tuple[int, ...]) -> list[Group]:
    """Returns all groups for expert domains of the given sizes; `ExpertDomains` describes them on a mesh.

    Args:
        cluster: the machine.
        sizes: the members of an expert domain at every level, outermost first; all 1 for one group of all ranks.
    """
    levels = [level.size for level in cluster.levels]
    ranks = np.arange(cluster.num_ranks).reshape(
        [n for size, s in zip(levels, sizes, strict=True) for n in (size // s, s)]
    )
    depth = len(levels)
    # Every level is cut into domains and offsets. Offsets in front, so that ranks of equal offset stand together.
    by_offset = ranks.transpose(*range(1, 2 * depth, 2), *range(0, 2 * depth, 2)).reshape(math.prod(sizes), -1)
    inside = tuple(size // s for size, s in zip(levels, sizes, strict=True))
    return [Group(members, cluster, inside) for members in by_offset]


def plan_layer(
    system: System, group: Group, counts: Counts, num_home: int, state: State
) -> tuple[Plan, list[tuple[Counts, Plan]], State]:
    """Makes the plan that the layer would run, by the balancer itself.

    Args:
        system: its balancer makes the plan, its replication may add relays, and its dispatch knows its waves.
        group: the ranks that exchange tokens.
        counts: `[G, E]` int32, the token copies that each of these ranks routes to each expert.
        num_home: `L`, the experts that a rank holds anyway.
        state: what the balancer remembers.

    Returns:
        The plan, the counts and the plan of each wave, and the new state.

    Raises:
        ValueError: the balancer refuses the counts, or its plan is not legal.
    """
    topology = group.cluster.topology(group.sizes)
    # One rank alone has all experts at home, and no rank needs an expert twice.
    slots = num_home + (system.replica_slots if topology.num_ranks > 1 else 0)
    start = plain_plan(counts, topology, min(slots, counts.shape[1]))
    plan, state = system.balancer.rebalance(counts, start, topology, state)
    # A balancer may answer in JAX's arrays; what follows on the host wants NumPy's.
    plan = jax.tree.map(np.asarray, plan)
    waves = system.dispatch.waves(counts, start, plan, system.balancer)
    return system.replicate.plan(plan) if plan.slots > num_home else plan, waves, state
