"""Random inputs of every planner, and its three implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jax_moe_lb import _planning
from jax_moe_lb.planners.eplb import eplb_plus, eplb_plus_reference
from jax_moe_lb.planners.exact import exact
from jax_moe_lb.planners.fastermoe import fastermoe, fastermoe_reference
from jax_moe_lb.planners.feplb import feplb, feplb_reference
from jax_moe_lb.planners.greedy import greedy, greedy_reference
from jax_moe_lb.planners.relay import relay, relay_reference
from jax_moe_lb.planners.spray import spray, spray_reference
from jax_moe_lb.planners.ultraep import ultraep, ultraep_reference

Arrays = tuple[np.ndarray, ...]
STOPPED = (jax.errors.JaxRuntimeError, ValueError)
"""Exceptions of a program that stops, raised when it is awaited or already when it is called."""


@dataclass(frozen=True)
class Planner:
    """One planner with fixed options.

    Args:
        op: function of arrays, using the custom call if it was built.
        reference: jnp implementation; `None` for `exact`, whose jnp form uses another search.
        module: function in `_planning`, on NumPy arrays.
        draw: function sampling its arguments.
    """

    op: Callable
    reference: Callable | None
    module: Callable
    draw: Callable[[np.random.Generator], Arrays]


def draw_placement(rng, num_ranks, num_home, slots, domain, empty=0.4):
    """Return homes, and distinct other experts of the domain, or -1, in the remaining slots."""
    placement = np.full((num_ranks, slots), -1, np.int32)
    for rank in range(num_ranks):
        first = rank // domain * domain * num_home
        home = np.arange(rank * num_home, (rank + 1) * num_home)
        others = np.setdiff1d(np.arange(first, first + domain * num_home), home)
        replicas = rng.permutation(np.concatenate([others, np.full(slots, -1)]))[: slots - num_home]
        placement[rank] = np.concatenate([home, np.where(rng.random(slots - num_home) < empty, -1, replicas)])
    return placement


def draw_tokens(rng, shape, scale=200):
    """Return skewed tokens, with zeros and ties."""
    tokens = (scale * rng.random(shape) ** 6 * rng.integers(0, 2, shape)).astype(np.int32)
    return np.where(rng.random(shape) < 0.2, 7, tokens).astype(np.int32)


def draw_plan(rng, num_ranks, num_home, slots, domain, empty=0.4, scale=200):
    """Return a legal placement and a quota on its slots."""
    placement = draw_placement(rng, num_ranks, num_home, slots, domain, empty)
    holds = (placement[:, :, None] == np.arange(num_ranks * num_home)).any(1).T
    return placement, np.where(holds, draw_tokens(rng, holds.shape, scale), 0).astype(np.int32)


def draw_counts(rng, num_ranks, num_home, slots, domain, empty=0.4):
    """Return `draw_plan`, and counts for which most experts are served only at home."""
    placement, quota = draw_plan(rng, num_ranks, num_home, slots, domain, empty)
    counts = draw_tokens(rng, quota.shape[::-1])
    at_home = np.arange(len(quota))[:, None] // num_home == np.arange(num_ranks)
    elsewhere = np.where(at_home, 0, quota) * (rng.random(len(quota)) < 0.3)[:, None]
    served = np.where(at_home, counts.sum(0)[:, None], elsewhere)
    return placement, served.astype(np.int32), counts


def draw_popular(rng, num_ranks, slots):
    """Return one home expert per rank, with many replicas of some experts."""
    placement = np.full((num_ranks, slots), -1, np.int32)
    for rank in range(num_ranks):
        drawn = rng.zipf(1.3, slots) - 1
        others = [expert for expert in dict.fromkeys(drawn.tolist()) if expert < num_ranks and expert != rank]
        placement[rank, : 1 + len(others)] = [rank, *others][:slots]
    return placement


def draw_rows(rng, num_ranks, num_rails):
    """Return rows between ranks, and rails of which some are slow or dead."""
    ticks = rng.choice(np.array([0, 1, 1, 2, 3, 32767]), num_rails)
    ticks[rng.integers(num_rails)] = 1
    return draw_tokens(rng, (num_ranks, num_ranks), rng.choice([5, 200, 10**6])), ticks.astype(np.int32)


FORMS = {
    "eplb_plus": (eplb_plus, eplb_plus_reference),
    "exact": (exact, None),
    "fastermoe": (fastermoe, fastermoe_reference),
    "feplb": (feplb, feplb_reference),
    "greedy": (greedy, greedy_reference),
    "relay": (relay, relay_reference),
    "spray": (spray, spray_reference),
    "ultraep": (ultraep, ultraep_reference),
}
"""Forms of each planner in JAX: with the custom call if it was built, and in jnp."""


def planner(name, draw, **options) -> Planner:
    """Return a planner whose implementations take the same options."""
    forms = *FORMS[name], getattr(_planning, name)
    return Planner(*(of and partial(of, **options) for of in forms), draw)


FEPLB = {"num_dynamic": 2, "max_num_dyn": 2, "tau": 5, "skip": False}
RELAY = {"num_home": 1, "min_replicas": 3, "max_relays": 3, "min_gain": 1}
PLANNERS = {
    "eplb_plus": planner(
        "eplb_plus", lambda rng: (draw_tokens(rng, 12), draw_placement(rng, 6, 2, 4, 3, 0.7)), domain=3
    ),
    "greedy": planner("greedy", lambda rng: draw_plan(rng, 6, 2, 4, 3), domain=3, min_tokens=2),
    "ultraep": planner("ultraep", lambda rng: draw_plan(rng, 6, 2, 4, 3, 0.7), domain=3, eps=0.01, min_tokens=20),
    "relay": planner("relay", lambda rng: (draw_popular(rng, 12, 4),), **RELAY),
    "exact": planner("exact", lambda rng: (draw_tokens(rng, (6, 12)),), num_slots=4, domain=3, eps=0.05, max_fan_out=3),
    "feplb": planner("feplb", lambda rng: draw_plan(rng, 6, 3, 5, 3, 0.7), domain=3, **FEPLB),
    "spray": planner("spray", lambda rng: draw_rows(rng, 12, 4), ranks_per_node=4, chunks=5),
    "fastermoe": planner("fastermoe", lambda rng: draw_counts(rng, 6, 2, 4, 3, 0.8), domain=3, min_saved=3),
}


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def assert_same(results, expected):
    """Check equality of values, shapes and dtypes."""
    results, expected = as_tuple(results), as_tuple(expected)
    assert len(results) == len(expected)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, want)
