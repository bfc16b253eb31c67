"""Reference of `moe_lb::Exact` in NumPy and plain Python: the same plans, a thousand times slower.

Every function corresponds to the C++ file in its docstring, whose header explains the algorithm.
"""

import numpy as np

from tests.exact_search import FlowEvaluator, Search, SubsetEvaluator
from tests.exact_serving import Serving, chain, localize, thin

CLOSE_ENOUGH = 4096
SUBSET_EFFORT = (2500, 5)  # steps, margin
FLOW_EFFORT = (500, 64)
SUBSET_RANKS, FLOW_RANKS = 8, 64


def find_best(tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int) -> tuple[int, Serving]:
    """Return the lowest maximum load found, and its plan (Planner::FindBest in exact.cc)."""
    total = int(tokens.sum())
    mean = -(-total // num_ranks)
    enough = mean + mean // CLOSE_ENOUGH
    best = Serving(tokens, num_ranks)
    max_load = max(best.load)
    for rule in ("surplus", "useful", "hottest", "search"):
        if max_load <= enough or (rule == "search" and num_ranks > FLOW_RANKS):
            break
        if rule == "search":
            shift = 0
            few = num_ranks <= SUBSET_RANKS
            while few and total >> shift >= 2**27:
                shift += 1
            evaluator = (SubsetEvaluator if few else FlowEvaluator)(tokens >> shift, num_ranks, slots)
            start = [(best.expert[entry], best.rank[entry]) for entry in best.replicas()]
            search = Search(tokens >> shift, num_ranks, slots, fan_out, evaluator)
            found = search.run(start, enough >> shift, SUBSET_EFFORT if few else FLOW_EFFORT)
            plan = Serving(tokens, num_ranks, tuple(found))
        else:
            plan = chain(tokens, num_ranks, slots, fan_out, mean, rule)
        load = plan.level(mean)
        if load < max_load:
            best, max_load = plan, load
    return max_load, best


def exact(
    tokens: np.ndarray,
    num_ranks: int,
    num_slots: int,
    eps: float = 0.0,
    max_fan_out: int = 2**31 - 1,
    counts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return placement [R, S] and quota [E, R], int32, for tokens [E] and optionally counts [R, E]; see exact.h."""
    tokens = np.asarray(tokens, np.int64)
    slots = num_slots - len(tokens) // num_ranks
    best = Serving(tokens, num_ranks)
    if slots > 0 and max_fan_out > 0:
        max_load, best = find_best(tokens, num_ranks, slots, max_fan_out)
        limit = max_load + int(min(eps * max_load, float(int(tokens.sum()) - max_load)))
        thin(best, limit)
        for rule in ("surplus", "useful", "in turn") if limit > max_load else ():
            plan = chain(tokens, num_ranks, slots, max_fan_out, limit, rule)
            if plan.level(limit) <= limit:
                thin(plan, limit)
                if len(plan.replicas()) < len(best.replicas()):
                    best = plan
        if counts is not None:
            localize(best, counts, limit, slots)
    placement = np.full((num_ranks, num_slots), -1, np.int32)
    quota = np.zeros((len(tokens), num_ranks), np.int32)
    used = [0] * num_ranks
    for entry in [*range(len(tokens)), *best.replicas()]:
        rank = best.rank[entry]
        placement[rank, used[rank]] = best.expert[entry]
        quota[best.expert[entry], rank] = best.tokens[entry]
        used[rank] += 1
    return placement, quota
