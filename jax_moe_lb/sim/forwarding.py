"""Tokens that go level by level: to the rank of equal offset in another datacenter, then node, then to their rank.

So a token that leaves its node also pays for the links inside the node where it arrives, as DeepEP forwards it. It can
leave once for each member of a level that it has experts in: a token with several experts on one remote node crosses
once, and is copied there; its outputs are summed there before they return.

How many tokens have an expert in a member nobody counts, as counts have no pairs. They follow from the chances `p` of
the experts, if a token takes `K` different ones with odds `w = p / (1 - p)` and nothing else ties them together. Of
them none is in a member with the share `e_K(w (1 - f)) / e_K(w)`, where `e_K` is the elementary symmetric polynomial
and `f` the part of each expert's tokens that go there. For equal chances that is exact; for uneven
ones it was within 5 % of drawn tokens (`tests/sim/test_forwarding.py`).
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num

from jax_moe_lb.plan import Plan
from jax_moe_lb.split import nearest_first
from jax_moe_lb.types import Counts

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
