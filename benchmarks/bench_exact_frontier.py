"""Imbalance against replicas: `Exact` from eps = 0 to 0.1, and UltraEP's rule.

    python -m benchmarks.bench_exact_frontier --loads FILE.npy ... [--step 4]

The last row of a shape is `Exact` with `eps` chosen per layer to allow UltraEP's maximum load.
"""

import argparse

import numpy as np

from benchmarks import recorded
from benchmarks.bench_exact import plan
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import Topology, _planning
from jax_moe_lb.core import plain_plan

# ranks, replica slots
SHAPES = ((64, 2), (64, 1), (32, 2), (8, 4), (8, 2))
EPS = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
ULTRAEP_EPS = (0.0, 0.01, 0.03, 0.1)


def ultraep(tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.01) -> tuple[int, int]:
    """Return maximum load and replicas of UltraEP's plan, without a minimum replica size."""
    counts, width = recorded.on_first_rank(tokens, num_ranks), len(tokens) // num_ranks + slots
    start = plain_plan(counts, Topology.flat(num_ranks), width)
    placement, quota = _planning.ultraep(start.placement, start.quota, num_ranks, eps, min_tokens=1)
    return int(quota.sum(0).max()), int((placement >= 0).sum()) - len(tokens)


def measure(layers: np.ndarray, ranks: int, slots: int) -> list[list[Value]]:
    """Return the frontiers of `Exact` and of UltraEP as rows of the table, means over layers."""
    means = layers.sum(1, dtype=np.int64) / ranks
    rows: list[list[Value]] = []
    for eps in EPS:
        ours = np.mean([plan(layer, ranks, slots, eps)[:2] for layer in layers], axis=0)
        rows.append([ranks, slots, f"Exact, eps = {eps}", *ours.tolist()])
    for eps in ULTRAEP_EPS:
        found = np.array([ultraep(layer, ranks, slots, eps) for layer in layers])
        theirs = (found[:, 0] / means).mean(), found[:, 1].mean()
        rows.append([ranks, slots, f"UltraEP, eps = {eps}", *map(float, theirs)])
    within = np.array([within_their_maximum(layer, ranks, slots) for layer in layers])
    imbalance, replicas = within[:, :2].mean(0)
    rows.append([ranks, slots, "Exact within UltraEP's maximum", float(imbalance), float(replicas)])
    rows.append([ranks, slots, f"layers of {len(layers)} where that needs more", None, float(within[:, 2].sum())])
    return rows


def within_their_maximum(layer: np.ndarray, ranks: int, slots: int) -> tuple[float, int, bool]:
    """Return max/mean load and replicas of `Exact` with UltraEP's maximum as its limit, and whether it needs more
    replicas.
    """
    most, count = ultraep(layer, ranks, slots)
    mean = layer.sum(dtype=np.int64) / ranks
    best = plan(layer, ranks, slots)[0] * mean
    imbalance, replicas, _ = plan(layer, ranks, slots, max(most - best + 0.5, 0) / best)
    assert imbalance * mean <= most + 0.5, "UltraEP's rule found a lower maximum"
    return imbalance, replicas, replicas > count


def main() -> None:
    """Report the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    out_option(parser)
    options = parser.parse_args()
    layers = np.concatenate(list(recorded.read(options).values()))
    rows = [row for shape in SHAPES for row in measure(layers, *shape)]
    columns = {"ranks": "d", "S - L": "d", "rule": "", "max / mean load": ".4f", "replicas": ".1f"}
    report({"frontier": Table(columns, rows)}, options.out)


if __name__ == "__main__":
    main()
