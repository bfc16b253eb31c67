"""UltraEP on the loads of its paper's simulations (Table 3, figures 15 and 16).

The second table shows the effects of the split and the relays: rows between the pair of ranks with the largest
exchange, and copies of expert weights sent by the busiest rank.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.plans.popular_ranks import CASES, TOKENS_PER_RANK, Case, counts
from benchmarks.render.results import Table, Value
from jax_moe_lb import Plan, Topology, _planning
from jax_moe_lb.core import Split, imbalance, load, nearest_first, plain_plan, traffic
from jax_moe_lb.transport import Relay

PUBLISHED = (1.03, 45, 6.8, 96.0, 98.4)
"""Published means over the cases: imbalance, replicas, maximum replicas of an expert, remote rows in percent, without
locality.
"""

PROPORTIONAL = Split("proportional")
EXPERT_BYTES = 37.7e6
"""Bytes of an expert of Qwen3-235B in bfloat16; 710 GB/s per rank fit the authors' times without relays."""

BYTES_PER_S = 710e9


def planned(case: Case, loads: np.ndarray) -> tuple[Plan, Plan]:
    """Return the plans before and after balancing."""
    slots = case.num_experts // case.num_ranks + case.replica_slots
    before = plain_plan(loads, Topology.flat(case.num_ranks), slots)
    # The paper's minimum of 1024 tokens, for 8192 tokens per rank.
    min_tokens = max(1, loads.sum() // case.num_ranks // 64)
    after = _planning.ultraep(before.placement, before.quota, case.num_ranks, min_tokens=min_tokens)
    return before, Plan(*after, domain=case.num_ranks, split=PROPORTIONAL)


def largest_pair(plan: Plan, loads: np.ndarray) -> int:
    """Return the rows between the pair of ranks with the largest exchange."""
    ranks = range(plan.num_ranks)
    rows = np.stack([nearest_first(loads, plan.quota, rank, plan.domain, plan.split).sum(0) for rank in ranks])
    return (rows * ~np.eye(plan.num_ranks, dtype=bool)).max()


def fewest_sent(plan: Plan) -> int:
    """Return a lower bound of copies sent by the busiest rank: each replicated expert leaves home once; the rest is
    shared.
    """
    replicas = plan.placement[:, plan.num_home :]
    experts = np.unique(replicas[replicas >= 0])
    at_home = np.bincount(experts // plan.num_home, minlength=plan.num_ranks).max()
    return max(at_home, -(-(replicas >= 0).sum() // plan.num_ranks))


def movement(plan: Plan, loads: np.ndarray) -> list[Value]:
    """Return a row of the second table."""
    pairs = [largest_pair(replace(plan, split=split), loads) for split in (Split(), PROPORTIONAL)]
    relayed = Relay().plan(plan)
    home = plan.placement // plan.num_home
    forwarded = np.unique(plan.placement[(plan.placement >= 0) & (relayed.relay != home)])
    fan_out, sent = (traffic(one, loads).fan_out.max() for one in (plan, relayed))
    times_ms = [float(1e3 * copies * EXPERT_BYTES / BYTES_PER_S) for copies in (fan_out, sent)]
    return [*map(int, (*pairs, fan_out, sent, fewest_sent(plan), len(forwarded))), *times_ms]


SHAPE = {"experts": "d", "ranks": "d", "replica slots": "d", "imbalance before": ".2f"}
PLANNED = {
    "imbalance": ".3f",
    "replicas": ".1f",
    "of one expert": ".1f",
    "remote rows, %": ".1f",
    "without locality, %": ".1f",
}
MOVED = {
    "rows of the largest pair, nearest": "d",
    "proportional": "d",
    "copies sent from home": "d",
    "with relays": "d",
    "at least": "d",
    "experts with relays": "d",
    "ms from home at 710 GB/s": ".3f",
    "ms with relays": ".3f",
}


def planned_row(after: Plan, loads: np.ndarray) -> list[float]:
    """Return the values in the order of `PLANNED`."""
    replicas = after.placement[:, after.num_home :]
    copies = np.bincount(replicas[replicas >= 0], minlength=after.num_experts)
    anywhere = replace(after, split=Split("proportional", locality=False))
    remote, without = (100 * traffic(plan, loads).rows / loads.sum() for plan in (after, anywhere))
    return [*map(float, (imbalance(load(after)), copies.sum(), copies.max(), remote, without))]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_RANK, help="Tokens per rank.")
    parser.add_argument("--seed", type=int, default=0)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    rows: list[list[Value]] = []
    moved: list[list[Value]] = []
    results = []
    for case in CASES:
        loads = counts(case, given.seed, given.tokens)
        before, after = planned(case, loads)
        shape = [case.num_experts, case.num_ranks, case.replica_slots, float(imbalance(load(before)))]
        results.append(planned_row(after, loads))
        rows.append([*shape, *results[-1]])
        moved.append([*shape, *movement(after, loads)])
    here = np.mean(results, axis=0).tolist()
    means: list[list[Value]] = [[name, *pair] for name, *pair in zip(PLANNED, here, PUBLISHED, strict=True)]
    return {
        "means": Table({f"mean over {len(rows)} loads": "", "here": ".4g", "published": ""}, means),
        "cases": Table(SHAPE | PLANNED, rows),
        "movement": Table(SHAPE | MOVED, moved),
    }
