"""`skewed_counts` draws counts to simulate where nobody has recorded any."""

from enum import StrEnum
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.checks import home_experts_per_rank
from jax_moe_lb.sim.limits import check_entries, check_tokens
from jax_moe_lb.sim.model import ModelShape

POWERS = (0.3125, 0.625, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
"""The smallest of these at which a shape is skewed enough bounds the search for the power that fits."""

MOST_TRIES = 16
"""Places are drawn so often where they do not allow the imbalance, as those of few experts may not."""


class LoadShape(StrEnum):
    """A load shape says how the popularity of experts is spread, besides how skewed it is.

    Attributes:
        RANKS: that of home ranks falls as a power of their place; inside a rank the second expert is half as popular as
            the first, the third a third, and so on.
        HOT: one hot expert per rank: the same, but inside a rank it falls as the fourth power of the place, as in
            UltraEP's simulations.
        LOGNORMAL: the logarithm of each expert's is normal.
        ZIPF: it falls as a power of the expert's place, wherever that is at home.

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
    """Draws counts whose ranks have a wanted imbalance under plain expert parallelism.

    Use recorded counts where there are some, and these to see how a system behaves as the skew grows. The shape says
    who is popular; its power is fitted to the imbalance, in each layer for itself. No token chooses an expert twice:
    none has more copies than tokens. What a rank sends is a draw from that, so that ranks differ as samples do; at
    imbalance 1 all experts get the same, up to rounding.

    Args:
        model: says how many tokens, experts and choices there are.
        num_ranks: `R`.
        imbalance: `max / mean` of the ranks' load, 1 is level, and UltraEP saw 1.3 to 4 without balancing.
        layers: how many layers to draw, each different.
        seed: the seed of the draw; the same seed gives the same counts.
        shape: how popularity is spread. It decides what a system gains: one that moves whole experts needs ranks on
            which several are popular.

    Returns:
        `[layers, R, E]` int32.

    Raises:
        ValueError: the experts are no multiple of the ranks, the imbalance is above what choosing different experts
            allows, the copies of a layer do not fit int32, or the counts are too many to hold.

    Examples:
        >>> from jax_moe_lb.sim import ModelShape, skewed_counts
        >>> model = ModelShape(layers=2, hidden=64, inner=128, experts=16, per_token=2, tokens=1000)
        >>> counts = skewed_counts(model, num_ranks=4, imbalance=1.5, layers=2)
        >>> load = counts[0].sum(0).reshape(4, 4).sum(1)
        >>> counts.shape, int(counts[0].sum()), round(float(load.max() / load.mean()), 1)
        ((2, 4, 16), 8000, 1.5)
    """
    home_experts_per_rank(model.experts, num_ranks)
    check_entries(layers, num_ranks, model.experts)
    check_tokens(model.tokens, model.per_token, num_ranks)
    rng = np.random.default_rng(seed)
    return np.stack(
        [_drawn(_fitted(model, num_ranks, imbalance, shape, rng), model, num_ranks, rng) for _ in range(layers)]
    )


def _fitted(
    model: ModelShape, num_ranks: int, imbalance: float, shape: LoadShape, rng: np.random.Generator
) -> Float[np.ndarray, "E"]:
    """Returns the chance that a token chooses each expert, at the power that gives the imbalance."""
    most = 1.0
    for _ in range(MOST_TRIES):
        places = _places(shape, model.experts, num_ranks, rng)
        low = 0.0
        for high in POWERS:
            found = _imbalance(_chances(shape, high, places, model), num_ranks)
            most = max(most, found)
            if found >= imbalance or imbalance <= 1:
                return _chances(shape, _root(shape, low, high, places, model, num_ranks, imbalance), places, model)
            low = high
    raise ValueError(
        f"imbalance is {imbalance}; expected at most {most:.2f}, as a token chooses {model.per_token} different "
        f"ones of {model.experts} experts on {num_ranks} ranks"
    )


def _root(
    shape: LoadShape,
    low: float,
    high: float,
    places: Float[np.ndarray, "..."],
    model: ModelShape,
    num_ranks: int,
    imbalance: float,
) -> float:
    # Fifty halvings of the interval leave less than a float64 can tell apart.
    for _ in range(50):
        middle = (low + high) / 2
        is_low = _imbalance(_chances(shape, middle, places, model), num_ranks) < imbalance
        low, high = (middle, high) if is_low else (low, middle)
    return low


def _places(shape: LoadShape, num_experts: int, num_ranks: int, rng: np.random.Generator) -> Float[np.ndarray, "..."]:
    """Draws who is popular: `[R]` or `[E]`, the logarithm that the power is multiplied with."""
    if shape is LoadShape.LOGNORMAL:
        return rng.standard_normal(num_experts)
    return -np.log(rng.permutation(num_experts if shape is LoadShape.ZIPF else num_ranks) + 1.0)


def _chances(
    shape: LoadShape, power: float, places: Float[np.ndarray, "..."], model: ModelShape
) -> Float[np.ndarray, "E"]:
    """Computes the chance that a token chooses each expert: `1 - exp(-c w)`; all are alike at power 0.

    `c` is such that they add up to `K`.
    """
    logs: Any = power * places
    if shape in (LoadShape.RANKS, LoadShape.HOT):
        inside: Any = -np.log(np.arange(1.0, model.experts // len(places) + 1))
        falls = 4.0 if shape is LoadShape.HOT else 1.0
        logs = (logs[:, None] + (falls * inside if power else 0.0 * inside)).reshape(-1)
    # Logarithms carry powers at which the weights themselves would be 0.
    with np.errstate(over="ignore", under="ignore"):
        low, high = -50.0 - float(logs.max()), 50.0 - float(logs.min())
        for _ in range(60):
            middle = (low + high) / 2
            total = -np.expm1(-np.exp(np.minimum(middle + logs, 700))).sum()
            low, high = (middle, high) if total < model.per_token else (low, middle)
        return -np.expm1(-np.exp(np.minimum(low + logs, 700)))


def _imbalance(chances: Float[np.ndarray, "E"], num_ranks: int) -> float:
    load = chances.reshape(num_ranks, -1).sum(1)
    return float(load.max() / load.mean())


def _drawn(
    chances: Float[np.ndarray, "E"], model: ModelShape, num_ranks: int, rng: np.random.Generator
) -> Int[np.ndarray, "R E"]:
    if np.ptp(chances) == 0:
        expected = np.tile(chances * model.tokens, (num_ranks, 1))
    else:
        expected = rng.binomial(model.tokens, chances, (num_ranks, model.experts)).astype(float)
    return _whole(expected, model)


def _whole(expected: Float[np.ndarray, "R E"], model: ModelShape) -> Int[np.ndarray, "R E"]:
    """Rounds to whole numbers of at most `T` that add up to `T * K` on every rank."""
    copies = model.tokens * model.per_token
    counts = np.floor(expected * copies / expected.sum(1, keepdims=True)).clip(0, model.tokens).astype(np.int64)
    for row, wanted in zip(counts, expected, strict=True):
        # What rounding left goes to the busiest first that has room, which changes their share least.
        for expert in np.argsort(-wanted, kind="stable"):
            missing = copies - row.sum()
            if missing <= 0:
                break
            row[expert] += min(missing, model.tokens - row[expert], max(1, missing // len(row)))
        while (missing := copies - int(row.sum())) > 0:
            room = np.flatnonzero(row < model.tokens)[:missing]
            row[room] += 1
    return counts.astype(np.int32)
