"""UltraEP on the loads of its paper's simulations (Table 3, figures 15 and 16)."""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.plans.popular_ranks import CASES, TOKENS_PER_RANK, Case, counts
from benchmarks.render.results import Table, Value
from jax_moe_lb import Plan, Topology, _planning
from jax_moe_lb.core import Split, imbalance, load, plain_plan, traffic

PUBLISHED = (1.03, 45, 6.8, 96.0, 98.4)
"""Published means over the cases: imbalance, replicas, maximum replicas of an expert, remote rows in percent, without
locality.
"""

PROPORTIONAL = Split("proportional")


def planned(case: Case, loads: np.ndarray) -> tuple[Plan, Plan]:
    """Return the plans before and after balancing."""
    slots = case.num_experts // case.num_ranks + case.replica_slots
    before = plain_plan(loads, Topology.flat(case.num_ranks), slots)
    # The paper's minimum of 1024 tokens, for 8192 tokens per rank.
    min_tokens = max(1, loads.sum() // case.num_ranks // 64)
    after = _planning.ultraep(before.placement, before.quota, case.num_ranks, min_tokens=min_tokens)
    return before, Plan(*after, domain=case.num_ranks, split=PROPORTIONAL)


SHAPE = {"experts": "d", "ranks": "d", "replica slots": "d", "imbalance before": ".2f"}
PLANNED = {"imbalance": ".3f"}
PLANNED |= dict.fromkeys(("replicas", "of one expert", "remote rows, %", "without locality, %"), ".1f")


def planned_row(after: Plan, loads: np.ndarray) -> list[float]:
    """Return the values in the order of `PLANNED`."""
    replicas = after.placement[:, after.num_home :]
    copies = np.bincount(replicas[replicas >= 0], minlength=after.num_experts)
    anywhere = replace(after, split=Split("proportional", locality=False))
    remote, without = (100 * traffic(plan, loads).rows / loads.sum() for plan in (after, anywhere))
    return [*map(float, (imbalance(load(after)), copies.sum(), copies.max(), remote, without))]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_RANK, help="Tokens per rank.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    rows: list[list[Value]] = []
    results = []
    for case in CASES:
        loads = counts(case, 0, given.tokens)
        before, after = planned(case, loads)
        shape = [case.num_experts, case.num_ranks, case.replica_slots, float(imbalance(load(before)))]
        results.append(planned_row(after, loads))
        rows.append([*shape, *results[-1]])
    here = np.mean(results, axis=0).tolist()
    means: list[list[Value]] = [[name, *pair] for name, *pair in zip(PLANNED, here, PUBLISHED, strict=True)]
    return {
        "means": Table({f"mean over {len(rows)} loads": "", "here": ".4g", "published": ""}, means),
        "cases": Table(SHAPE | PLANNED, rows),
    }
