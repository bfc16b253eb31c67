"""Loads on which all balancers are compared, as counts of several steps and layers on a simulated machine.

A balancer with a history has seen the first `HISTORY` steps; results are means over the others.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from benchmarks.plans import recorded
from benchmarks.plans.load_families import families, spread
from jax_moe_lb.sim import Cluster, Drift, LoadShape, ModelShape, drifting_counts
from jax_moe_lb.sim.config import load_config

SLOTS = 2
HISTORY, STEPS = 5, 4
"""Steps before the results, and in them."""

MODEL = ModelShape(layers=2, hidden=2048, inner=768, experts=64, per_token=8, tokens=8192)
DRIFT = Drift(steady=0.4, drifting=0.6, steps=8.0)
"""Most of the popularity drifts, with a correlation of `1 / e` after 8 steps."""

Trace = Int[np.ndarray, "steps X R E"]
Load = tuple[ModelShape, Trace]


def machine(num_ranks: int) -> Cluster:
    """Return one domain of ranks with the rates of `h100_node`."""
    node = load_config("cluster", "h100_node", "cluster").cluster.build()
    return replace(node, levels=(replace(node.levels[0], size=num_ranks),), memory_bytes=None)


def drifting() -> Load:
    """Return a model and its synthetic counts on 32 ranks, with an imbalance of 2."""
    model = replace(MODEL, experts=256)
    return model, drifting_counts(model, 32, range(HISTORY + STEPS), 2, DRIFT, 2.0, 0, LoadShape.ZIPF)


def served(files: recorded.Layers) -> dict[str, Load]:
    """Return a model and mixed counts of recordings, by the name of the table."""
    model, copies = replace(MODEL, experts=256), MODEL.tokens * MODEL.per_token
    return {f"served_{ranks}": (model, recorded.mixed(files, ranks, HISTORY + STEPS, copies)) for ranks in (8, 32, 64)}


def steady(layers: np.ndarray) -> Load:
    """Return a model and counts `[X, R, E]` that are the same in all steps; the layers are different loads."""
    tokens = int(layers.sum((1, 2)).mean()) // layers.shape[1] // MODEL.per_token
    model = replace(MODEL, layers=len(layers), experts=layers.shape[2], tokens=tokens)
    return model, np.broadcast_to(layers, (HISTORY + 1, *layers.shape)).astype(np.int32)


def of_families(num_ranks: int, num_home: int) -> Load:
    """Return the families of loads that are hard to level, each as a layer."""
    return steady(np.stack([spread(its, num_ranks) for its in families(num_ranks, num_home).values()]))


def loads(quick: bool) -> dict[str, Load]:
    """Return all loads that need no files, by the name of the table."""
    if quick:
        return {"families_8": of_families(8, 8)}
    return {"families_8": of_families(8, 8), "families_64": of_families(64, 4), "drift": drifting()}
