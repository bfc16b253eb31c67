"""Runs of the training table: their cases, counts and curves, and the steps that the testbed times."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.network.replayed import recorded
from benchmarks.network.testbed import CASES, CONFIG, DOMAIN_CASES, NUM_RANKS
from benchmarks.network.training_rounds import TRACES
from jax_moe_lb.routing.more_routers import capacity

STEPS, INTERVAL = 1000, 50
"""Steps of a run, and steps of an interval; the testbed times the middle one of each interval."""

TIMED = tuple(range(INTERVAL // 2 - 1, STEPS, INTERVAL))
"""Indices of the timed steps."""

BATCH_TOKENS = 256
"""Tokens of each rank in a step of the curves."""

WINDOW = 100
"""Steps of a mean loss."""

RECORDING = TRACES / "free_0.npz"

FLAT, DOMAINS = "", ", two domains"
"""Ends of the names of runs on each network."""

RUNS = {
    FLAT: CASES,
    DOMAINS: {f"{name}{DOMAINS}": DOMAIN_CASES[name] for name in ("plain", "two_tier", "hybridep")},
}
"""Runs on each network."""

OWN, REPLAYED = "own", "replayed"


def runs(routing: str, network: str) -> list[str]:
    """Return the names of the runs with a routing on a network."""
    # Bias and auxiliary loss change the training of the router alone.
    return [name for name, case in RUNS[network].items() if routing == OWN or not (case.bias_rate or case.aux_loss)]


class Curve(NamedTuple):
    """Every step of a run."""

    loss: np.ndarray
    dropped: np.ndarray
    before: np.ndarray
    after: np.ndarray
    rounds: np.ndarray
    counts: np.ndarray


Curves = Mapping[str, Curve]


def last_mean(loss: np.ndarray) -> float:
    """Return the mean of the last losses."""
    return float(loss[-WINDOW:].mean())


def save_curves(curves: Curves, path: Path) -> None:
    """Write curves."""
    arrays = {f"{name}/{field}": of for name, curve in curves.items() for field, of in curve._asdict().items()}
    np.savez_compressed(path, **arrays)


def load_curves(path: Path) -> dict[str, Curve]:
    """Return the curves of a file, none if it does not exist."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        names = dict.fromkeys(key.rpartition("/")[0] for key in file.files)
        return {name: Curve(*(file[f"{name}/{field}"] for field in Curve._fields)) for name in names}


@cache
def recorded_counts(num_tokens: int) -> np.ndarray:
    """Return the counts `[steps, layers, R, E]` of the recording, for a number of tokens of each rank."""
    shape = CONFIG.model.num_layers, NUM_RANKS, CONFIG.model.num_experts
    return recorded(RECORDING, shape, num_tokens, CONFIG.model.experts_per_token)


def timed_counts(name: str, network: str, curves: Curves, num_tokens: int) -> np.ndarray:
    """Return the counts `[len(TIMED), layers, R, E]` of the timed steps of a run."""
    counts = curve_of(name, curves).counts[list(TIMED)]
    per_token, factor = CONFIG.model.experts_per_token, RUNS[network][name].capacity_factor
    if factor is not None:
        limit = capacity(factor, BATCH_TOKENS * per_token, CONFIG.model.num_experts)
        counts = with_dropped(counts, limit, BATCH_TOKENS, per_token)
    return counts * (num_tokens // BATCH_TOKENS)


def curve_of(name: str, curves: Curves) -> Curve:
    """Return the curve of a run; `plain` trains equally on both networks."""
    return curves["plain" if name == f"plain{DOMAINS}" else name]


def with_dropped(kept: np.ndarray, limit: int, num_tokens: int, per_token: int) -> np.ndarray:
    """Return counts whose copies within capacity are the given ones."""
    missing = num_tokens * per_token - kept.sum(-1, keepdims=True)
    room = np.where(kept == limit, num_tokens - limit, 0)
    before = np.cumsum(room, -1) - room
    return (kept + np.clip(missing - before, 0, room)).astype(np.int32)
