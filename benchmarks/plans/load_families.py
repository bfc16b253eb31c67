"""Families of expert loads that are hard to level, for any number of ranks."""

import numpy as np

PER_EXPERT = 2048
"""Mean token copies of an expert."""


def families(num_ranks: int, num_home: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the tokens of each expert, `[R L]` int32, by the name of the family."""
    rng = np.random.default_rng(seed)
    size = num_ranks * num_home
    expert, rank = np.arange(size), np.arange(size) // num_home
    group = rank * max(num_ranks // 8, 2) // num_ranks
    hot = rng.random(num_ranks) < 0.3
    one = rng.lognormal(0, 0.5, size)
    chosen = int(rng.integers(size))
    one[chosen] = 1.5 * (one.sum() - one[chosen])  # 60 % of all tokens
    weights = {
        "equal hot experts": np.where(2 * expert < size, 1.0, 0.0),
        "hot groups": np.where(hot[group] | (group == 0), 6, 1) * rng.lognormal(0, 0.5, size),
        "half of the experts": np.where(rng.permutation(size) * 2 < size, 5, 0.5) * rng.lognormal(0, 0.1, size),
        "half of the ranks": np.where(rng.permutation(num_ranks)[rank] * 2 < num_ranks, 5, 0.5)
        * rng.lognormal(0, 0.1, size),
        "stages": 2.0 ** (4 * rank // num_ranks) * rng.lognormal(0, 0.2, size),
        "one expert": one,
        "primes": primes(size)[::-1].astype(float),
        "lognormal": rng.lognormal(0, 1, size),
        "zipf": rng.permutation(1.0 / (1 + expert) ** 1.2),
        "uneven ranks": rng.lognormal(0, 0.6, size) * rng.lognormal(0, 0.8, num_ranks)[rank],
    }
    return {name: (PER_EXPERT * size * its / its.sum()).astype(np.int32) for name, its in weights.items()}


def primes(number: int) -> np.ndarray:
    most = max(16, int(2 * number * np.log(number + 2)))
    is_prime = np.ones(most, bool)
    is_prime[:2] = False
    for factor in range(2, int(most**0.5) + 1):
        if is_prime[factor]:
            is_prime[factor * factor :: factor] = False
    return np.flatnonzero(is_prime)[:number]


def spread(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return counts `[R, E]` int32 with the tokens of every expert spread evenly over the source ranks."""
    counts = np.tile(tokens // num_ranks, (num_ranks, 1)).astype(np.int32)
    counts[0] += tokens % num_ranks
    return counts
