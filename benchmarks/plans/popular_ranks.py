"""Loads with popular ranks, sampled as in UltraEP's simulations: Table 3 and figure 15 of arXiv 2606.04101.

The weight of an expert is `(rank + 1) ** -a * (place on its rank + 1) ** -4`, with ranks shuffled by the seed. A token
samples its experts without replacement. `a` is fitted so that the expected load of the busiest rank is the given
multiple of the mean. The fit approximates the sampling probability of an expert by `1 - exp(-c weight)`.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    num_experts: int
    num_ranks: int
    replica_slots: int
    imbalance: float


CASES = tuple(
    Case(num_experts, 64, replica_slots, imbalance)
    for (num_experts, replica_slots), imbalance in itertools.product(
        ((256, 2), (128, 2), (128, 1)), (1.5, 2.0, 4.0, 6.0, 8.0)
    )
)
PER_TOK = 8
TOKENS_PER_RANK = 8192


def counts(case: Case, seed: int, num_tokens: int = TOKENS_PER_RANK, per_tok: int = PER_TOK) -> np.ndarray:
    """Return sampled counts `[R, E]`, int32, with the same weights on every rank."""
    rng = np.random.default_rng(seed)
    weights = popularity(case, per_tok)
    shuffled = rng.permutation(weights.reshape(case.num_ranks, -1)).reshape(-1).astype(np.float32)
    drawn = np.empty((case.num_ranks, case.num_experts), np.int32)
    for rank in range(case.num_ranks):
        # Sampling without replacement: the first `per_tok` of exponential clocks with these rates.
        clocks = rng.standard_exponential((num_tokens, case.num_experts), np.float32) / shuffled
        experts = np.argpartition(clocks, per_tok - 1, axis=1)[:, :per_tok]
        drawn[rank] = np.bincount(experts.reshape(-1), minlength=case.num_experts)
    return drawn


def popularity(case: Case, per_tok: int, inside: float = 4.0) -> np.ndarray:
    """Return the weights `[E]` of the experts, the busiest rank first."""
    on_rank = np.arange(1.0, case.num_experts // case.num_ranks + 1) ** -inside
    ranks = np.arange(1.0, case.num_ranks + 1)

    def weights(a: float) -> np.ndarray:
        return (ranks[:, None] ** -a * on_rank).reshape(-1)

    def excess(a: float) -> float:
        load = _chances(weights(a), per_tok).reshape(case.num_ranks, -1).sum(1)
        return load.max() / load.mean() - case.imbalance

    return weights(_root(excess, 0.0, 20.0))


def _chances(weights: np.ndarray, per_tok: int) -> np.ndarray:
    """Return the sampling probability of each expert; they sum to `per_tok`."""
    log_c = _root(lambda x: -np.expm1(-np.exp(x) * weights).sum() - per_tok, -40.0, 80.0)
    return -np.expm1(-np.exp(log_c) * weights)


def _root(increasing: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return high
