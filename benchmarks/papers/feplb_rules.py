"""Interpretations of FEPLB's paper (arXiv 2604.19654) for unspecified rules of its scheduler, vectorized over
microbatches.

The paper gives the order of moves: the rank with the highest load gives its busiest dynamic expert not yet moved,
whole, to the rank with the lowest load. A `Reading` specifies the other rules. `jax_moe_lb.balancers.FEPLB` has some of
them as options; here all are implemented in NumPy for comparison.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import ndtri

NO_LIMIT = np.iinfo(np.int64).max
NO_TAKER = 2**40
"""Larger than any load."""


def of_history(tokens: np.ndarray, correlation: float) -> np.ndarray:
    """Return normal scores of the experts' popularity with the given correlation to the microbatch."""
    position = np.argsort(np.argsort(tokens, axis=1), axis=1)
    normal = ndtri((position + 0.5) / tokens.shape[1])
    noise = np.random.default_rng(0).standard_normal(tokens.shape)
    return correlation * normal + np.sqrt(1 - correlation**2) * noise


DYNAMIC: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "busiest": lambda tokens: tokens,
    "fixed, first": lambda tokens: np.broadcast_to(-np.arange(tokens.shape[1]), tokens.shape),
    "fixed, history 0.5": partial(of_history, correlation=0.5),
    "fixed, history 0.9": partial(of_history, correlation=0.9),
}
"""Scores `[N, E]` of tokens `[N, E]` selecting the dynamic experts of a rank, the highest ones.

The first experts by index represent any choice independent of load. History predicts a microbatch with the correlation
in its name.
"""

ACCEPT: Mapping[str, Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "taker < donor before": lambda tokens, giver, taker, mean: taker + tokens < giver,
    "donor >= mean": lambda tokens, giver, taker, mean: giver - tokens >= mean,
    "taker <= donor": lambda tokens, giver, taker, mean: taker + tokens <= giver - tokens,
    "any": lambda tokens, giver, taker, mean: np.ones_like(tokens, bool),
}
"""Condition for a useful move, from the tokens of the expert, and donor, taker and mean load before the move."""

BUDGET: Mapping[str, Callable[[int], tuple[int, int]]] = {
    "8 per taker": lambda num_dynamic: (8, NO_LIMIT),
    "dyn per taker": lambda num_dynamic: (num_dynamic, NO_LIMIT),
    "8 in total": lambda num_dynamic: (8, 8),
    "dyn in total": lambda num_dynamic: (8, num_dynamic),
}
"""Maximum experts taken by a rank, and moved per microbatch, by the number of dynamic experts per rank."""

TAU = (1, 512, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072)


@dataclass(frozen=True)
class Reading:
    """One combination of rules."""

    dynamic: str = "busiest"
    accept: str = "taker < donor before"
    skip: bool = False
    tau: int = 1
    budget: str = "8 per taker"
    main: int = 4

    def __str__(self) -> str:
        after = "next" if self.skip else "stop"
        return " | ".join([self.dynamic, self.accept, after, str(self.tau), self.budget, str(self.main)])


def readings() -> Iterator[Reading]:
    """Yield all readings; if any move is useful, `skip` has no effect."""
    for dynamic, accept, budget in itertools.product(DYNAMIC, ACCEPT, BUDGET):
        for skip, tau, main in itertools.product((False,) if accept == "any" else (False, True), TAU, (4, 8)):
            yield Reading(dynamic, accept, skip, tau, budget, main)


def straggler_after(loads: np.ndarray, reading: Reading, num_dynamic: int) -> np.ndarray:
    """Return `max(load) - mean(load)` after the moves, `[N]`, in token copies, with all ranks in one domain."""
    number, num_ranks, _ = loads.shape
    flat = loads.sum(1, dtype=np.int64)
    tokens, score = (values.reshape(number, num_ranks, -1) for values in (flat, DYNAMIC[reading.dynamic](flat)))
    order = np.argsort(np.argsort(-score, axis=2, kind="stable"), axis=2)
    movable = (order < num_dynamic) & (tokens >= reading.tau)
    load = tokens.sum(2)
    mean = load.mean(1)
    per_taker, in_all = BUDGET[reading.budget](num_dynamic)
    room, left, going = np.full(load.shape, per_taker), np.full(number, in_all), np.arange(number)
    while going.size:
        giver = load[going].argmax(1)
        able = (room[going] > 0) & (np.arange(num_ranks) != giver[:, None])
        taker = np.where(able, load[going], NO_TAKER).argmin(1)
        owned, dynamic = tokens[going, giver], movable[going, giver]
        ends = (load[going, giver], load[going, taker], mean[going])
        useful = ACCEPT[reading.accept](owned, *(value[:, None] for value in ends))
        expert = np.where(dynamic & useful if reading.skip else dynamic, owned, -1).argmax(1)
        each = np.arange(going.size)
        made = (dynamic & useful)[each, expert] & able[each, taker] & (left[going] > 0)
        going, giver, taker, expert = going[made], giver[made], taker[made], expert[made]
        moved = tokens[going, giver, expert]
        load[going, giver] -= moved
        load[going, taker] += moved
        room[going, taker] -= 1
        left[going] -= 1
        movable[going, giver, expert] = False
    return load.max(1) - mean
