"""Imbalance against replicas: `Exact` from eps = 0 to 0.1 beside UltraEP's rule, as a table and as a plot.

    python -m benchmarks.bench_exact_frontier --loads FILE.npy ... [--step 4] [--plot frontier.png]

The last row of a shape is `Exact` with, layer by layer, the eps that allows UltraEP's maximum.
"""

import argparse
import pathlib

import numpy as np
from matplotlib.figure import Figure

from benchmarks import recorded
from benchmarks.bench_exact import plan
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import Topology, _planning, plain_plan

# ranks, replica slots
SHAPES = ((64, 2), (64, 1), (32, 2), (8, 4), (8, 2))
EPS = (0.0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
ULTRAEP_EPS = (0.0, 0.01, 0.03, 0.1)

Points = np.ndarray
"""`[points, 2]`: max/mean load and replicas, means over layers."""


def ultraep(tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.01) -> tuple[int, int]:
    """Maximum load and replicas of UltraEP's plan, whose replicas may be as small as it likes."""
    counts, width = recorded.on_first_rank(tokens, num_ranks), len(tokens) // num_ranks + slots
    start = plain_plan(counts, Topology.flat(num_ranks), width)
    placement, quota = _planning.ultraep(start.placement, start.quota, num_ranks, eps, min_tokens=1)
    return int(quota.sum(0).max()), int((placement >= 0).sum()) - len(tokens)


def measure(layers: np.ndarray, ranks: int, slots: int) -> tuple[Points, Points, list[list[Value]]]:
    """The frontiers of `Exact` and of UltraEP, and rows of the table."""
    means = layers.sum(1, dtype=np.int64) / ranks
    ours, theirs = [], []
    rows: list[list[Value]] = []
    for eps in EPS:
        ours.append(np.mean([plan(layer, ranks, slots, eps)[:2] for layer in layers], axis=0))
        rows.append([ranks, slots, f"Exact, eps = {eps}", *map(float, ours[-1])])
    for eps in ULTRAEP_EPS:
        found = np.array([ultraep(layer, ranks, slots, eps) for layer in layers])
        theirs.append(((found[:, 0] / means).mean(), found[:, 1].mean()))
        rows.append([ranks, slots, f"UltraEP, eps = {eps}", *map(float, theirs[-1])])
    within = np.array([within_their_maximum(layer, ranks, slots) for layer in layers])
    imbalance, replicas = within[:, :2].mean(0)
    rows.append([ranks, slots, "Exact within UltraEP's maximum", float(imbalance), float(replicas)])
    rows.append([ranks, slots, f"layers of {len(layers)} where that needs more", None, float(within[:, 2].sum())])
    return np.array(ours), np.array(theirs), rows


def within_their_maximum(layer: np.ndarray, ranks: int, slots: int) -> tuple[float, int, bool]:
    """max/mean load and replicas of `Exact` if it may go as high as UltraEP, and whether those are more."""
    most, count = ultraep(layer, ranks, slots)
    mean = layer.sum(dtype=np.int64) / ranks
    best = plan(layer, ranks, slots)[0] * mean
    imbalance, replicas, _ = plan(layer, ranks, slots, max(most - best + 0.5, 0) / best)
    assert imbalance * mean <= most + 0.5, "UltraEP's rule found a lower maximum"
    return imbalance, replicas, replicas > count


def draw(frontiers: dict[tuple[int, int], tuple[Points, Points, list]], path: pathlib.Path) -> None:
    figure = Figure(figsize=(2.6 * len(frontiers), 2.6), layout="constrained")
    for axes, ((ranks, slots), (ours, theirs, _)) in zip(
        figure.subplots(1, len(frontiers)), frontiers.items(), strict=True
    ):
        axes.plot(ours[:, 1], ours[:, 0], "o-", ms=3, lw=1, label="Exact, eps 0 to 0.1")
        axes.plot(theirs[:, 1], theirs[:, 0], "s--", ms=3, lw=1, label="UltraEP, eps 0 to 0.1")
        axes.set_title(f"{ranks} ranks, S = L + {slots}", fontsize=9)
        axes.set_xlabel("replicas", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("max / mean load", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    # Without the version of matplotlib, so that the same numbers make the same file.
    figure.savefig(path, dpi=80, metadata={"Software": None})


def main() -> None:
    """Reports the table and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    parser.add_argument("--plot", type=pathlib.Path, help="where to write the plot, a PNG")
    out_option(parser)
    options = parser.parse_args()
    layers = np.concatenate(list(recorded.read(options).values()))
    frontiers = {shape: measure(layers, *shape) for shape in SHAPES}
    columns = {"ranks": "d", "S - L": "d", "rule": "", "max / mean load": ".4f", "replicas": ".1f"}
    report({"frontier": Table(columns, [row for *_, rows in frontiers.values() for row in rows])}, options.out)
    if options.plot is not None:
        draw(frontiers, options.plot)


if __name__ == "__main__":
    main()
