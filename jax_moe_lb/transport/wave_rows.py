"""Rows of a wave between ranks, counted on a host from counts and plan: token copies, and tokens sent once.

Counts do not record which experts a token combines, so the number of tokens with an expert in a member is an estimate.
It follows from the probabilities `p` of the experts, if a token samples `K` distinct experts with independent odds `w =
p / (1 - p)`. The share of tokens without an expert in a member is `e_K(w (1 - f)) / e_K(w)`. Here `e_K` is the
elementary symmetric polynomial, and `f` the share of each expert's tokens served by the member. The estimate is exact
for equal probabilities. For uneven ones it was within 5 % of synthetic tokens (`tests/transport/test_wave_rows.py`).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.split import copies_of_all
from jax_moe_lb.core.types import Counts

RowsBetween = Num[np.ndarray, "R R"]
"""Rows from rank (row) to rank (column)."""

CERTAIN = 1 - 1e-6
"""Upper bound of probabilities, so that odds are finite."""


@dataclass(frozen=True, eq=False)
class WaveRows:
    """Rows of a wave between ranks, as NumPy arrays on a host.

    Args:
        counts: `[R, E]` integers, copies routed by each rank to each expert.
        plan: plan of the wave, in NumPy arrays.
        per_token: `K`, distinct experts per token.
    """

    counts: Counts
    plan: Plan
    per_token: int

    @cached_property
    def copies(self) -> RowsBetween:
        """Token copies from rank to rank, `[R, R]` int64."""
        # In 64 bits, because the product of rows and bytes exceeds 32 bits.
        return rows_between(self.counts, self.plan).astype(np.int64)

    def tokens(self, members: int) -> Float[np.ndarray, "R {members}"]:
        """Estimate the tokens of each rank with an expert served in each member.

        Args:
            members: number of members, equal blocks of consecutive ranks; the number of ranks for single ranks.

        Returns:
            `[R, members]`.
        """
        (num_ranks, num_experts), counts = self.counts.shape, self.counts
        there = self._by_expert.reshape(num_ranks, num_experts, members, -1).sum(3)
        part = there / np.maximum(counts, 1)[:, :, None]
        num_tokens = counts.sum(1) / self.per_token
        chance = np.minimum(counts / np.maximum(num_tokens, 1)[:, None], CERTAIN)
        odds = chance / (1 - chance)
        anywhere = _symmetric(odds[:, None], self.per_token)
        nowhere = _symmetric(odds[:, None] * (1 - part).transpose(0, 2, 1), self.per_token)
        # A rank without tokens has no odds.
        share = 1 - np.divide(nowhere, anywhere, out=np.ones_like(nowhere), where=anywhere > 0)
        # At most the number of copies, and enough tokens for all copies.
        copies = there.sum(1)
        return np.clip(share * num_tokens[:, None], copies / self.per_token, copies)

    @cached_property
    def _by_expert(self) -> Int[np.ndarray, "R E R"]:
        """Copies of each rank for each expert by serving rank."""
        return copies_of_all(self.counts, self.plan.quota, self.plan.domain, self.plan.split)


class EvenRouting(NamedTuple):
    """Uniform routing: every rank sends equally many copies to every expert.

    Args:
        num_experts: `E`, experts of the layer.
        per_token: `K`, distinct experts per token.
        num_tokens: `T`, tokens of a rank.
    """

    num_experts: int
    per_token: int
    num_tokens: int

    def tokens(self, members: int) -> float:
        """Return the tokens of a rank with an expert in one of several equal members.

        Args:
            members: number of members with equally many experts.
        """
        return self.num_tokens * share_in_member(self.num_experts, self.per_token, members)


def share_in_member(num_experts: int, per_token: int, members: int) -> float:
    """Return the share of tokens with an expert in one of several equal members, if all experts are equally popular.

    Args:
        num_experts: `E`, experts of the layer.
        per_token: `K`, distinct experts per token.
        members: number of members with equally many experts.

    Examples:
        Of DeepSeek-V3's experts, 8 per token on 32 ranks, a token visits 7.3 ranks and 3.6 of 4 nodes:

        >>> [round(members * share_in_member(256, 8, members), 1) for members in (32, 4)]
        [7.3, 3.6]
    """
    others = num_experts - num_experts // members
    return 1 - math.comb(others, per_token) / math.comb(num_experts, per_token)


def spread_evenly(rows: float, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return the rows from one rank by the outermost level on which source and destination differ.

    Args:
        rows: rows of a rank, spread evenly over all ranks of a group, itself included.
        sizes: members of the group at each level, outermost first.
    """
    by_level = []
    for size in sizes:
        # The rows inside a member are spread over the next level.
        by_level.append(rows * (size - 1) / size)
        rows /= size
    return tuple(by_level)


def _symmetric(odds: Float[np.ndarray, "R M E"], degree: int) -> Float[np.ndarray, "R M"]:
    """Compute the elementary symmetric polynomial of the given degree over the last axis."""
    found = np.zeros((degree + 1, *odds.shape[:2]))
    found[0] = 1.0
    for one in np.moveaxis(odds, 2, 0):
        found[1:] += one * found[:-1]
    return found[degree]
