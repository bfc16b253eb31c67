"""Loads with a given token straggler, as published in FEPLB's paper (figure 5 of arXiv 2604.19654).

The popularity of the 128 experts is lognormal, `exp(width z)` with a normal `z` sampled for every microbatch. Every
rank samples its 32768 token copies from it, independently. Only `width` is fitted, by bisection for each number of
ranks, so that the expected mean straggler equals the published one. It is 0.84, 0.67 and 0.50 for 2, 4 and 8 ranks; no
single value matches all three. The token copies per rank are not published; 4096 tokens with 8 experts each are
consistent with the paper. Neither is the popularity distribution; `zipf` is an alternative.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NUM_EXPERTS = 128
COPIES_PER_RANK = 32768

Shape = Callable[[np.ndarray, float], np.ndarray]
"""`(normal [N, E], width) -> [N, E]`, unnormalised popularity of experts; with a width of 0 all are equal."""


@dataclass(frozen=True)
class Case:
    num_ranks: int
    straggler: int
    fastermoe: int
    feplb: int


CASES = (Case(2, 2278, 1014, 1107), Case(4, 4649, 2471, 1697), Case(8, 6666, 4036, 2021))

DYNAMIC = {2: 65, 4: 68, 8: 70}
"""Figure 6: reduction of the straggler by FEPLB on 8 ranks, in percent, by dynamic experts per rank."""


def lognormal(normal: np.ndarray, width: float) -> np.ndarray:
    return np.exp(width * normal)


def zipf(normal: np.ndarray, width: float) -> np.ndarray:
    """Return a Zipf popularity, `n**-width` for the n-th most popular expert, with a heavier tail than lognormal."""
    position = np.argsort(np.argsort(-normal, axis=1), axis=1) + 1.0
    return position**-width


def counts(case: Case, seed: int, number: int, copies: int = COPIES_PER_RANK, shape: Shape = lognormal) -> np.ndarray:
    """Return sampled counts `[number, R, E]`, int32, one `[R, E]` per microbatch, with `copies` token copies per
    rank.
    """
    return sampled(case.num_ranks, width_of(case, seed, number, copies, shape), seed, number, copies, shape)


def width_of(case: Case, seed: int, number: int, copies: int = COPIES_PER_RANK, shape: Shape = lognormal) -> float:
    """Return the width of the popularity whose expected mean straggler is the published one."""
    normal = np.random.default_rng((seed, case.num_ranks)).standard_normal((number, NUM_EXPERTS))
    low, high = 0.0, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        enough = copies * _straggler(_shares(shape(normal, middle)), case.num_ranks) >= case.straggler
        low, high = (low, middle) if enough else (middle, high)
    return high


def sampled(num_ranks: int, width: float, seed: int, number: int, copies: int, shape: Shape = lognormal) -> np.ndarray:
    """Return counts `[number, R, E]` of a popularity of this width, as `counts`."""
    rng = np.random.default_rng((seed, num_ranks))
    shares = _shares(shape(rng.standard_normal((number, NUM_EXPERTS)), width))
    return rng.multinomial(copies, shares[:, None], (number, num_ranks)).astype(np.int32)


def _shares(popularity: np.ndarray) -> np.ndarray:
    return popularity / popularity.sum(1, keepdims=True)


def _straggler(shares: np.ndarray, num_ranks: int) -> float:
    """Return the straggler for one token copy per rank."""
    load = num_ranks * shares.reshape(len(shares), num_ranks, -1).sum(2)
    return float((load.max(1) - load.mean(1)).mean())
