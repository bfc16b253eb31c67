"""Points of each round of `training`: systems, replayed counts and links."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.network.replayed import recorded
from benchmarks.network.testbed import CONFIG, DOMAIN_CASES, NUM_RANKS, SYSTEMS, Case
from jax_moe_lb import Topology, exact, plain
from jax_moe_lb.planners import plan_relocation
from jax_moe_lb.sim import LoadShape, ModelShape, skewed_counts

TRACES = Path(__file__).parents[1] / "traces"

NUM_TOKENS = CONFIG.tokens_per_step // NUM_RANKS
STEPS = 4
"""Steps of a routing, measured in turn."""

MODEL = ModelShape(
    layers=CONFIG.model.num_layers,
    hidden=CONFIG.model.embed_dim,
    inner=CONFIG.model.mlp_dim,
    experts=CONFIG.model.num_experts,
    per_token=CONFIG.model.experts_per_token,
    tokens=NUM_TOKENS,
    itemsize=4,
    pre_expert_s=0.0,
)


class Points(NamedTuple):
    """Points of a round on one network."""

    rates: tuple[float, ...]
    routings: tuple[str, ...]
    cases: dict[str, Case]
    has_domains: bool = False


@dataclass(frozen=True)
class Round:
    """Points that are predicted and measured together."""

    parts: tuple[Points, ...]
    steps: int = STEPS


GAIN_ROUND = 6
GAIN_RATES, GAIN_CASES = (1000e6, 2000e6, 8000e6), {"plain": Case(plain()), "exact": Case(exact())}
GAIN_ROUTINGS = {f"popular ranks, {imbalance}": imbalance for imbalance in (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)}
"""Imbalance of the ranks by the name of its routing."""

FLAT_CASES = {name: Case(system) for name, system in SYSTEMS.items()}

ROUNDS = {
    1: Round((Points((2000e6, 500e6), ("popular ranks, 2.0", "recorded"), FLAT_CASES),)),
    2: Round((Points((4000e6, 1000e6), ("zipf, 1.6", "popular ranks, 2.5"), FLAT_CASES),)),
    3: Round(
        (
            Points((3000e6,), ("lognormal, 1.8", "one hot expert per rank, 2.2"), FLAT_CASES),
            Points((800e6,), ("sorted zipf, 1.6", "recorded, end"), DOMAIN_CASES, has_domains=True),
        ),
        steps=2,
    ),
    GAIN_ROUND: Round((Points(GAIN_RATES, tuple(GAIN_ROUTINGS), GAIN_CASES),), steps=2),
}
"""Three rounds of twenty points, and the last one of the gain by imbalance; the two before it had other programs."""

ROUTINGS = tuple(routing for of in ROUNDS.values() for part in of.parts for routing in part.routings)
"""Routings of all rounds. Programs contain the counts of all, so all rounds run the same programs."""


@cache
def counts_of(routing: str) -> np.ndarray:
    """Return `[STEPS, layers, R, E]` counts: recorded ones, or synthetic ones of a shape and an imbalance.

    `sorted` shapes have the experts in the order of their load, so that one domain has the busiest ones in every step.
    """
    layers = CONFIG.model.num_layers
    if routing.startswith("recorded"):
        shape = (layers, NUM_RANKS, CONFIG.model.num_experts)
        found = recorded(TRACES / "free_0.npz", shape, NUM_TOKENS, CONFIG.model.experts_per_token)
        return found[-STEPS:] if routing == "recorded, end" else found[:: len(found) // STEPS][:STEPS]
    name, imbalance = routing.rsplit(", ", 1)
    shape_of = LoadShape(name.removeprefix("sorted "))
    steps = [skewed_counts(MODEL, NUM_RANKS, float(imbalance), layers, seed, shape_of) for seed in range(STEPS)]
    found = np.stack(steps)
    if name.startswith("sorted "):
        order = np.argsort(-found.sum(2), axis=2, kind="stable")
        found = np.take_along_axis(found, order[:, :, None], 3)
    return found


@cache
def records() -> tuple[np.ndarray, dict[str, list[list[float]]]]:
    """Return the records of all routings, and those of each routing by step and layer."""
    all_counts = np.stack([counts_of(routing) for routing in ROUTINGS])
    numbers = np.arange(np.prod(all_counts.shape[:3]), dtype=np.float64).reshape(all_counts.shape[:3])
    flat = all_counts.reshape(-1, *all_counts.shape[3:])
    return flat, {routing: of.tolist() for routing, of in zip(ROUTINGS, numbers, strict=True)}


def relocation(routing: str, steps: int) -> np.ndarray:
    """Return the permutation of places `[layers, E]` for the mean loads of a routing, on two domains."""
    loads = counts_of(routing)[:steps].sum((0, 2)).astype(np.float64)
    return plan_relocation(loads, Topology.flat(NUM_RANKS, NUM_RANKS // 2))
