"""`Exact` on recorded expert loads: imbalance, replicas and CPU time per layer, beside the optimum and UltraEP's rule.

    python -m benchmarks.bench_exact table FILE.npy ...                 # max/mean load, replicas, us
    python -m benchmarks.bench_exact optimum FILE.npy ... [--step 4]    # 8 ranks, two slots, against the MILP optimum
    python -m benchmarks.bench_exact frontier FILE.npy ... [--step 4]   # imbalance against replicas, eps from 0 to 0.1

Each file holds token counts [layers, experts]. `optimum` needs SciPy.
"""

import argparse
import pathlib
import time

import numpy as np

from benchmarks.optimum import optimum
from jax_moe_lb import Topology, _planning, plain_plan

# ranks, experts, replica slots
SHAPES = ((64, 256, 1), (64, 256, 2), (32, 256, 2), (8, 256, 2), (8, 128, 4), (256, 256, 2), (32, 256, 1), (16, 256, 2))
EPS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)


class Bench:
    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def plan(self, tokens: np.ndarray, num_ranks: int, slots: int, eps: float = 0.0) -> tuple[float, int, float]:
        """max/mean load, replicas, least CPU time in us."""
        counts = sources_unknown(tokens, num_ranks)
        width, times_s = len(tokens) // num_ranks + slots, []
        for _ in range(self.repeats):
            start_s = time.thread_time()
            placement, quota = _planning.exact(counts, width, num_ranks, eps, localize=False)
            times_s.append(time.thread_time() - start_s)
        imbalance = quota.sum(0).max() * num_ranks / tokens.sum(dtype=np.int64)
        return imbalance, int((placement >= 0).sum()) - len(tokens), min(times_s) * 1e6


def sources_unknown(tokens: np.ndarray, num_ranks: int) -> np.ndarray:
    """Counts `[R, E]` with these sums; all tokens start on rank 0."""
    counts = np.zeros((num_ranks, len(tokens)), np.int32)
    counts[0] = tokens
    return counts


def ultraep(tokens: np.ndarray, num_ranks: int, slots: int) -> tuple[int, int]:
    """Maximum load and replicas of UltraEP's plan."""
    start = plain_plan(sources_unknown(tokens, num_ranks), Topology.flat(num_ranks), len(tokens) // num_ranks + slots)
    placement, quota = _planning.ultraep(start.placement, start.quota, num_ranks)
    return int(quota.sum(0).max()), int((placement >= 0).sum()) - len(tokens)


def table(bench: Bench, files: list[pathlib.Path], eps: float) -> None:
    print(f"eps = {eps}\n")
    print("| ranks x experts | S - L | loads | mean | worst layer | replicas | us, median | us, most |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks, experts, slots in SHAPES:
        for file in files:
            rows = [bench.plan(layer[:experts], ranks, slots, eps) for layer in np.load(file)]
            imbalance, replicas, us = np.array(rows).T
            print(
                f"| {ranks} x {experts} | {slots} | {file.stem} | {imbalance.mean():.5f} | {imbalance.max():.5f} "
                f"| {replicas.mean():.1f} | {np.median(us):.0f} | {us.max():.0f} |"
            )


def against_optimum(bench: Bench, files: list[pathlib.Path], step: int) -> None:
    print(
        "| loads, 8 ranks, S = L + 2 | layers | Exact | optimum | gap, mean | gap, worst |\n|---|---|---|---|---|---|"
    )
    for file in files:
        layers = np.load(file)[::step]
        ours = np.array([bench.plan(layer, 8, 2)[0] for layer in layers])
        best = np.array([optimum(layer, 8, len(layer) // 8 + 2)[0] for layer in layers])
        gap = 100 * (ours / best - 1)
        print(
            f"| {file.stem} | {len(layers)} | {ours.mean():.4f} | {best.mean():.4f} "
            f"| {gap.mean():.2f} % | {gap.max():.2f} % |"
        )


def frontier(bench: Bench, files: list[pathlib.Path], step: int) -> None:
    print("| ranks | S - L | rule | imbalance | replicas |\n|---|---|---|---|---|")
    layers = np.concatenate([np.load(file)[::step] for file in files])
    for ranks, slots in ((64, 2), (64, 1), (32, 2), (8, 2), (8, 4)):
        for eps in EPS:
            rows = np.array([bench.plan(layer, ranks, slots, eps)[:2] for layer in layers])
            print(f"| {ranks} | {slots} | Exact, eps = {eps} | {rows[:, 0].mean():.4f} | {rows[:, 1].mean():.1f} |")
        compare_ultraep(bench, layers, ranks, slots)


def compare_ultraep(bench: Bench, layers: np.ndarray, ranks: int, slots: int) -> None:
    theirs, ours, worse = [], [], 0
    for layer in layers:
        most, count = ultraep(layer, ranks, slots)
        mean = layer.sum() / ranks
        best = bench.plan(layer, ranks, slots)[0] * mean
        imbalance, replicas, _ = bench.plan(layer, ranks, slots, (most - best + 0.5) / best if most >= best else 0.0)
        assert imbalance * mean <= most + 0.5, "UltraEP's rule found a lower maximum"
        theirs.append((most / mean, count))
        ours.append((imbalance, replicas))
        worse += replicas > count
    for name, rows in (("UltraEP", theirs), ("Exact, within UltraEP's maximum", ours)):
        imbalance, replicas = np.mean(rows, axis=0)
        print(f"| {ranks} | {slots} | {name} | {imbalance:.4f} | {replicas:.1f} |")
    print(f"| {ranks} | {slots} | layers where Exact needs more | | {worse} of {len(layers)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "optimum", "frontier"))
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--eps", type=float, default=0.0)
    parser.add_argument("--step", type=int, default=1, help="every so many layers")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    bench = Bench(options.repeats)
    if options.what == "table":
        table(bench, options.files, options.eps)
    elif options.what == "optimum":
        against_optimum(bench, options.files, options.step)
    else:
        frontier(bench, options.files, options.step)


if __name__ == "__main__":
    main()
