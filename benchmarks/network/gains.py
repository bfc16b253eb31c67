"""Gain over `plain` by the imbalance of the ranks and the rate of the links, and its break-even."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np

from benchmarks.network.testbed import CONFIG, NUM_RANKS, Case
from benchmarks.render.results import Table, Value, spread
from jax_moe_lb import exact, plain
from jax_moe_lb.sim import LoadShape, ModelShape, skewed_counts

Key = TypeVar("Key")

_FIELDS = ("num_layers", "embed_dim", "mlp_dim", "num_experts", "experts_per_token")
_SIZES = (getattr(CONFIG.model, name) for name in _FIELDS)
MODEL = ModelShape(*_SIZES, CONFIG.tokens_per_step // NUM_RANKS, itemsize=4, pre_expert_s=0.0)

STEPS = 2
"""Steps of a routing, measured in turn."""

RATES, CASES = (1000e6, 2000e6, 8000e6), {"plain": Case(plain()), "exact": Case(exact())}
ROUTINGS = {f"popular ranks, {imbalance}": imbalance for imbalance in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)}
"""Imbalance of the ranks by the name of its routing."""


@cache
def counts_of(routing: str) -> np.ndarray:
    """Return `[STEPS, layers, R, E]` synthetic counts of a routing."""
    steps = (
        skewed_counts(MODEL, NUM_RANKS, ROUTINGS[routing], MODEL.layers, seed, LoadShape.RANKS) for seed in range(STEPS)
    )
    return np.stack(list(steps))


@cache
def records() -> tuple[np.ndarray, dict[str, list[list[float]]]]:
    """Return the records of all routings, and those of each routing by step and layer."""
    return numbered({routing: counts_of(routing) for routing in ROUTINGS})


def numbered(counts: Mapping[Key, np.ndarray]) -> tuple[np.ndarray, dict[Key, list[list[float]]]]:
    """Return counts `[steps, layers, R, E]` of all keys as records `[records, R, E]`, and the numbers of each key's."""
    numbers, first = {}, 0
    for key, of in counts.items():
        last = first + math.prod(of.shape[:2])
        numbers[key] = np.arange(first, last, dtype=np.float64).reshape(of.shape[:2]).tolist()
        first = last
    return np.concatenate([of.reshape(-1, *of.shape[2:]) for of in counts.values()]), numbers


GAINS = {"system": "", "over": "", "Mbit/s": ".0f", "imbalance": ".2f", "exchanges %": ".0f"}
GAINS |= {"predicted": ".2f", "measured": ".2f"}


def gain_rows(predicted: Table, times: Mapping[Any, np.ndarray]) -> list[list[Value]]:
    """Return predicted and measured gains of `exact` over `plain`; measured ratios are inside a pass.

    Args:
        predicted: predictions of a round, with the shares of exchanges.
        times: milliseconds of a step in each pass, by rate in Mbit/s, routing and system.
    """
    expected = {(point["Mbit/s"], point["routing"], point["system"]): point for point in predicted.dicts()}
    rows: list[list[Value]] = []
    for rate, (routing, imbalance) in product(RATES, ROUTINGS.items()):
        keys = [(rate / 1e6, routing, system) for system in ("plain", "exact")]
        base, own = (expected[key] for key in keys)
        ratio = base["predicted ms"] / own["predicted ms"]
        gain = spread(times[keys[0]] / times[keys[1]])
        rows.append(["exact", "plain", rate / 1e6, imbalance, base["exchanges %"], ratio, gain])
    return rows


def break_even(table: Table) -> Table:
    """Return the imbalance of equal speed for each pair of systems and rate, linear between the points of `GAINS`."""
    of_links: dict[tuple[Value, ...], list[Any]] = defaultdict(list)
    for system, baseline, rate, *row in table.rows:
        of_links[system, baseline, rate].append(row)
    rows: list[list[Value]] = []
    for link, of in of_links.items():
        levels, _, predicted, measured = zip(*of, strict=True)
        # The highest gains give the lowest break-even.
        even = [crossing(levels, [gain[number] for gain in measured]) for number in (0, 2, 1)]
        known = [level for level in even if level is not None]
        rows.append([*link, crossing(levels, predicted), known if len(known) == len(even) else None])
    columns = {name: GAINS[name] for name in ("system", "over", "Mbit/s")}
    return Table({**columns, "break-even, predicted": ".2f", "break-even, measured": ".2f"}, rows)


def crossing(levels: Sequence[float], gains: Sequence[float]) -> float | None:
    """Return the level from which on the gain is at least 1, `None` if the last gain is below 1."""
    below = [number for number, gain in enumerate(gains) if gain < 1]
    if not below:
        return levels[0]
    last = below[-1]
    if last == len(levels) - 1:
        return None
    low, high = gains[last], gains[last + 1]
    return float(levels[last] + (1 - low) / (high - low) * (levels[last + 1] - levels[last]))
