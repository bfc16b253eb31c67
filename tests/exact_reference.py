"""Reference of `moe_lb::Exact` in NumPy and plain Python: the same plans, a thousand times slower.

Every function corresponds to the C++ file in its docstring, whose header explains the algorithm.
"""

import numpy as np

from tests.exact_search import FlowEvaluator, Search, SubsetEvaluator
from tests.exact_serving import Serving, chain, localize, thin
from tests.exact_starts import Variation, greedy_pass, ultraep_pass, varied_chain, varied_rounds

CLOSE_ENOUGH = 4096
LIMIT_ROUNDS = 12
VARIED_AT_ONCE = 3
SUBSET_EFFORT = (2500, 5)  # steps, margin
FLOW_MARGIN = 64
SUBSET_RANKS, FLOW_RANKS = 8, 1024
RULES = ("surplus", "useful", "hottest")


class Best:
    """Search for the lowest maximum load (Planner::FindBest in exact.cc)."""

    def __init__(self, tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int) -> None:
        self.sizes = tokens, num_ranks, slots, fan_out
        self.total = int(tokens.sum())
        self.mean = -(-self.total // num_ranks)
        self.enough = self.mean + self.mean // CLOSE_ENOUGH
        self.plan = Serving(tokens, num_ranks)
        self.max_load = max(self.plan.load)

    def keep(self, plan: Serving) -> None:
        load = plan.level(self.mean)
        if load < self.max_load:
            self.plan, self.max_load = plan, load

    def find(self) -> None:
        for rule in RULES:
            if self.max_load > self.enough:
                self.keep(chain(*self.sizes, self.mean, rule))
        if self.max_load == self.mean:
            return
        self.keep(greedy_pass(*self.sizes, self.mean))
        self.keep(ultraep_pass(*self.sizes, self.mean))
        self.narrow()
        self.vary()
        if self.max_load > self.enough and self.sizes[1] <= FLOW_RANKS:
            self.search()

    def narrow(self) -> None:
        low = self.mean
        for _ in range(LIMIT_ROUNDS):
            if self.max_load <= self.enough or self.max_load - low <= self.enough - self.mean:
                break
            limit = low + (self.max_load - low) // 2
            for rule in RULES:
                self.keep(chain(*self.sizes, limit, rule))
                if self.max_load <= limit:
                    break
            if self.max_load > limit:
                low = limit

    def vary(self) -> None:
        _, num_ranks, slots, _ = self.sizes
        number, patience = varied_rounds(num_ranks * slots)
        in_vain = 0
        for turn in range(number):
            before = self.max_load
            if in_vain == patience or before <= self.enough:
                break
            for i in range(VARIED_AT_ONCE):
                order = Variation(turn * VARIED_AT_ONCE + i)
                self.keep(varied_chain(*self.sizes, order.limit(before, self.mean), order))
            in_vain = 0 if self.max_load < before else in_vain + 1

    def search(self) -> None:
        tokens, num_ranks, slots, fan_out = self.sizes
        shift = 0
        few = num_ranks <= SUBSET_RANKS
        while few and self.total >> shift >= 2**27:
            shift += 1
        evaluator = (SubsetEvaluator if few else FlowEvaluator)(tokens >> shift, num_ranks, slots)
        start = [(self.plan.expert[entry], self.plan.rank[entry]) for entry in self.plan.replicas()]
        search = Search(tokens >> shift, num_ranks, slots, fan_out, evaluator)
        steps = 500 if num_ranks <= 64 else 500 * 64 * 64 // num_ranks**2
        found = search.run(start, self.enough >> shift, SUBSET_EFFORT if few else (steps, FLOW_MARGIN))
        self.keep(Serving(tokens, num_ranks, tuple(found)))


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
        search = Best(tokens, num_ranks, slots, max_fan_out)
        search.find()
        max_load, best = search.max_load, search.plan
        limit = max_load + int(min(eps * max_load, float(int(tokens.sum()) - max_load)))
        thin(best, limit)
        lowest = best.level(search.mean)
        for rule in ("surplus", "useful", "in turn") if limit > max_load else ():
            plan = chain(tokens, num_ranks, slots, max_fan_out, limit, rule)
            if plan.level(limit) <= limit:
                thin(plan, limit)
                load = plan.level(search.mean)
                if (len(plan.replicas()), load, plan.fan_out()) < (len(best.replicas()), lowest, best.fan_out()):
                    best, lowest = plan, load
        if counts is not None:
            localize(best, counts, lowest, slots)
    placement = np.full((num_ranks, num_slots), -1, np.int32)
    quota = np.zeros((len(tokens), num_ranks), np.int32)
    used = [0] * num_ranks
    for entry in [*range(len(tokens)), *best.replicas()]:
        rank = best.rank[entry]
        placement[rank, used[rank]] = best.expert[entry]
        quota[best.expert[entry], rank] = best.tokens[entry]
        used[rank] += 1
    return placement, quota
