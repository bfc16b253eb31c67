"""`Exact` on expert loads: what it reaches, and how far that is from the optimum.

    python -m benchmarks.bench_exact table --loads FILE.npy ...                 # max/mean load, replicas, us
    python -m benchmarks.bench_exact optimum --loads FILE.npy ... [--step 4]    # against the MILP optimum

`optimum` takes about a second a layer.
"""

import argparse
import time

import numpy as np

from benchmarks import recorded
from benchmarks.optimum import optimum
from jax_moe_lb import _planning

# ranks, experts, replica slots
SHAPES = ((64, 256, 1), (64, 256, 2), (32, 256, 2), (8, 256, 2), (8, 128, 4), (256, 256, 2), (32, 256, 1), (16, 256, 2))


def plan(
    tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.0, repeats: int = 1
) -> tuple[float, int, float]:
    """max/mean load, replicas, least CPU time in us."""
    counts = recorded.on_first_rank(tokens, num_ranks)
    width, times_s = len(tokens) // num_ranks + slots, []
    for _ in range(repeats):
        start_s = time.thread_time()
        placement, quota = _planning.exact(counts, width, num_ranks, eps, localize=False)
        times_s.append(time.thread_time() - start_s)
    imbalance = quota.sum(0).max() * num_ranks / tokens.sum(dtype=np.int64)
    return imbalance, int((placement >= 0).sum()) - len(tokens), min(times_s) * 1e6


def table(loads: recorded.Layers, eps: float) -> None:
    print(f"eps = {eps}\n")
    print("| ranks x experts | S - L | loads | mean | worst layer | replicas | us, median | us, most |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, experts, slots in SHAPES:
        for name, layers in loads.items():
            rows = [plan(layer[:experts], ranks, slots, eps, repeats=5) for layer in layers]
            imbalance, replicas, us = np.array(rows).T
            print(
                f"| {ranks} x {experts} | {slots} | {name} | {imbalance.mean():.5f} | {imbalance.max():.5f} "
                f"| {replicas.mean():.1f} | {np.median(us):.0f} | {us.max():.0f} |"
            )


def against_optimum(loads: recorded.Layers) -> None:
    print("8 ranks, S = L + 2; the small layers are synthetic, 8 experts per rank, S = L + 1\n")
    print("| loads | layers | plain | Exact | optimum | gap, mean | gap, worst | proven within |")
    print("|---|---|---|---|---|---|---|---|")
    small = np.random.default_rng(0).lognormal(0, 0.8, (8, 8, 8)) * np.random.default_rng(1).lognormal(
        0, 0.8, (8, 8, 1)
    )
    compare("8 small layers", (1e5 * small).astype(np.int32).reshape(8, 64), 1, candidates=8)
    for name, layers in loads.items():
        compare(name, layers, 2, candidates=16)


def compare(name: str, layers: np.ndarray, replica_slots: int, candidates: int) -> None:
    """A row: 8 ranks."""
    slots = layers.shape[1] // 8 + replica_slots
    ours = np.array([plan(layer, 8, replica_slots)[0] for layer in layers])
    best, bound = np.array([optimum(layer, 8, slots, candidates) for layer in layers]).T
    home = layers.reshape(len(layers), 8, -1).sum(2, dtype=np.int64)
    gap = 100 * (ours / best - 1)
    print(
        f"| {name} | {len(layers)} | {(home.max(1) / home.mean(1)).mean():.4f} | {ours.mean():.4f} | {best.mean():.4f} "
        f"| {gap.mean():.2f} % | {gap.max():.2f} % | {100 * (ours / bound - 1).max():.2f} % |",
        flush=True,
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "optimum"))
    recorded.add_arguments(parser)
    parser.add_argument("--eps", type=float, default=0.0, help="of `table`")
    options = parser.parse_args()
    if options.what == "table":
        table(recorded.read(options), options.eps)
    else:
        against_optimum(recorded.read(options))


if __name__ == "__main__":
    main()
