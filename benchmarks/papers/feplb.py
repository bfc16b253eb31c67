"""FEPLB and FasterMoE on loads with the stragglers published in FEPLB's paper.

`feplb_readings` compares further interpretations of the paper, beyond the options of `FEPLB`.
"""

import argparse
from collections.abc import Mapping

import numpy as np

from benchmarks.papers.stragglers import CASES, Case, counts
from benchmarks.render.results import Table, Value
from jax_moe_lb import Topology, _planning
from jax_moe_lb.balancers import FEPLB, FasterMoE

SLOTS = 8
"""Replica slots per rank, as in the paper's memory figure."""

Plans = tuple[np.ndarray, np.ndarray]


def plain(loads: np.ndarray) -> Plans:
    """Return placement `[R, S]` and quota `[N, E, R]` of plain expert parallelism, for counts `[N, R, E]`."""
    _, num_ranks, num_experts = loads.shape
    home = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, -1)
    placement = np.concatenate([home, np.full((num_ranks, SLOTS), -1, np.int32)], 1)
    at_home = np.arange(num_experts)[:, None] // home.shape[1] == np.arange(num_ranks)
    return placement, np.where(at_home, loads.sum(1, dtype=np.int32)[:, :, None], 0).astype(np.int32)


def feplb(loads: np.ndarray, balancer: FEPLB = FEPLB()) -> Plans:
    """Return FEPLB's plans of all microbatches, with all ranks in one domain."""
    num_dynamic, max_num_dyn, tau, skip = balancer.num_dynamic, balancer.max_num_dyn, balancer.tau, balancer.skip
    return _planning.feplb(*plain(loads), loads.shape[1], num_dynamic, max_num_dyn, tau, skip)


def fastermoe(loads: np.ndarray, balancer: FasterMoE = FasterMoE()) -> Plans:
    """Return FasterMoE's plans of all microbatches, with all ranks in one domain."""
    # The rates are the balancer's own, for any topology.
    return _planning.fastermoe(*plain(loads), loads, loads.shape[1], balancer.min_saved(Topology.flat(1), 1))


def straggler(plans: Plans) -> np.ndarray:
    """Return `max(load) - mean(load)` of every microbatch, in token copies."""
    load = plans[1].sum(1)
    return load.max(1) - load.mean(1)


def reduction(plans: Plans, before: Plans) -> float:
    """Return the reduction of the mean straggler, in percent."""
    return float(100 * (1 - straggler(plans).mean() / straggler(before).mean()))


def replicas(plans: Plans) -> float:
    """Return the mean number of used replica slots over all ranks."""
    return float((plans[0] >= 0).sum((1, 2)).mean() - plans[1].shape[1])


def by_ranks(loads: dict[Case, np.ndarray]) -> Table:
    """Return the first table: reductions of the mean straggler, with the published values."""
    columns = {"ranks": "d", "": "", "straggler before": ".0f"}
    columns |= dict.fromkeys(("FasterMoE, % less", "FEPLB, % less", "FEPLB, skip, % less"), ".1f")
    columns |= {f"replicas of {name}": ".1f" for name in ("FasterMoE", "FEPLB", "FEPLB, skip")}
    rows: list[list[Value]] = []
    for case, drawn in loads.items():
        before = plain(drawn)
        plans = [fastermoe(drawn), feplb(drawn), feplb(drawn, FEPLB(skip=True))]
        cut, used = [reduction(plan, before) for plan in plans], [replicas(plan) for plan in plans]
        rows.append([case.num_ranks, "here", float(straggler(before).mean()), *cut, *used])
        cut = [100 * (1 - after / case.straggler) for after in (case.fastermoe, case.feplb)]
        rows.append([case.num_ranks, "published", case.straggler, *cut, None, None, None, None])
    return Table(columns, rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=2000, help="Microbatches per row.")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    loads = {case: counts(case, 0, given.number) for case in CASES}
    return {"ranks": by_ranks(loads)}
