"""Named routing workloads shared by tests and benchmarks; they differ in the expert preferences of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SURE = 100.0
"""Logit offset that dominates all others."""


@dataclass(frozen=True)
class Workload:
    """Tokens with expert preferences."""

    name: str
    preference: Callable[[np.random.Generator, int, int], np.ndarray]
    idle: Callable[[int], np.ndarray] = lambda num_ranks: np.zeros(num_ranks, bool)

    def logits(self, seed: int, num_ranks: int, num_tokens: int, num_experts: int) -> np.ndarray:
        """Return logits `[R, T, E]`, float64; the experts of a token are its `K` highest, which are distinct."""
        rng = np.random.default_rng(seed)
        preference = self.preference(rng, num_ranks, num_experts)
        noise = rng.gumbel(size=(num_ranks, num_tokens, num_experts))
        return preference[:, None] + noise

    def mask(self, num_ranks: int, num_tokens: int) -> np.ndarray:
        """Return a mask `[R, T]`, False for padding tokens."""
        return np.repeat(~self.idle(num_ranks)[:, None], num_tokens, axis=1)

    def counts(self, seed: int, num_ranks: int, num_tokens: int, num_experts: int, per_tok: int) -> np.ndarray:
        """Return counts `[R, E]`, int32: token copies routed by each rank to each expert."""
        logits = self.logits(seed, num_ranks, num_tokens, num_experts)
        experts = np.argsort(-logits, axis=-1, kind="stable")[..., :per_tok]
        counts = np.zeros((num_ranks, num_experts), np.int32)
        for rank in np.flatnonzero(~self.idle(num_ranks)):
            counts[rank] = np.bincount(experts[rank].reshape(-1), minlength=num_experts)
        return counts


def _shared(popularity: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.tile(np.log(popularity), (num_ranks, 1))


def _zipf(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    return _shared(rng.permutation(np.arange(1.0, num_experts + 1) ** -1.2), num_ranks)


def _lognormal(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    return _shared(rng.lognormal(0.0, 1.0, num_experts), num_ranks)


def _balanced(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    return np.zeros((num_ranks, num_experts))


def _one_hot(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    preference = np.zeros((num_ranks, num_experts))
    preference[:, num_experts // 2] = SURE
    return preference


def _hot_rank(rng: np.random.Generator, num_ranks: int, num_experts: int) -> np.ndarray:
    """Return preferences of all tokens for the experts of the last rank."""
    preference = np.zeros((num_ranks, num_experts))
    preference[:, -(num_experts // num_ranks) :] = SURE
    return preference


WORKLOADS = (
    Workload("balanced", _balanced),
    Workload("zipf", _zipf),
    Workload("lognormal", _lognormal),
    Workload("one_hot", _one_hot),
    Workload("hot_rank", _hot_rank),
    Workload("empty_rank", _zipf, lambda num_ranks: np.arange(num_ranks) == 0),
    Workload("zero_tokens", _balanced, lambda num_ranks: np.ones(num_ranks, bool)),
)
