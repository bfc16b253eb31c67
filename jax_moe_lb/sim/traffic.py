"""Plans of a simulated layer, and the weights, gradients and tokens that they move.

With forwarding a token travels level by level: to the rank of equal offset in another datacenter, then in another node,
then to its rank. A token that leaves its node also uses the links inside the destination node, as DeepEP forwards it. A
token with several experts on one remote node crosses once and is copied there; its outputs are summed there before they
return.

Counts have no pairs, so the number of tokens with an expert in a member is an estimate. It follows from the chances `p`
of the experts if a token takes `K` different ones with independent odds `w = p / (1 - p)`. The share of tokens with
none in a member is `e_K(w (1 - f)) / e_K(w)`, with the elementary symmetric polynomial `e_K` and the part `f` of each
expert's tokens that go there. This is exact for equal chances. For uneven ones it was within 5 % of synthetic tokens
(`tests/sim/test_forwarding.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int, Num

from jax_moe_lb.core.plan import Plan, plain_plan
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster

ExpertMatrix = Int[np.ndarray, "R R"]
"""Numbers of experts from rank (row of the matrix) to rank (column), int64."""


def replicas_between(plan: Plan) -> ExpertMatrix:
    """Counts the experts whose weights are copied from rank to rank: from home, or from the relay that the plan names.

    Args:
        plan: the plan, in NumPy arrays.
    """
    sender = _homes(plan)
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        # -1 stands for no relay: the copy comes from home.
        sender = np.where(relay >= 0, relay, sender)
    return _between(sender, plan)


def gradients_between(plan: Plan) -> ExpertMatrix:
    """Counts the gradients of replicas that go home, straight, whatever the relays.

    Args:
        plan: the plan, in NumPy arrays.
    """
    return _between(_homes(plan), plan).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Counts the rows that each slot serves; 0 for an empty one.

    Args:
        plan: the plan of a wave, in NumPy arrays.
    """
    # An empty slot's -1 is read as expert 0, and its rows are then masked.
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def _homes(plan: Plan) -> Int[np.ndarray, "R X"]:
    """Returns the home rank of each replica; -1 for an empty slot."""
    replicas = plan.placement[:, plan.num_home :]
    return np.where(replicas >= 0, replicas // plan.num_home, -1)


def _between(sender: Int[np.ndarray, "R X"], plan: Plan) -> ExpertMatrix:
    there = sender >= 0
    receiver = np.broadcast_to(np.arange(plan.num_ranks)[:, None], sender.shape)
    copies = np.zeros((plan.num_ranks, plan.num_ranks), np.int64)
    # `+=` with repeated indices would count a pair of ranks once, however many experts go between them.
    np.add.at(copies, (sender[there], receiver[there]), 1)
    return copies


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
    waves = system.dispatch.cost().waves(counts, start, plan, system.balancer)
    return system.replicate.plan(plan) if plan.slots > num_home else plan, waves, state


Reach = Num[np.ndarray, "_ _"]
"""`[R, members]`, what each rank sends to each member of a level, counted as if it sent it there itself."""

CERTAIN = 1 - 1e-6
"""Chances are below this, so that odds are finite."""


def copies_to(rows: Num[np.ndarray, "R R"], sizes: Sequence[int]) -> list[Reach]:
    """Counts the token copies that each rank sends to each member of every level.

    Args:
        rows: from rank to rank.
        sizes: the members of the group at each level, outermost first.
    """
    ranks = len(rows)
    return [rows.reshape(ranks, math.prod(sizes[: at + 1]), -1).sum(2) for at in range(len(sizes))]


def tokens_to(rows: Int[np.ndarray, "R E R"], counts: Counts, per_token: int, sizes: Sequence[int]) -> list[Reach]:
    """Estimates the tokens of each rank that have an expert in each member of every level.

    Args:
        rows: the copies of each rank for each expert that go to each rank.
        counts: the copies of each rank for each expert, with which its tokens chose.
        per_token: `K`, the different experts of a token.
        sizes: the members of the group at each level, outermost first.
    """
    ranks, experts, _ = rows.shape
    tokens = counts.sum(1) / per_token
    chance = np.minimum(counts / np.maximum(tokens, 1)[:, None], CERTAIN)
    odds = chance / (1 - chance)
    anywhere = _symmetric(odds[:, None], per_token)
    found = []
    for at in range(len(sizes)):
        there = rows.reshape(ranks, experts, math.prod(sizes[: at + 1]), -1).sum(3)
        part = there / np.maximum(counts, 1)[:, :, None]
        nowhere = _symmetric(odds[:, None] * (1 - part).transpose(0, 2, 1), per_token)
        # A rank without tokens has no odds.
        share = 1 - np.divide(nowhere, anywhere, out=np.ones_like(nowhere), where=anywhere > 0)
        # As many as copies at most, and enough for all copies.
        copies = there.sum(1)
        found.append(np.clip(share * tokens[:, None], copies / per_token, copies))
    return found


def rows_by_expert(counts: Counts, plan: Plan) -> Int[np.ndarray, "R E R"]:
    """Counts the token copies of each rank for each expert that go to each rank.

    Args:
        counts: `[R, E]`, the copies that each rank routes to each expert.
        plan: legal for `counts`, in NumPy arrays.
    """
    rows = [nearest_first(counts, plan.quota, rank, plan.domain, plan.split) for rank in range(plan.num_ranks)]
    return np.stack([np.asarray(row) for row in rows])


def share_in_member(num_experts: int, per_token: int, members: int) -> float:
    """Returns the share of tokens that have an expert in one of equal members, if all experts are equally popular.

    Args:
        num_experts: `E`.
        per_token: `K`.
        members: the members, each with as many experts.
    """
    others = num_experts - num_experts // members
    return 1 - math.comb(others, per_token) / math.comb(num_experts, per_token)


def forwarded(reach: Sequence[Reach], sizes: Sequence[int]) -> Num[np.ndarray, "R R"]:
    """Returns what goes from rank to rank if everything goes level by level; each entry crosses one level alone.

    Args:
        reach: for each level what every rank sends to each member.
        sizes: the members of the group at each level, outermost first.
    """
    ranks = math.prod(sizes)
    sent = np.zeros((ranks, ranks), np.result_type(*reach))
    source, outer = np.arange(ranks)[:, None], 1
    for size, amount in zip(sizes, reach, strict=True):
        member = np.arange(outer * size)[None]
        # The ranks in a member of the level outside, and in one of this level.
        around, inside = ranks // outer, ranks // (outer * size)
        # It is at the rank of its source's offset in the outer member, and goes to that of the same in the inner one.
        held, to = member // size * around + source % around, member * inside + source % inside
        np.add.at(sent, (held, to), amount)
        outer *= size
    return sent


def _symmetric(odds: Float[np.ndarray, "R M E"], degree: int) -> Float[np.ndarray, "R M"]:
    """Computes the elementary symmetric polynomial of some degree of the last axis."""
    found = np.zeros((degree + 1, *odds.shape[:2]))
    found[0] = 1.0
    for one in np.moveaxis(odds, 2, 0):
        found[1:] += one * found[:-1]
    return found[degree]
