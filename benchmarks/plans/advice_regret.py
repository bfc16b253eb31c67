"""Regret of the advice: time of the recommended choice over that of the best of all choices, simulated.

Each pair is a model and a cluster with sizes between those of published ones, and three routings, each of another load
shape. The last pairs have more than 64 ranks. The search of `advise` runs on two of the routings. Then every choice of
its space that fits into memory is simulated on all three. The regret of a pair is the time of the recommended choice
over that of the best one, both summed over the routings. A choice is not simulated if its lower bound exceeds the
least sum. One with more headroom than for one round takes the time of the one with less. A pair is infeasible if a
recommended choice does not fit, and slower than plain if plain takes less time on the three routings by more than 1 %.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb.advise.advise import Advice
from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator, Workload, drawn_workloads
from jax_moe_lb.advise.fit import fits_in_memory
from jax_moe_lb.advise.search import Space, search
from jax_moe_lb.sim import AnalyticGemm, Cluster, Links, LoadShape, ModelShape, Step

PAIRS = 200

LARGE = 50
"""Number of pairs with more than 64 ranks among them."""

FIRST_LARGE = 100_000
"""Seed of the first large pair beyond that of the first pair."""

FIRST = 3000
"""Seed of the first pair. The search was tuned on pairs with smaller seeds."""

SLOWER = 0.01
"""Fraction of plain's time by which a recommendation may be slower, the resolution of `advise`."""


@dataclass(frozen=True)
class Found:
    """Advice for one pair: sizes, names and times of the recommended and the best choice, and choices that fit."""

    ranks: int
    experts: int
    expert_mb: float
    imbalance: float
    advised: str
    best: str
    regret: float
    of_plain: float
    fits: bool
    choices: int


def drawn_pair(rng: np.random.Generator, *, large: bool) -> tuple[ModelShape, Cluster]:
    """Return a random model and cluster: nodes of H100 or a rack, of 72 to 128 ranks if large, else of at most 32."""
    kind = rng.choice(["node", "nodes", "rack"], p=[0.0, 0.5, 0.5] if large else [0.5, 0.3, 0.2])
    peak = float(rng.uniform(300e12, 1000e12))
    gemm = AnalyticGemm(peak, half_rows=float(rng.uniform(100, 320)), launch_s=10e-6)
    inside = Links("gpu", 8, float(rng.uniform(100e9, 450e9)), latency_s=3e-6)
    levels: tuple[Links, ...] = (inside,)
    if kind == "nodes":
        nodes = int(rng.choice([9, 12, 16])) if large else 2
        levels = Links("node", nodes, float(rng.uniform(12e9, 50e9)), links=8, latency_s=10e-6), inside
    if kind == "rack":
        size = int(rng.choice([72, 96, 128] if large else [16, 32]))
        levels = (replace(inside, size=size, bytes_per_s=float(rng.uniform(400e9, 900e9))),)
    cluster = Cluster(levels, gemm, flops_per_s=peak / 1.5, planner_s=None, memory_bytes=80e9, hbm_bytes_per_s=3.35e12)
    experts = max(int(rng.choice([8, 16, 32, 64, 128, 256])), cluster.num_ranks)
    if large:
        experts = cluster.num_ranks * int(rng.choice([1, 2, 4]))
    hidden = 256 * int(rng.integers(8, 29))
    inner = 256 * int(rng.integers(2, 57 if experts <= 16 else 17))
    per_token = int(min(rng.choice([1, 2, 4, 8]), experts // 2))
    tokens = int(rng.choice([2048, 4096, 8192]))
    model = ModelShape(1, hidden, inner, experts, per_token, tokens, sequence=4096)
    # As many layers as half the memory holds, with the optimizer sharded as usual.
    each = experts // cluster.num_ranks * model.expert_bytes * 9
    return replace(model, layers=int(np.clip(40e9 // each, 1, 60))), cluster


def advised(number: int, *, large: bool) -> Found | None:
    """Return the advice for a pair and its regret; None if no choice fits or no load shape has the imbalance."""
    rng = np.random.default_rng((45, number))
    model, cluster = drawn_pair(rng, large=large)
    imbalance = float(1 + rng.exponential(0.6))
    shapes = [list(LoadShape)[at] for at in rng.permutation(len(LoadShape))[:3]]
    try:
        loads = drawn_workloads(model, cluster.num_ranks, imbalance, 1, shapes, 1, number)
    except ValueError:
        return None
    judge = Evaluator(model, cluster, Step())
    num_home = model.experts // cluster.num_ranks
    space = Space(cluster, min(8, model.experts - num_home), with_relocation=False)
    if not any(fits_in_memory(judge, choice) for choice in space.first()):
        return None
    seen = loads[:2]
    # The other results of `advise` do not change its recommendation.
    answer = Advice(search(space, judge, seen, seen), (), None)
    choice = Choice() if answer.leave_off else answer.best.choice
    return regret_of(choice, judge, space, loads)


def regret_of(choice: Choice, judge: Evaluator, space: Space, loads: list[Workload]) -> Found:
    """Simulate every choice that fits, and compare the recommended one with the best."""

    def sum_s(one: Choice, limit_s: float = math.inf) -> float:
        """Return the time on all routings; infinity if it is not below the limit."""
        floors_s, took_s = [judge.floor_s(one, load) for load in loads], 0.0
        for at, load in enumerate(loads):
            if took_s + sum(floors_s[at:]) >= limit_s:
                return math.inf
            took_s += judge.glance(judge.least_headroom(one, load), load)
        return took_s

    mine_s, plain_s = sum_s(choice), sum_s(Choice())
    best, best_s = choice, mine_s
    fitting = [one for one in dict.fromkeys(space.every()) if fits_in_memory(judge, one)]
    for one in fitting:
        if (took_s := sum_s(one, best_s)) < best_s:
            best, best_s = one, took_s
    load = loads[0].counts[0].sum(0).reshape(judge.cluster.num_ranks, -1).sum(1)
    sizes = judge.cluster.num_ranks, judge.model.experts, judge.model.expert_bytes / 1e6
    times = mine_s / best_s - 1, mine_s / plain_s
    names, fits = (choice.name, best.name), fits_in_memory(judge, choice)
    return Found(*sizes, float(load.max() / load.mean()), *names, *times, fits, len(fitting))


def all_pairs(first: int, number: int, log: Path | None, *, large: bool) -> Iterator[Found]:
    """Yield the advice for a number of pairs, from the first one on; take those in the log from there."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    known: dict[int, Any] = {line["number"]: line["found"] for line in map(json.loads, lines)}
    done = 0
    for at in itertools.count(first):
        if done == number:
            return
        if at not in known:
            found = advised(at, large=large)
            known[at] = None if found is None else asdict(found)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps({"number": at, "found": known[at]}) + "\n")
        if known[at] is not None:
            done += 1
            yield Found(**known[at])


def tables(found: list[Found]) -> dict[str, Table]:
    """Return the regret over all pairs, and the pairs with the largest regret."""
    regrets = np.array([one.regret for one in found])
    slower = sum(one.of_plain > 1 + SLOWER for one in found)
    unfit = sum(not one.fits for one in found)
    row: list[Value] = [len(found), sum(one.ranks > 64 for one in found)]
    row += map(float, np.quantile(regrets, [0.5, 0.9, 1.0]))
    columns = {"pairs": "d", "on more than 64 ranks": "d", "median regret": ".2%", "of nine in ten": ".2%"}
    columns |= {"worst regret": ".2%", "infeasible": "d", "slower than plain": "d"}
    summary = Table(columns, [[*row, unfit, slower]])
    worst = sorted(found, key=lambda one: -one.regret)[:10]
    lines: list[list[Value]] = [
        [o.ranks, o.experts, o.expert_mb, o.imbalance, o.advised, o.best, o.regret, o.of_plain, o.choices]
        for o in worst
    ]
    sizes = {"ranks": "d", "experts": "d", "an expert, MB": ".0f", "skew": ".2f", "advised": "", "best": ""}
    ends = {"regret": ".2%", "advised / plain": ".3f", "choices": "d"}
    return {"regret": summary, "worst": Table(sizes | ends, lines, "pairs with the largest regret")}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=PAIRS, help="Number of pairs.")
    parser.add_argument("--large", type=int, default=LARGE, help="Number of pairs with more than 64 ranks among them.")
    parser.add_argument("--log", type=Path, help="File of finished pairs; a later run continues from it.")
    parser.add_argument("--quick", action="store_true", help="Use few pairs.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    pairs, large = (2, 0) if given.quick else (given.pairs, given.large)
    found = list(all_pairs(FIRST, pairs - large, given.log, large=False))
    found += all_pairs(FIRST + FIRST_LARGE, large, given.log, large=True)
    return tables(found)
