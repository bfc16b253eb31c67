"""Loads with a wanted token straggler, as FEPLB's paper publishes them (figure 5 of arXiv 2604.19654).

The popularity of the 128 experts is lognormal, `exp(width z)` with `z` normal and drawn anew for every microbatch;
every rank draws its 32768 token copies from it, independently of the others. `width` is all that is fitted, by
bisection and for each number of ranks: the mean straggler of the microbatches, in expectation, is the published one
(0.84, 0.67 and 0.50 for 2, 4 and 8 ranks; one value for all of them would not give the published three). How many
token copies a rank has is not published; 4096 tokens of 8 experts each are in line with what is. Neither is the shape
of popularity; `zipf` is another.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NUM_EXPERTS = 128
COPIES_PER_RANK = 32768

Shape = Callable[[np.ndarray, float], np.ndarray]
"""`(normal [N, E], width) -> [N, E]`, the popularity of experts, of any sum; with a width of 0 all are alike."""


@dataclass(frozen=True)
class Case:
    """One row of the figure.

    Args:
        num_ranks: `R`, one domain.
        straggler: `max(load) - mean(load)` before balancing, in token copies, averaged over microbatches.
        fastermoe: the same after FasterMoE.
        feplb: the same after FEPLB.
    """

    num_ranks: int
    straggler: int
    fastermoe: int
    feplb: int


CASES = (Case(2, 2278, 1014, 1107), Case(4, 4649, 2471, 1697), Case(8, 6666, 4036, 2021))

DYNAMIC = {2: 65, 4: 68, 8: 70}
"""Figure 6: by how much FEPLB's straggler falls on 8 ranks, in percent, by dynamic experts of a rank."""


def lognormal(normal: np.ndarray, width: float) -> np.ndarray:
    """The logarithm is normal."""
    return np.exp(width * normal)


def zipf(normal: np.ndarray, width: float) -> np.ndarray:
    """The n-th most popular has `n**-width`: the logarithm is exponential, so the tail is heavier."""
    position = np.argsort(np.argsort(-normal, axis=1), axis=1) + 1.0
    return position**-width


def counts(case: Case, seed: int, number: int, copies: int = COPIES_PER_RANK, shape: Shape = lognormal) -> np.ndarray:
    """`[number, R, E]` int32, one `[R, E]` for each microbatch, with so many token copies of every rank."""
    rng = np.random.default_rng((seed, case.num_ranks))
    normal = rng.standard_normal((number, NUM_EXPERTS))
    low, high = 0.0, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        enough = copies * _straggler(_shares(shape(normal, middle)), case.num_ranks) >= case.straggler
        low, high = (low, middle) if enough else (middle, high)
    shares = _shares(shape(normal, high))
    return rng.multinomial(copies, shares[:, None], (number, case.num_ranks)).astype(np.int32)


def _shares(popularity: np.ndarray) -> np.ndarray:
    return popularity / popularity.sum(1, keepdims=True)


def _straggler(shares: np.ndarray, num_ranks: int) -> float:
    """Of one token copy on every rank."""
    load = num_ranks * shares.reshape(len(shares), num_ranks, -1).sum(2)
    return float((load.max(1) - load.mean(1)).mean())
