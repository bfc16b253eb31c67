"""Synthetic counts with a given imbalance (`skewed_counts`), also over steps with drift (`drifting_counts`)."""

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.core.checks import Count, Least, Natural, check_value
from jax_moe_lb.core.topology import home_experts_per_rank
from jax_moe_lb.sim.drift import Drift
from jax_moe_lb.sim.limits import check_entries, check_tokens
from jax_moe_lb.sim.model import ModelShape

POWERS = (0.3125, 0.625, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
"""Powers tried in order; the first one with enough skew bounds the bisection."""

MOST_TRIES = 16
"""Number of random orders tried until one allows the imbalance, which few experts may not."""


class LoadShape(StrEnum):
    """Distribution of popularity over experts, at any level of skew.

    Attributes:
        RANKS: Popularity of home ranks falls as a power of their random order. Inside a rank, the second expert is half
            as popular as the first, the third a third, and so on.
        HOT: One hot expert per rank: as `RANKS`, but inside a rank popularity falls as the fourth power of the
            position, as in UltraEP's simulations.
        LOGNORMAL: The logarithm of each expert's popularity is normal.
        ZIPF: Popularity falls as a power of the expert's random order, independent of the home.

    Examples:
        >>> from jax_moe_lb.sim import LoadShape
        >>> LoadShape("zipf") is LoadShape.ZIPF
        True
    """

    RANKS = "popular ranks"
    HOT = "one hot expert per rank"
    LOGNORMAL = "lognormal"
    ZIPF = "zipf"


def skewed_counts(
    model: ModelShape,
    num_ranks: int,
    imbalance: float,
    layers: int,
    seed: int = 0,
    shape: LoadShape = LoadShape.RANKS,
) -> Int[np.ndarray, "X R E"]:
    """Sample counts with a given imbalance of the ranks under plain expert parallelism.

    Use it to study a system as the skew grows; prefer recorded counts if available. The shape gives the distribution of
    popularity, and its power is fitted to the imbalance in each layer. A token chooses each expert at most once, so no
    expert has more copies than tokens. Each rank samples its own counts. At imbalance 1, all experts get the same
    count, up to rounding.

    Args:
        model: Shape with the numbers of tokens, experts and experts per token.
        num_ranks: Number of ranks `R`.
        imbalance: `max / mean` of the ranks' load; 1 is balanced. UltraEP reports 1.3 to 4 without balancing.
        layers: Number of layers to sample, each different.
        seed: Random seed; 0 by default. The same seed gives the same counts.
        shape: Distribution of popularity; `LoadShape.RANKS` by default. The gain of a system depends on it: systems
            that move whole experts need ranks with several popular experts.

    Returns:
        `[layers, R, E]` int32.

    Raises:
        ValueError: A number is out of range, the experts are no multiple of the ranks, the imbalance exceeds the
            maximum for distinct experts per token, the copies of a layer exceed int32, or the counts exceed the size
            limit.

    Examples:
        >>> from jax_moe_lb.sim import ModelShape, skewed_counts
        >>> model = ModelShape(layers=2, hidden=64, inner=128, experts=16, per_token=2, tokens=1000)
        >>> counts = skewed_counts(model, num_ranks=4, imbalance=1.5, layers=2)
        >>> load = counts[0].sum(0).reshape(4, 4).sum(1)
        >>> counts.shape, int(counts[0].sum()), round(float(load.max() / load.mean()), 1)
        ((2, 4, 16), 8000, 1.5)
    """
    return drifting_counts(model, num_ranks, (0,), layers, Drift(), imbalance, seed, shape)[0]


def drifting_counts(
    model: ModelShape,
    num_ranks: int,
    times: Sequence[int],
    layers: int,
    drift: Drift,
    imbalance: float | None = None,
    seed: int = 0,
    shape: LoadShape = LoadShape.LOGNORMAL,
) -> Int[np.ndarray, "steps X R E"]:
    """Sample counts of several steps with drifting popularity of experts.

    Use it with `replay` for balancers that plan from earlier steps. Every layer has its own popularity, drift and
    power.

    Args:
        model: See `skewed_counts`.
        num_ranks: Number of ranks `R`.
        times: Step numbers in increasing order, such as `range(64)`; gaps are allowed.
        layers: Number of layers to sample.
        drift: Change of popularity over steps.
        imbalance: `max / mean` of the ranks' load in the last step, before `rank_std` and sampling. Other steps follow
            from the drift. None (default) uses `drift.spread` instead.
        seed: Random seed; 0 by default.
        shape: Distribution of the steady part of popularity; `LoadShape.LOGNORMAL` by default. Ignored if `imbalance`
            is None; popularity is then lognormal.

    Returns:
        `[steps, layers, R, E]` int32.

    Raises:
        ValueError: Both `imbalance` and `drift.spread` are None, the times do not increase, or the reasons of
            `skewed_counts`.

    Examples:
        >>> from jax_moe_lb.sim import Drift, ModelShape, drifting_counts
        >>> model = ModelShape(layers=2, hidden=64, inner=128, experts=16, per_token=2, tokens=4096)
        >>> drift = Drift(steady=0.4, drifting=0.6, steps=8.0)
        >>> load = drifting_counts(model, 4, range(40), 2, drift, imbalance=2.0).sum(2)
        >>> near, far = (abs(load[lag:] - load[:-lag]).mean() for lag in (1, 16))
        >>> load.shape, bool(near < far / 2)
        ((40, 2, 16), True)
    """
    check_value("num_ranks", num_ranks, Count)
    check_value("layers", layers, Count)
    check_value("seed", seed, Natural)
    check_value("shape", shape, LoadShape)
    if imbalance is not None:
        check_value("imbalance", imbalance, Annotated[float, Least(1.0)])
    home_experts_per_rank(model.experts, num_ranks)
    check_entries(len(times) * layers, num_ranks, model.experts)
    check_tokens(model.tokens, model.per_token, num_ranks)
    if not len(times) or any(a >= b for a, b in pairwise(times)):
        raise ValueError(f"times are {list(times)[:8]}; expected increasing numbers of steps")
    # Drift has its own generator, so that counts without drift do not depend on it.
    rng, of_drift = np.random.default_rng(seed), np.random.default_rng((seed, 2))
    drawn = []
    for _ in range(layers):
        path = drift.path(times, model.experts, of_drift)
        if imbalance is None:
            chances = _as_spread(drift, path, model, rng)
        else:
            chances = _fitted(model, num_ranks, imbalance, shape, rng, path)
        drawn.append(_drawn(_own(chances, drift, num_ranks, of_drift), model, rng))
    return np.stack(drawn, 1)


def _fitted(
    model: ModelShape,
    num_ranks: int,
    imbalance: float,
    shape: LoadShape,
    rng: np.random.Generator,
    path: Float[np.ndarray, "steps E"],
) -> Float[np.ndarray, "steps E"]:
    """Return the probability of every expert by step, at the power with the given imbalance in the last step."""
    most = 1.0

    def chances(power: float, drifted: Float[np.ndarray, "*D E"]) -> Float[np.ndarray, "*D E"]:
        # Drift scales with the spread of popularity, without the fixed part inside each rank.
        logs = _logs(shape, power, places, model) + power * places.std() * drifted
        return _saturated(logs, model)

    for _ in range(MOST_TRIES):
        places = _places(shape, model.experts, num_ranks, rng)
        low = 0.0
        for high in POWERS:
            found = _imbalance(chances(high, path[-1]), num_ranks)
            most = max(most, found)
            if found >= imbalance or imbalance == 1:
                # Fifty bisections reach the precision of float64.
                for _ in range(50):
                    middle = (low + high) / 2
                    is_low = _imbalance(chances(middle, path[-1]), num_ranks) < imbalance
                    low, high = (middle, high) if is_low else (low, middle)
                return chances(low, path)
            low = high
    raise ValueError(
        f"imbalance is {imbalance}; expected at most {most:.2f}, as a token chooses {model.per_token} different "
        f"ones of {model.experts} experts on {num_ranks} ranks"
    )


def _as_spread(
    drift: Drift, path: Float[np.ndarray, "steps E"], model: ModelShape, rng: np.random.Generator
) -> Float[np.ndarray, "steps E"]:
    """Return probabilities whose logarithms have the spread of a recording."""
    if drift.spread is None:
        raise ValueError("imbalance is None, and drift has no spread; expected one of them")
    # Use the drift's spread: the standard deviation of this sample differs from it.
    steady_std = drift.spread * math.sqrt(drift.steady)
    return _saturated(steady_std * (rng.standard_normal(model.experts) + path), model)


def _own(
    chances: Float[np.ndarray, "steps E"], drift: Drift, num_ranks: int, rng: np.random.Generator
) -> Float[np.ndarray, "steps R E"]:
    """Return the probabilities per rank, given its own text."""
    every = np.tile(chances[:, None], (1, num_ranks, 1))
    if not drift.rank_std:
        return every
    # Invert `chance = 1 - exp(-popularity)`.
    popularity = -np.log1p(-np.minimum(every, 1 - 1e-12))
    own = popularity * np.exp(drift.rank_std * rng.standard_normal(every.shape))
    # Probabilities then sum to about `K`; `_whole` distributes the rest.
    own *= popularity.sum(2, keepdims=True) / np.maximum(own.sum(2, keepdims=True), 1e-300)
    return -np.expm1(-own)


def _places(shape: LoadShape, num_experts: int, num_ranks: int, rng: np.random.Generator) -> Float[np.ndarray, "..."]:
    """Sample the log popularity that the power multiplies: `[R]`, or `[E]` for lognormal and Zipf shapes."""
    if shape is LoadShape.LOGNORMAL:
        return rng.standard_normal(num_experts)
    return -np.log(rng.permutation(num_experts if shape is LoadShape.ZIPF else num_ranks) + 1.0)


def _logs(
    shape: LoadShape, power: float, places: Float[np.ndarray, "..."], model: ModelShape
) -> Float[np.ndarray, "E"]:
    """Compute the log popularity per expert; at power 0 all are equal."""
    logs: np.ndarray = power * places
    if shape in (LoadShape.RANKS, LoadShape.HOT):
        inside: np.ndarray = -np.log(np.arange(1.0, model.experts // len(places) + 1))
        falls = 4.0 if shape is LoadShape.HOT else 1.0
        logs = (logs[:, None] + (falls * inside if power else 0.0 * inside)).reshape(-1)
    return logs


def _saturated(logs: Float[np.ndarray, "*D E"], model: ModelShape) -> Float[np.ndarray, "*D E"]:
    """Compute probabilities from log popularity: `1 - exp(-c w)`, with `c` such that they sum to `K`."""
    # Work with logarithms, because weights underflow to 0 at large powers.
    with np.errstate(over="ignore", under="ignore"):
        low, high = -50.0 - logs.max(-1, keepdims=True), 50.0 - logs.min(-1, keepdims=True)
        for _ in range(60):
            middle = (low + high) / 2
            total = -np.expm1(-np.exp(np.minimum(middle + logs, 700))).sum(-1, keepdims=True)
            is_low = total < model.per_token
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        return -np.expm1(-np.exp(np.minimum(low + logs, 700)))


def _imbalance(chances: Float[np.ndarray, "E"], num_ranks: int) -> float:
    load = chances.reshape(num_ranks, -1).sum(1)
    return float(load.max() / load.mean())


def _drawn(
    chances: Float[np.ndarray, "steps R E"], model: ModelShape, rng: np.random.Generator
) -> Int[np.ndarray, "steps R E"]:
    # Equal probabilities give equal counts.
    expected = chances * model.tokens
    if np.ptp(chances) > 0:
        sampled = rng.binomial(model.tokens, chances)
        # A rank with few tokens may sample no copy at all.
        expected = np.where(sampled.any(-1, keepdims=True), sampled, expected)
    return _whole(expected.reshape(-1, model.experts), model).reshape(expected.shape)


def _whole(expected: Float[np.ndarray, "N E"], model: ModelShape) -> Int[np.ndarray, "N E"]:
    """Round to integers of at most `T` that sum to `T * K` in every row."""
    copies, (_, experts) = model.tokens * model.per_token, expected.shape
    counts = np.floor(expected * copies / expected.sum(1, keepdims=True)).clip(0, model.tokens).astype(np.int64)
    missing: np.ndarray = copies - counts.sum(1)
    rows = np.arange(len(counts))
    # Assign the remainder to the most popular experts below the limit first, as it changes their share least.
    for column in np.argsort(-expected, axis=1, kind="stable").T:
        if missing.max() <= 0:
            break
        more = np.minimum(np.minimum(missing, model.tokens - counts[rows, column]), np.maximum(1, missing // experts))
        more = np.maximum(more, 0)
        counts[rows, column] += more
        missing = missing - more
    for at in np.flatnonzero(missing > 0):
        row = counts[at]
        while (left := copies - int(row.sum())) > 0:
            row[np.flatnonzero(row < model.tokens)[:left]] += 1
    return counts.astype(np.int32)
