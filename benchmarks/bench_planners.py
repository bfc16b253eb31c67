"""Planners of other projects against ours: imbalance and replicas, and EPLB's planning time on a CPU.

    python -m benchmarks.bench_planners [--loads FILE.npy ...] [--step 6] [--eplb eplb.py] [--out FILE.json]

All planners have the same slots, 64 ranks in one domain with two replica slots each, and know the exact load. EPLB as
published may also move homes. LPLB has the load itself as its history, its best case. UltraEP's minimum replica is 1/64
of a rank's copies, as in its paper. EPLB runs as NumPy on the host, one layer at a time; `bench_planner_times` has the
times of the others. `--eplb` adds DeepSeek's original: a copy of `eplb.py` of
https://github.com/deepseek-ai/EPLB, which requires PyTorch.

Synthetic loads are those of `popular_ranks` with 256 experts. Recorded loads are files `[layers, experts]`, with random
sources of the tokens.
"""

import argparse
import functools
import runpy
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks import popular_ranks, recorded
from benchmarks.bench_baselines import packed_afresh
from benchmarks.results import Table, Value, out_option, report, spread
from benchmarks.timing import interleaved_s
from jax_moe_lb import Topology
from jax_moe_lb.balancers import EPLBPlus, Exact, Greedy, UltraEP
from jax_moe_lb.balancers.base import Balancer, LayerCost
from jax_moe_lb.contrib import LPLB
from jax_moe_lb.core import imbalance, load, plain_plan
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.planners import rebalance_experts

NUM_RANKS, REPLICA_SLOTS = 64, 2
BALANCERS: dict[str, Balancer] = {
    "Exact": Exact(),
    "Exact, eps 0": Exact(eps=0.0),
    "greedy": Greedy(),
    "UltraEP's rule": UltraEP(),
    "EPLB+, homes stay": EPLBPlus(),
    "LPLB, history of the same load": LPLB(every=1),
}
PACKED_AFRESH: dict[str, Callable] = {
    "EPLB, homes move": rebalance_experts,
    "EPLB, homes move, no copy twice on a rank": functools.partial(rebalance_experts, distinct=True),
}
PUBLISHED = "EPLB, homes move, as published in PyTorch"
REPEATS = 5

Found = tuple[float, int, int]
"""Imbalance, replicas, and maximum replicas of one expert."""


def jitted(num_experts: int) -> Callable:
    """Return `(balancer, state, counts) -> (plan, state)`."""
    topology, slots = Topology.flat(NUM_RANKS), num_experts // NUM_RANKS + REPLICA_SLOTS

    def step(balancer: Balancer, state: object, counts: jax.Array) -> tuple[Plan, object]:
        return balancer.rebalance(counts, plain_plan(counts, topology, slots), topology, state)

    return jax.jit(step, static_argnums=0)


def published(file: Path) -> Callable:
    """Return `rebalance_experts` of DeepSeek's file, on NumPy arrays."""
    import torch  # optional: required by this comparison only

    theirs = runpy.run_path(str(file))["rebalance_experts"]

    def rebalance(weight: np.ndarray, *numbers: int) -> list[np.ndarray]:
        return [found.numpy() for found in theirs(torch.from_numpy(weight), *numbers)]

    return rebalance


def one_layer(run: Callable, packed: dict[str, Callable], counts: np.ndarray) -> tuple[dict[str, Found], dict]:
    """Return the results of each planner on a load, and the times of EPLB's in seconds."""
    # The published minimum is for 8192 tokens with 8 experts each; scale it to these copies.
    facts = LayerCost(num_copies=int(counts.sum()) // NUM_RANKS)
    on_device, found = jax.device_put(counts), {"plain": (plain_imbalance(counts), 0, 0)}
    calls: dict[str, Callable[[], object]] = {}
    for name, balancer in BALANCERS.items():
        call = functools.partial(run, balancer.sized(facts))
        _, state = call(jax.device_put(balancer.init(counts.shape)), on_device)
        found[name] = row_of(call(state, on_device)[0])
    case = popular_ranks.Case(counts.shape[1], NUM_RANKS, REPLICA_SLOTS, 0.0)
    for name, rebalance in packed.items():
        calls[name] = functools.partial(packed_afresh, case, counts, rebalance)
        level, replicas, most = packed_afresh(case, counts, rebalance)
        found[name] = float(level), int(replicas), int(most)
    return found, interleaved_s(calls, REPEATS)


def plain_imbalance(counts: np.ndarray) -> float:
    """Return the imbalance without balancing."""
    return float(imbalance(load(plain_plan(counts, Topology.flat(NUM_RANKS)))))


def row_of(plan: Plan) -> Found:
    """Return the results of a plan."""
    replicas = np.asarray(plan.placement)[:, plan.num_home :]
    copies = np.bincount(replicas[replicas >= 0], minlength=plan.num_experts)
    return float(imbalance(load(plan))), int(copies.sum()), int(copies.max())


def table_of(loads: list[np.ndarray], packed: dict[str, Callable], title: str) -> Table:
    """Return one row for each planner, over all layers."""
    run = jitted(loads[0].shape[1])
    layers = [one_layer(run, packed, counts) for counts in loads]
    rows: list[list[Value]] = []
    for name in layers[0][0]:
        levels, replicas, most = np.array([found[name] for found, _ in layers]).T
        times = [np.median(times_s[name]) * 1e6 for _, times_s in layers if name in times_s]
        rows.append(
            [
                name,
                levels.mean(),
                levels.max(),
                replicas.mean(),
                most.mean(),
                spread(np.array(times)) if times else None,
            ]
        )
    columns = {"planner": "", "max / mean load": ".3f", "max.": ".3f", "replicas": ".1f"}
    return Table(columns | {"max. replicas of an expert": ".2f", "us, over layers": ".0f"}, rows, title)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=2048, help="Tokens per rank of synthetic loads.")
    parser.add_argument("--eplb", type=Path, metavar="FILE.py", help="Path of DeepSeek's eplb.py.")
    out_option(parser)
    given = parser.parse_args()
    packed = PACKED_AFRESH | ({PUBLISHED: published(given.eplb)} if given.eplb else {})
    cases = [case for case in popular_ranks.CASES if case.num_experts == 256]
    drawn = [popular_ranks.counts(case, seed, given.tokens) for case in cases for seed in (0, 1)]
    tables = {"synthetic": table_of(drawn, packed, f"{len(drawn)} synthetic loads, skew 1.5 to 8")}
    if given.loads:
        layers = [recorded.scattered(one, NUM_RANKS) for of_file in recorded.read(given).values() for one in of_file]
        tables["recorded"] = table_of(layers, packed, f"{len(layers)} recorded layers of {len(given.loads)} files")
    report(tables, given.out)


if __name__ == "__main__":
    main()
