"""Plans of `exact` under limits of replicas: their time by the rates of an H100, and the cycles of the kernel.

The time is that of the cost model, over the least one of whole searches under every limit. Cycles are those that
`ffi/planning/device/fibers.h` counts, of the longest block.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.render.results import Table, Value
from jax_moe_lb import Topology, _planning, exact
from jax_moe_lb.balancers.weighing import Weighing
from jax_moe_lb.core import Level, Plan, plain_plan
from jax_moe_lb.core.types import Counts
from jax_moe_lb.sim.config import load_config

CASES = (("mixtral_8x7b", 8), ("qwen3_30b", 8), ("qwen3_30b", 32), ("deepseek_v3", 32), ("deepseek_v3", 64))
SPREADS = (0.1, 0.3, 0.6, 1.0)
"""Standard deviations of the logarithms of expert loads."""

SLOTS, EPS, ROW_TILE, EVERY_LIMIT = 2, 0.01, 256, tuple(range(1, 17))
COLUMNS = {"layer": "", "ranks": "", "old plan": ".3f", "any number": ".3f", "plan kept": ".3f", "at most": ".3f"}
COLUMNS |= {"one plan, kcycles": ".0f", "all limits, kcycles": ".0f", "all limits, most kcycles": ".0f"}
COLUMNS |= {"whole searches, most kcycles": ".0f"}


def drawn(experts: int, copies: int, num_ranks: int, seeds: int) -> Iterator[Counts]:
    for seed in range(seeds):
        for spread in SPREADS:
            rng = np.random.default_rng(seed)
            share = rng.lognormal(0, spread, experts)
            yield rng.multinomial(copies, share / share.sum(), num_ranks).astype(np.int32)


def under(limit: int, start: Plan, counts: Counts, *, brief: bool) -> Plan:
    placement, quota = _planning.exact(counts, *arguments_of(limit, start), brief)
    return replace(start, placement=placement, quota=quota)


def arguments_of(limit: int, start: Plan) -> tuple[int, int, float, int, bool]:
    return start.num_home + min(limit, start.slots - start.num_home), start.domain, EPS, limit, True


def times(weighed: Weighing, start: Plan, counts: Counts) -> list[float]:
    """Return the times of the old plan, of one of any number of replicas, and of the plan kept."""
    old, any_number = weighed.time(start), weighed.limits[-1]
    whole = {limit: weighed.time(under(limit, start, counts, brief=False)) for limit in (*EVERY_LIMIT, any_number)}
    kept = weighed.time(weighed.fastest(counts, start))
    return [float(time / min(old, *whole.values())) for time in (old, min(old, whole[any_number]), kept)]


def kcycles(weighed: Weighing, start: Plan, counts: Counts) -> list[float]:
    """Return the cycles of the longest block with brief plans and with whole searches, and those of one plan."""
    *limits, any_number = weighed.limits

    def of(limit: int, *, brief: bool) -> float:
        times = _planning.exact_kernel(counts, *arguments_of(limit, start), brief)[-1]
        return max(float(overlapped) for _, overlapped, *_ in times) / 1e3

    one = of(any_number, brief=False)
    return [max([one, *(of(limit, brief=brief) for limit in limits)]) for brief in (True, False)] + [one]


def row_of(name: str, num_ranks: int, seeds: int) -> list[Value]:
    model = load_config("model", name, "model").model.build()
    topology = Topology((Level("gpu", num_ranks),), num_ranks)
    balancer = exact().balancer.sized(replace(model.facts, device="h100", slot_copies=ROW_TILE))
    slots = model.experts // num_ranks + SLOTS
    found, cycles = [], []
    for counts in drawn(model.experts, model.tokens * model.per_token, num_ranks, seeds):
        start = plain_plan(counts, topology, slots)
        weighed = balancer._weighing(start, topology)
        found.append(times(weighed, start, counts))
        if len(cycles) < 2 * len(SPREADS):
            cycles.append(kcycles(weighed, start, counts))
    old, any_number, kept = np.array(found).T
    briefly, whole, one = np.array(cycles).T
    numbers = [old.mean(), any_number.mean(), kept.mean(), kept.max()]
    numbers += [np.median(one), np.median(briefly), briefly.max(), whole.max()]
    return [name.replace("_", " "), num_ranks, *map(float, numbers)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=15)


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {"limits": Table(COLUMNS, [row_of(*case, given.seeds) for case in CASES])}
