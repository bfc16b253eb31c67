"""Homes planned from the loads of one workload, evaluated on another: 64 ranks in domains of 8, two replica slots.

DIR contains files of token counts [layers, experts]. "floor" is the busiest domain's load over the mean, a lower bound
for any plan inside domains; "result" is the imbalance after `Exact`.
"""

import argparse
import itertools
import pathlib
import time
from collections.abc import Mapping

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb import Topology, _planning
from jax_moe_lb.planners import apply_relocation, domain_lower_bound, plan_relocation

TOPOLOGY = Topology.flat(64, 8)
REPLICA_SLOTS = 2


def result(tokens: np.ndarray, homes: np.ndarray) -> np.ndarray:
    """Return max/mean load of each layer after `Exact` inside domains, `[layers]`."""
    imbalance = []
    for layer, places in zip(tokens, homes, strict=True):
        counts = np.zeros((TOPOLOGY.num_ranks, len(layer)), np.int32)
        counts[0, places] = layer
        slots = len(layer) // TOPOLOGY.num_ranks + REPLICA_SLOTS
        quota = _planning.exact(counts, slots, TOPOLOGY.ranks_per_domain, 0.0, localize=False)[1]
        imbalance.append(quota.sum(0, dtype=np.int64).max() * TOPOLOGY.num_ranks / layer.sum())
    return np.array(imbalance)


def stay(shape: tuple[int, int]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)


def judged(tokens: np.ndarray, homes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return domain_lower_bound(tokens, homes, TOPOLOGY), result(tokens, homes)


COLUMNS = {"homes from": "", "loads": "", "floor": ".4f", "floor, worst": ".3f", "result": ".4f"}
COLUMNS |= {"result, worst": ".3f", "over the floor, %": ".3f", "over the floor, worst, %": ".2f"}


def row_of(homes: str, loads: str, floor: np.ndarray, reached: np.ndarray) -> list[Value]:
    gap = 100 * (reached / floor - 1)
    numbers = floor.mean(), floor.max(), reached.mean(), reached.max(), gap.mean(), gap.max()
    return [homes, loads, *map(float, numbers)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", type=pathlib.Path, required=True)
    parser.add_argument("--groups", type=int, default=1, help="Number of expert groups of the router.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    files = {path.stem: np.load(path) for path in sorted(given.loads.glob("*.npy"))}
    rows = [row_of("order", name, *judged(tokens, stay(tokens.shape))) for name, tokens in files.items()]
    homes, seconds = {}, []
    for name, tokens in files.items():
        started_s = time.perf_counter()
        permutation = plan_relocation(tokens, TOPOLOGY, num_groups=given.groups)
        seconds.append(time.perf_counter() - started_s)
        homes[name] = apply_relocation(stay(tokens.shape), permutation)
    pairs = {(a, b): judged(files[b], homes[a]) for a, b in itertools.permutations(files, 2)}
    rows += [row_of(a, b, *found) for (a, b), found in pairs.items()]
    rows.append(row_of("another recording", f"all {len(pairs)} pairs", *np.stack([*pairs.values()], 1)))
    for name, tokens in files.items():
        others = np.stack([files[other] / files[other].sum() for other in files if other != name])
        permutation = plan_relocation(others, TOPOLOGY, num_groups=given.groups)
        rows.append(row_of("all others", name, *judged(tokens, apply_relocation(stay(tokens.shape), permutation))))
    note = f"Planning homes of {len(tokens)} layers takes {np.median(seconds):.2f} s, median."
    return {"homes": Table(COLUMNS, rows, notes=(note,))}
