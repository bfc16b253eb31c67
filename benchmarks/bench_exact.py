"""Imbalance of `Exact` on expert loads, and its gap to the optimum.

    python -m benchmarks.bench_exact table --loads FILE.npy ...                 # max/mean load, replicas, us
    python -m benchmarks.bench_exact optimum --loads FILE.npy ... [--step 4]    # against the MILP optimum

`optimum` takes about a second per layer.
"""

import argparse
import time

import numpy as np

from benchmarks import recorded
from benchmarks.optimum import optimum
from benchmarks.results import Table, Value, out_option, report
from jax_moe_lb import _planning

# ranks, experts, replica slots
SHAPES = ((64, 256, 1), (64, 256, 2), (32, 256, 2), (8, 256, 2), (8, 128, 4), (256, 256, 2), (32, 256, 1), (16, 256, 2))


def plan(
    tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.0, repeats: int = 1
) -> tuple[float, int, float]:
    """Return max/mean load, replicas, and minimum CPU time in us."""
    counts = recorded.on_first_rank(tokens, num_ranks)
    width, times_s = len(tokens) // num_ranks + slots, []
    for _ in range(repeats):
        start_s = time.thread_time()
        placement, quota = _planning.exact(counts, width, num_ranks, eps, localize=False)
        times_s.append(time.thread_time() - start_s)
    imbalance = quota.sum(0).max() * num_ranks / tokens.sum(dtype=np.int64)
    return imbalance, int((placement >= 0).sum()) - len(tokens), min(times_s) * 1e6


def table(loads: recorded.Layers, eps: float) -> Table:
    """Return a table of imbalance and planning time."""
    columns = {"ranks x experts": "", "S - L": "d", "loads": "", "mean": ".5f", "worst layer": ".5f", "replicas": ".1f"}
    lines: list[list[Value]] = []
    for ranks, experts, slots in SHAPES:
        for name, layers in loads.items():
            rows = [plan(layer[:experts], ranks, slots, eps, repeats=5) for layer in layers]
            imbalance, replicas, us = np.array(rows).T
            numbers = imbalance.mean(), imbalance.max(), replicas.mean(), np.median(us), us.max()
            lines.append([f"{ranks} x {experts}", slots, name, *map(float, numbers)])
    return Table(columns | {"us, median": ".0f", "us, most": ".0f"}, lines, f"eps = {eps}")


def against_optimum(loads: recorded.Layers) -> Table:
    """Return the comparison with a mixed-integer program; the small layers are synthetic."""
    columns = {"loads": "", "layers": "d"} | dict.fromkeys(("plain", "Exact", "optimum"), ".4f")
    columns |= dict.fromkeys(("gap, mean, %", "gap, worst, %", "proven within, %"), ".2f")
    small = np.random.default_rng(0).lognormal(0, 0.8, (8, 8, 8)) * np.random.default_rng(1).lognormal(
        0, 0.8, (8, 8, 1)
    )
    rows = [compare("8 small layers", (1e5 * small).astype(np.int32).reshape(8, 64), 1, candidates=8)]
    rows += [compare(name, layers, 2, candidates=16) for name, layers in loads.items()]
    return Table(columns, rows, "8 ranks, S = L + 2; the small layers have 8 experts per rank, S = L + 1")


def compare(name: str, layers: np.ndarray, replica_slots: int, candidates: int) -> list[Value]:
    """Return a row for 8 ranks."""
    slots = layers.shape[1] // 8 + replica_slots
    ours = np.array([plan(layer, 8, replica_slots)[0] for layer in layers])
    best, bound = np.array([optimum(layer, 8, slots, candidates) for layer in layers]).T
    home = layers.reshape(len(layers), 8, -1).sum(2, dtype=np.int64)
    gap = 100 * (ours / best - 1)
    means = (home.max(1) / home.mean(1)).mean(), ours.mean(), best.mean()
    return [name, len(layers), *map(float, (*means, gap.mean(), gap.max(), 100 * (ours / bound - 1).max()))]


def main() -> None:
    """Report a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "optimum"))
    recorded.add_arguments(parser)
    parser.add_argument("--eps", type=float, default=0.0, help="`eps` of the command `table`.")
    out_option(parser)
    options = parser.parse_args()
    if options.what == "table":
        found = table(recorded.read(options), options.eps)
    else:
        found = against_optimum(recorded.read(options))
    report({options.what: found}, options.out)


if __name__ == "__main__":
    main()
