"""Rows of a wave between ranks, counted on a host from counts and plan: token copies, and tokens sent once.

Counts do not record which experts a token combines, so the number of tokens with an expert in a member is an estimate.
It follows from the probabilities `p` of the experts, if a token samples `K` distinct experts with independent odds `w =
p / (1 - p)`. The share of tokens without an expert in a member is `e_K(w (1 - f)) / e_K(w)`. Here `e_K` is the
elementary symmetric polynomial, and `f` the share of each expert's tokens served by the member. The estimate is exact
for equal probabilities. For uneven ones it was within 5 % of synthetic tokens (`tests/transport/test_wave_rows.py`).

Both polynomials are coefficients of `z^K` in products of `1 - p + p z`, and of `1 - p + p (1 - f) z`. They follow from
the values of the products on a circle, by a Fourier sum. A member changes only the factors of its own experts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Int, Num

from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.split import MOST_AT_ONCE, copies_of_all
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
    """Rows of a wave between ranks, as NumPy arrays on a host."""

    counts: Counts  # copies by source rank and expert
    plan: Plan  # plan of the wave, in NumPy arrays
    per_token: int  # `K`, distinct experts per token
    # Groups of ranks whose rows are computed at once; `None` (default) for this group alone
    batch: "Batch | None" = None
    at: int = 0  # index of this group in `batch`; 0 by default

    @cached_property
    def copies(self) -> RowsBetween:
        """Token copies from rank to rank, `[R, R]` int64."""
        # In 64 bits, because the product of rows and bytes exceeds 32 bits.
        if self.batch is None:
            return rows_between(self.counts, self.plan).astype(np.int64)
        return self.batch.copies[:, self.at]

    def tokens(self, members: int) -> Float[np.ndarray, "R {members}"]:
        """Estimate the tokens of each rank with an expert served in each member."""
        return self._batch.tokens(members)[:, self.at]

    @property
    def by_expert(self) -> Int[np.ndarray, "R E R"]:
        """Copies per rank and expert by serving rank."""
        return self._batch.by_expert[:, self.at]

    @cached_property
    def _batch(self) -> "Batch":
        return self.batch or Batch([(self.counts, self.plan)], self.per_token)


def rows_of_groups(waves: Sequence[tuple[Counts, Plan]], per_token: int) -> list[WaveRows]:
    """Return the rows of the same wave of several groups, computed in batches."""
    rows: list[WaveRows] = []
    for _, alike in itertools.groupby(waves, lambda wave: (wave[1].domain, wave[1].split)):
        groups = list(alike)
        most = max(1, MOST_AT_ONCE // (groups[0][0].size * len(groups[0][0])))
        for start in range(0, len(groups), most):
            part = groups[start : start + most]
            batch = Batch(part, per_token) if len(part) > 1 else None
            rows += [WaveRows(*wave, per_token, batch, at) for at, wave in enumerate(part)]
    return rows


class Batch:
    """Rows of the waves of several groups of ranks."""

    # A few large arrays take less time than many small ones.

    def __init__(self, waves: Sequence[tuple[Counts, Plan]], per_token: int) -> None:
        self.plan, self.per_token = waves[0][1], per_token
        self.counts = np.stack([counts for counts, _ in waves], 1)
        self.quota = np.stack([plan.quota for _, plan in waves])
        self._tokens: dict[int, Float[np.ndarray, "R G M"]] = {}

    @cached_property
    def copies(self) -> Int[np.ndarray, "R G R"]:
        """Token copies from rank to rank per group, int64."""
        return self.by_expert.sum(2, dtype=np.int64)

    @cached_property
    def by_expert(self) -> Int[np.ndarray, "R G E R"]:
        """Copies per rank and expert by serving rank."""
        num_ranks, groups, num_experts = self.counts.shape
        # The split rule treats each expert separately, so experts of several groups are further experts.
        counts, quota = self.counts.reshape(num_ranks, -1), self.quota.reshape(-1, num_ranks)
        copies = copies_of_all(counts, quota, self.plan.domain, self.plan.split)
        return copies.reshape(num_ranks, groups, num_experts, num_ranks)

    def tokens(self, members: int) -> Float[np.ndarray, "R G {members}"]:
        """Estimate the tokens of each rank with an expert served in each member; see `WaveRows.tokens`."""
        if members not in self._tokens:
            self._tokens[members] = self._estimated(members)
        return self._tokens[members]

    def _estimated(self, members: int) -> Float[np.ndarray, "R G {members}"]:
        (num_ranks, groups, num_experts), counts = self.counts.shape, self.counts
        there = self.by_expert
        if members < num_ranks:
            there = np.add.reduceat(there, np.arange(0, num_ranks, num_ranks // members), axis=3)
        own = _own_experts(self.quota.reshape(groups, num_experts, members, -1).sum(3))
        group = np.arange(groups)[:, None, None]
        # [R, G, X, M]: copies for the experts of each member, and the chance of a token to have one and go there.
        sent = there[:, group, own, np.arange(members)]
        going = self._chances.of_experts[:, group, own] * (sent / np.maximum(counts, 1)[:, group, own])
        share = 1 - _share_without(self._chances, going, own)
        # At most the number of copies, and enough tokens for all copies.
        copies = sent.sum(2)
        return np.clip(share * self._chances.num_tokens[..., None], copies / self.per_token, copies)

    @cached_property
    def _chances(self) -> "_Chances":
        return _Chances.of(self.counts, self.per_token)


class _Chances(NamedTuple):
    """Probabilities of the experts of a token per rank, and the products of all factors on the circle."""

    num_tokens: Float[np.ndarray, "R G"]  # tokens of each rank
    of_experts: Float[np.ndarray, "R G E"]  # probabilities of the experts
    factors: Complex[np.ndarray, "P R G E"]  # factors `1 - p + p z` at the points of the circle
    products: Complex[np.ndarray, "P R G"]  # their products, times `z^-K`
    points: Complex[np.ndarray, "P"]  # points `z` of the circle
    least: float  # value of the Fourier sum below which rounding errors matter

    @classmethod
    def of(cls, counts: Int[np.ndarray, "R G E"], degree: int) -> "_Chances":
        num_tokens = np.maximum(counts.sum(2) / degree, 1)
        chance = np.minimum(counts / num_tokens[..., None], CERTAIN)
        # An odd number of points above the degree: none at -RADIUS, where factors may be 0, and no lower degree is
        # aliased.
        number = max(LEAST_POINTS, degree + 1 + degree % 2)
        # Half of the circle: the other half has the conjugate values.
        turns = np.exp(2j * np.pi * np.arange(number // 2 + 1) / number)
        factors = 1 + chance * (RADIUS * turns - 1)[:, None, None, None]
        products = factors.prod(3) * (turns**-degree * np.where(turns == 1, 1, 2))[:, None, None]
        return cls(num_tokens, chance, factors, products, RADIUS * turns, NO_CHANCE * number * RADIUS**degree)


class EvenRouting(NamedTuple):
    """Uniform routing: every rank sends equally many copies to every expert."""

    num_experts: int  # `E`, experts of the layer
    per_token: int  # `K`, distinct experts per token
    num_tokens: int  # `T`, tokens of a rank

    def tokens(self, members: int) -> float:
        """Return the tokens of a rank with an expert in one of several equal members."""
        return self.num_tokens * share_in_member(self.num_experts, self.per_token, members)


def share_in_member(num_experts: int, per_token: int, members: int) -> float:
    """Return the share of tokens with an expert in one of several equal members, if all experts are equally popular."""
    others = num_experts - num_experts // members
    return 1 - math.comb(others, per_token) / math.comb(num_experts, per_token)


def spread_evenly(rows: float, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Return the rows from one rank by the outermost level on which source and destination differ."""
    by_level = []
    for size in sizes:
        # The rows inside a member are spread over the next level.
        by_level.append(rows * (size - 1) / size)
        rows /= size
    return tuple(by_level)


def _own_experts(served: Int[np.ndarray, "G E M"]) -> Int[np.ndarray, "G X M"]:
    """List the experts per member, the others after them so that all lists have equal lengths."""
    most = int(np.max(np.count_nonzero(served, axis=1)))
    return np.argsort(served <= 0, axis=1, kind="stable")[:, :most]


def _share_without(
    chances: _Chances, going: Float[np.ndarray, "R G X M"], own: Int[np.ndarray, "G X M"]
) -> Float[np.ndarray, "R G M"]:
    """Return the share of tokens without an expert in each member; 1 if there are no such tokens."""
    factors = chances.factors[:, :, np.arange(len(own))[:, None, None], own]
    part = 1 - going * chances.points[:, None, None, None, None] / factors
    whole = chances.products[..., None]
    anywhere, nowhere = whole.real.sum(0), (whole * part.prod(3)).real.sum(0)
    return np.divide(nowhere, anywhere, out=np.ones_like(nowhere), where=anywhere > chances.least)
