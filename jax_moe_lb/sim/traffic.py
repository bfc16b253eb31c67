"""Plans of a simulated layer, and the weights, gradients and tokens that they move.

With forwarding, a token travels level by level: to the rank of equal offset in another datacenter, then in another
node, then to its rank. A token leaving its node also uses the links inside the destination node, as in DeepEP's
forwarding. A token with several experts on one remote node crosses once and is copied there. Its outputs are summed
there before they return.

Counts do not record which experts a token combines, so the number of tokens with an expert in a member is an estimate.
It follows from the probabilities `p` of the experts, if a token samples `K` distinct experts with independent odds `w =
p / (1 - p)`. The share of tokens without an expert in a member is `e_K(w (1 - f)) / e_K(w)`. Here `e_K` is the
elementary symmetric polynomial, and `f` the share of each expert's tokens served by the member. The estimate is exact
for equal probabilities. For uneven ones it was within 5 % of synthetic tokens (`tests/sim/test_forwarding.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import nearest_first
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.layer.plan_on_host import plan_on_host
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster

ExpertMatrix = Int[np.ndarray, "R R"]
"""Number of experts from rank (row) to rank (column), int64."""


def replicas_between(plan: Plan) -> ExpertMatrix:
    """Count the experts whose weights each rank copies to each rank, from their home or from the plan's relay.

    Args:
        plan: Plan in NumPy arrays.

    Returns:
        `[R, R]` int64, from rank to rank.
    """
    sender = _homes(plan)
    if plan.relay is not None:
        relay = plan.relay[:, plan.num_home :]
        # -1 stands for no relay: the copy comes from home.
        sender = np.where(relay >= 0, relay, sender)
    return _between(sender, plan)


def gradients_between(plan: Plan) -> ExpertMatrix:
    """Count the gradients of replicas that each rank sends to each home; relays do not forward gradients.

    Args:
        plan: Plan in NumPy arrays.

    Returns:
        `[R, R]` int64, from rank to rank.
    """
    return _between(_homes(plan), plan).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Count the rows served by each slot.

    Args:
        plan: Plan of a wave, in NumPy arrays.

    Returns:
        `[R, S]` rows; 0 for an empty slot.
    """
    # The -1 of an empty slot is read as expert 0, and its rows are then masked.
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def _homes(plan: Plan) -> Int[np.ndarray, "R X"]:
    """Return the home rank of each replica; -1 for an empty slot."""
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
    """Ranks that exchange tokens: the ranks of equal offset in their expert domains, or all ranks.

    Args:
        ranks: `[G]`, ranks of the cluster in the order of their expert domains.
        cluster: Machine of these ranks.
        sizes: Members of the group at every level, outermost first.
    """

    ranks: Int[np.ndarray, "R"]
    cluster: Cluster
    sizes: tuple[int, ...]

    def spread(self, matrix: Num[np.ndarray, "G G"]) -> Num[np.ndarray, "R R"]:
        """Embed a matrix over the group's ranks into a matrix over the cluster's ranks, 0 elsewhere.

        Args:
            matrix: `[G, G]` numbers, from rank to rank of the group.
        """
        # A single group is the whole cluster in the same order, so no copy is needed.
        if len(self.ranks) == self.cluster.num_ranks:
            return matrix
        whole = np.zeros((self.cluster.num_ranks,) * 2, matrix.dtype)
        whole[np.ix_(self.ranks, self.ranks)] = matrix
        return whole


def groups(cluster: Cluster, sizes: tuple[int, ...]) -> list[Group]:
    """Return all groups for expert domains of the given sizes; `ExpertDomains` describes them on a mesh.

    Args:
        cluster: Machine.
        sizes: Members of an expert domain at every level, outermost first; all 1 for one group of all ranks.

    Returns:
        One group per offset in an expert domain.
    """
    levels = [level.size for level in cluster.levels]
    ranks = np.arange(cluster.num_ranks).reshape(
        [n for size, s in zip(levels, sizes, strict=True) for n in (size // s, s)]
    )
    depth = len(levels)
    # Split every level into domains and offsets; offsets come first, so that ranks of equal offset are adjacent.
    by_offset = ranks.transpose(*range(1, 2 * depth, 2), *range(0, 2 * depth, 2)).reshape(math.prod(sizes), -1)
    inside = tuple(size // s for size, s in zip(levels, sizes, strict=True))
    return [Group(members, cluster, inside) for members in by_offset]


def plan_layer(
    system: System, group: Group, counts: Counts, num_home: int, state: State
) -> tuple[Plan, list[tuple[Counts, Plan]], State]:
    """Compute the plan of a layer with the system's own balancer.

    Args:
        system: System whose balancer makes the plan, whose replication may add relays, and whose dispatch gives the
            waves.
        group: Ranks that exchange tokens.
        counts: `[G, E]` int32, token copies from each of these ranks to each expert.
        num_home: Home experts `L` of a rank, including gathered ones.
        state: State of the balancer.

    Returns:
        The plan, the counts and plan of each wave, and the new state.

    Raises:
        ValueError: The balancer rejects the counts, or its plan is not legal.
    """
    found = plan_on_host(system, counts, group.cluster.topology(group.sizes), num_home, state)
    return found.plan, found.waves, found.state


Reach = Num[np.ndarray, "_ _"]
"""`[R, members]`, amount sent by each rank to each member of a level, counted as if sent directly."""

CERTAIN = 1 - 1e-6
"""Upper bound of probabilities, so that odds are finite."""


def copies_to(rows: Num[np.ndarray, "R R"], sizes: Sequence[int]) -> list[Reach]:
    """Count the token copies sent by each rank to each member of every level.

    Args:
        rows: `[R, R]`, copies from rank to rank.
        sizes: Members of the group at each level, outermost first.

    Returns:
        One `[R, members]` array per level.
    """
    ranks = len(rows)
    return [rows.reshape(ranks, math.prod(sizes[: at + 1]), -1).sum(2) for at in range(len(sizes))]


def tokens_to(rows: Int[np.ndarray, "R E R"], counts: Counts, per_token: int, sizes: Sequence[int]) -> list[Reach]:
    """Estimate the tokens of each rank with an expert in each member of every level.

    Args:
        rows: `[R, E, R]`, copies of each rank for each expert by serving rank.
        counts: `[R, E]`, copies of each rank for each expert.
        per_token: Distinct experts `K` per token.
        sizes: Members of the group at each level, outermost first.

    Returns:
        One `[R, members]` array per level.
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
        # At most the number of copies, and enough tokens for all copies.
        copies = there.sum(1)
        found.append(np.clip(share * tokens[:, None], copies / per_token, copies))
    return found


def rows_by_expert(counts: Counts, plan: Plan) -> Int[np.ndarray, "R E R"]:
    """Count the token copies of each rank for each expert by serving rank.

    Args:
        counts: `[R, E]`, copies routed by each rank to each expert.
        plan: Legal plan for `counts`, in NumPy arrays.

    Returns:
        `[R, E, R]` copies.
    """
    rows = [nearest_first(counts, plan.quota, rank, plan.domain, plan.split) for rank in range(plan.num_ranks)]
    return np.stack([np.asarray(row) for row in rows])


def share_in_member(num_experts: int, per_token: int, members: int) -> float:
    """Return the share of tokens with an expert in one of several equal members, if all experts are equally popular.

    Args:
        num_experts: Number of experts `E`.
        per_token: Number of experts `K` per token.
        members: Number of members with equally many experts.
    """
    others = num_experts - num_experts // members
    return 1 - math.comb(others, per_token) / math.comb(num_experts, per_token)


def forwarded(reach: Sequence[Reach], sizes: Sequence[int]) -> Num[np.ndarray, "R R"]:
    """Compute the traffic from rank to rank if everything travels level by level; each entry crosses one level only.

    Args:
        reach: Per level, the amount sent by every rank to each member.
        sizes: Members of the group at each level, outermost first.

    Returns:
        `[R, R]` amounts, from rank to rank.
    """
    ranks = math.prod(sizes)
    sent = np.zeros((ranks, ranks), np.result_type(*reach))
    source, outer = np.arange(ranks)[:, None], 1
    for size, amount in zip(sizes, reach, strict=True):
        member = np.arange(outer * size)[None]
        # Ranks in a member of the outer level, and in a member of this level.
        around, inside = ranks // outer, ranks // (outer * size)
        # The rank at the source's offset in the outer member forwards to the rank at the same offset in the inner one.
        held, to = member // size * around + source % around, member * inside + source % inside
        np.add.at(sent, (held, to), amount)
        outer *= size
    return sent


def _symmetric(odds: Float[np.ndarray, "R M E"], degree: int) -> Float[np.ndarray, "R M"]:
    """Compute the elementary symmetric polynomial of the given degree over the last axis."""
    found = np.zeros((degree + 1, *odds.shape[:2]))
    found[0] = 1.0
    for one in np.moveaxis(odds, 2, 0):
        found[1:] += one * found[:-1]
    return found[degree]
