"""Kinds of inputs of the random layer test."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pattern:
    """A kind of input.

    Args:
        liking: `(rng, R, E) -> [R, E]`, preferences of a rank's tokens, added to each token's own random preference.
        strength: step from one preference to the next, in logits.
        taste: scale of each token's own preference.
        levels: number of distinct preferences after rounding, to create ties; 0 disables rounding.
        noise: scale of the effect of features on logits.
        alike: if True, all tokens of a rank are equal.
        features: scale of the features.
        tokens: scale of whole tokens, 0 for zero tokens.
        padding: `(rng, [R, T]) -> ` mask, for programs with a mask.
        filling: value of padding.
    """

    liking: Callable[[np.random.Generator, int, int], np.ndarray] = lambda rng, ranks, experts: np.zeros((1, experts))
    strength: float = 0.25
    taste: float = 1.0
    levels: int = 0
    noise: float = 1.0
    alike: bool = False
    features: float = 1.0
    tokens: float = 1.0
    padding: Callable[[np.random.Generator, int, int], np.ndarray] = lambda rng, ranks, tokens: np.ones((1, 1), bool)
    filling: float = 0.0


def zipf(rng: np.random.Generator, ranks: int, experts: int) -> np.ndarray:
    return np.log(rng.permutation(np.arange(1.0, experts + 1) ** -1.5))[None]


def one_expert(rng: np.random.Generator, ranks: int, experts: int) -> np.ndarray:
    return 100.0 * (np.arange(experts) == rng.integers(experts))[None]


def one_rank(rng: np.random.Generator, ranks: int, experts: int) -> np.ndarray:
    block = max(experts // ranks, 1)
    return 100.0 * (np.arange(experts) // block == rng.integers(experts // block))[None]


def few_experts(rng: np.random.Generator, ranks: int, experts: int) -> np.ndarray:
    return 100.0 * (rng.permutation(experts) < 3)[None]


def own_tastes(rng: np.random.Generator, ranks: int, experts: int) -> np.ndarray:
    return 5.0 * rng.normal(size=(ranks, experts))


def idle_ranks(rng: np.random.Generator, ranks: int, tokens: int) -> np.ndarray:
    return rng.random((ranks, 1)) < 0.5


def half(rng: np.random.Generator, ranks: int, tokens: int) -> np.ndarray:
    return rng.random((ranks, tokens)) < 0.5


def one_token(rng: np.random.Generator, ranks: int, tokens: int) -> np.ndarray:
    return np.arange(ranks * tokens).reshape(ranks, tokens) == rng.integers(ranks * tokens)


def nothing(rng: np.random.Generator, ranks: int, tokens: int) -> np.ndarray:
    return np.zeros((1, 1), bool)


PATTERNS = {
    "uniform": Pattern(),
    "zipf": Pattern(zipf),
    "one expert": Pattern(one_expert),
    "one rank": Pattern(one_rank),
    "few experts": Pattern(few_experts, padding=half),
    "own tastes": Pattern(own_tastes),
    "all alike": Pattern(own_tastes, taste=0.0, alike=True),
    "ties": Pattern(zipf, levels=3, noise=0.0),
    "no preferences": Pattern(strength=0.0, noise=0.0),
    "tokens of zeros": Pattern(tokens=0.0),
    "huge logits": Pattern(zipf, strength=1000.0, noise=0.0),
    "tiny logits": Pattern(strength=1e-2, noise=0.0),
    "large features": Pattern(zipf, features=100.0, noise=0.01),
    "tiny tokens": Pattern(zipf, tokens=2.0**-10, strength=1.0, noise=0.0),
    "idle ranks": Pattern(zipf, padding=idle_ranks),
    "padding of NaN": Pattern(zipf, padding=half, filling=np.nan),
    "one token": Pattern(padding=one_token),
    "nothing but padding": Pattern(padding=nothing),
}
