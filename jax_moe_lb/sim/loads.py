"""`skewed_counts` draws counts to simulate where nobody has recorded any."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jax_moe_lb.checks import home_experts_per_rank
from jax_moe_lb.sim.limits import check_entries, check_tokens
from jax_moe_lb.sim.model import ModelShape

HIGHEST_POWER = 40.0


def skewed_counts(
    model: ModelShape, num_ranks: int, imbalance: float, layers: int, seed: int = 0
) -> Int[np.ndarray, "X R E"]:
    """Draws counts whose ranks have a wanted imbalance under plain expert parallelism.

    Use recorded counts where there are some, and these to see how a system behaves as the skew grows. The popularity of
    home ranks falls as a power of their place, in an order drawn for every layer; the power is fitted to the imbalance,
    in each layer for itself. Inside a rank the second expert is half as popular as the first, the third a third, and so
    on. No token chooses an expert twice: none has more copies than tokens. What a rank sends is a draw from that, so
    that ranks differ as samples do; at imbalance 1 all experts get the same, up to rounding.

    Args:
        model: says how many tokens, experts and choices there are.
        num_ranks: `R`.
        imbalance: `max / mean` of the ranks' load, 1 is level, and UltraEP saw 1.3 to 4 without balancing.
        layers: how many layers to draw, each different.
        seed: the seed of the draw; the same seed gives the same counts.

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
    return np.stack([_layer(model, num_ranks, imbalance, rng) for _ in range(layers)])


def _layer(model: ModelShape, num_ranks: int, imbalance: float, rng: np.random.Generator) -> Int[np.ndarray, "R E"]:
    order = rng.permutation(num_ranks)
    low, high = 0.0, HIGHEST_POWER
    if imbalance > 1 and _imbalance(_chances(high, order, model), num_ranks) < imbalance:
        most = _imbalance(_chances(high, order, model), num_ranks)
        raise ValueError(
            f"imbalance is {imbalance}; expected at most {most:.2f}, as a token chooses {model.per_token} different "
            f"ones of {model.experts} experts on {num_ranks} ranks"
        )
    # Fifty halvings of the interval leave less than a float64 can tell apart.
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _imbalance(_chances(middle, order, model), num_ranks) < imbalance else (low, middle)
        )
    chances = _chances(low, order, model)
    if imbalance <= 1:
        expected = np.tile(chances * model.tokens, (num_ranks, 1))
    else:
        expected = rng.binomial(model.tokens, chances, (num_ranks, model.experts)).astype(float)
    return _whole(expected, model)


def _chances(power: float, order: Int[np.ndarray, "R"], model: ModelShape) -> Float[np.ndarray, "E"]:
    """Computes the chance that a token chooses each expert: `1 - exp(-c w)`; all are alike at power 0.

    `c` is such that they add up to `K`.
    """
    # Logarithms carry powers at which the weights themselves would be 0.
    with np.errstate(over="ignore", under="ignore"):
        places = np.arange(1.0, model.experts // len(order) + 1)
        logs: Any = -power * np.log(order + 1.0)[:, None] - (np.log(places) if power else 0.0 * places)
        logs = logs.reshape(-1)
        low, high = -50.0, 50.0 - float(logs.min())
        for _ in range(60):
            middle = (low + high) / 2
            total = -np.expm1(-np.exp(np.minimum(middle + logs, 700))).sum()
            low, high = (middle, high) if total < model.per_token else (low, middle)
        return -np.expm1(-np.exp(np.minimum(low + logs, 700)))


def _imbalance(chances: Float[np.ndarray, "E"], num_ranks: int) -> float:
    load = chances.reshape(num_ranks, -1).sum(1)
    return float(load.max() / load.mean())


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
