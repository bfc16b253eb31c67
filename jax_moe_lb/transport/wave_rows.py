"""Rows of a wave between ranks, counted on a host from counts and plan: token copies, and tokens sent once.

Counts do not record which experts a token combines, so the number of tokens with an expert in a member is an estimate.
It follows from the probabilities `p` of the experts, if a token samples `K` distinct experts with independent odds `w =
p / (1 - p)`. The share of tokens without an expert in a member is `e_K(w (1 - f)) / e_K(w)`. Here `e_K` is the
elementary symmetric polynomial, and `f` the share of each expert's tokens served by the member. The estimate is exact
for equal probabilities. For uneven ones it was within 5 % of synthetic tokens (`tests/transport/test_wave_rows.py`).

Both polynomials are coefficients of `z^K` in products of `1 - p + p z`, and of `1 - p + p (1 - f) z`. They follow from
the values of the products on a circle, by a Fourier sum. A member changes only the factors of its own experts.
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

RADIUS = 1 / 8
"""Radius of the circle. The products have mean degree `K` at radius 1; a smaller one damps the degrees above `K`."""

LEAST_POINTS = 9
"""Number of points for few experts per token. Higher degrees are aliased with a factor of `RADIUS**9`, below 1e-8."""

NO_CHANCE = 1e-9
"""Probability of `K` experts below which rounding errors of the Fourier sum matter."""


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
        there = self.by_expert
        if members < num_ranks:
            there = np.add.reduceat(there, np.arange(0, num_ranks, num_ranks // members), axis=2)
        own = _own_experts(self.plan.quota.reshape(num_experts, members, -1).sum(2))
        # [R, X, M]: copies for the experts of each member, and the chance of a token to have one and go there.
        sent = there[:, own, np.arange(members)]
        num_tokens = np.maximum(counts.sum(1) / self.per_token, 1)
        chance = np.minimum(counts / num_tokens[:, None], CERTAIN)
        going = chance[:, own] * (sent / np.maximum(counts, 1)[:, own])
        share = 1 - _share_without(chance, going, own, self.per_token)
        # At most the number of copies, and enough tokens for all copies.
        copies = sent.sum(1)
        return np.clip(share * num_tokens[:, None], copies / self.per_token, copies)

    @cached_property
    def by_expert(self) -> Int[np.ndarray, "R E R"]:
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


def _own_experts(served: Int[np.ndarray, "E M"]) -> Int[np.ndarray, "X M"]:
    """List the experts of each member, the others after them so that all lists have equal lengths."""
    most = int(np.max(np.count_nonzero(served, axis=0)))
    return np.argsort(served <= 0, axis=0, kind="stable")[:most]


def _share_without(
    chance: Float[np.ndarray, "R E"], going: Float[np.ndarray, "R X M"], own: Int[np.ndarray, "X M"], degree: int
) -> Float[np.ndarray, "R M"]:
    """Return the share of tokens of `degree` experts without any in each member; 1 if there are no such tokens."""
    # An odd number of points above the degree: none at -RADIUS, where factors may be 0, and no lower degree is aliased.
    number = max(LEAST_POINTS, degree + 1 + degree % 2)
    # Half of the circle: the other half has the conjugate values.
    turns = np.exp(2j * np.pi * np.arange(number // 2 + 1) / number)
    factors = 1 + chance * (RADIUS * turns - 1)[:, None, None]
    whole = factors.prod(2) * (turns**-degree * np.where(turns == 1, 1, 2))[:, None]
    part = 1 - going * (RADIUS * turns)[:, None, None, None] / factors[:, :, own]
    anywhere, nowhere = whole.real.sum(0)[:, None], (whole[:, :, None] * part.prod(2)).real.sum(0)
    least = NO_CHANCE * number * RADIUS**degree
    return np.divide(nowhere, anywhere, out=np.ones_like(nowhere), where=anywhere > least)
