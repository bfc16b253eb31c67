"""Placement search of `moe_lb::Exact`; see exact_reference.py."""

import numpy as np

from tests.exact_serving import Serving


class SubsetEvaluator:
    """Evaluator of subset_evaluator.h."""

    def __init__(self, tokens: np.ndarray, num_ranks: int, slots: int) -> None:
        del slots
        self.tokens, self.limit = tokens, 0
        self.sets = np.arange(1, 2**num_ranks)
        self.size = np.array([int(s).bit_count() for s in self.sets])
        self.holders = [1 << (e * num_ranks // len(tokens)) for e in range(len(tokens))]
        self.served = np.zeros(len(self.sets), np.int64)  # tokens with all holders inside the set
        for expert, holders in enumerate(self.holders):
            self.served += tokens[expert] * ((self.sets & holders) == holders)

    def after(self, rank: int, dropped: int, added: int) -> np.ndarray:
        served = self.served
        if dropped >= 0:
            kept = self.holders[dropped] & ~(1 << rank)
            served = served + self.tokens[dropped] * ((self.sets & (kept | 1 << rank)) == kept)
        holders = self.holders[added]
        return served - self.tokens[added] * ((self.sets & (holders | 1 << rank)) == holders)

    def keeps(self, swap: tuple[int, int, int], threshold: int) -> bool:
        return (self.after(*swap) - self.size * self.limit).max() <= threshold

    def commit(self, swap: tuple[int, int, int]) -> None:
        self.served = self.after(*swap)
        rank, dropped, added = swap
        if dropped >= 0:
            self.holders[dropped] &= ~(1 << rank)
        self.holders[added] |= 1 << rank

    def worst_and_cut(self) -> tuple[int, int]:
        excess = self.served - self.size * self.limit
        return max(int(excess.max()), 0), int(self.sets[excess.argmax()])

    def max_load(self) -> int:
        return int((-(-self.served // self.size)).max())


class FlowEvaluator:
    """Evaluator of flow_evaluator.h, computing every flow from scratch."""

    def __init__(self, tokens: np.ndarray, num_ranks: int, slots: int) -> None:
        del slots
        self.tokens, self.num_ranks, self.limit = tokens, num_ranks, 0
        self.replicas: frozenset[tuple[int, int]] = frozenset()

    def after(self, rank: int, dropped: int, added: int) -> frozenset[tuple[int, int]]:
        return self.replicas - {(dropped, rank)} | {(added, rank)}

    def flow(self, replicas: frozenset[tuple[int, int]]) -> tuple[int, int]:
        plan = Serving(self.tokens, self.num_ranks, tuple(sorted(replicas)))
        stuck = cut = 0
        for _ in range(2):  # the reach of the last ranks is known once all have been relieved
            stuck = cut = 0
            for rank in range(self.num_ranks):
                if (reached := plan.relieve(rank, self.limit)) is not None:
                    stuck += plan.load[rank] - self.limit
                    cut |= sum(1 << r for r in set(reached) if not cut >> r & 1)
        return stuck, cut

    def keeps(self, swap: tuple[int, int, int], threshold: int) -> bool:
        return self.flow(self.after(*swap))[0] <= threshold

    def commit(self, swap: tuple[int, int, int]) -> None:
        self.replicas = self.after(*swap)

    def worst_and_cut(self) -> tuple[int, int]:
        return self.flow(self.replicas)

    def max_load(self) -> int:
        plan = Serving(self.tokens, self.num_ranks, tuple(sorted(self.replicas)))
        return plan.level(-(-sum(plan.load) // self.num_ranks))


class Search:
    """Search of search.h."""

    def __init__(
        self, tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int, evaluator: "SubsetEvaluator | FlowEvaluator"
    ) -> None:
        self.tokens, self.evaluator, self.fan_out = [int(t) for t in tokens], evaluator, fan_out
        self.home_experts = len(tokens) // num_ranks
        self.slot = [[-1] * slots for _ in range(num_ranks)]
        self.holders = [{e // self.home_experts} for e in range(len(tokens))]
        self.sent = [0] * num_ranks
        self.random = 1

    def run(self, start: list[tuple[int, int]], enough: int, effort: tuple[int, int]) -> list[tuple[int, int]]:
        for expert, rank in start:
            self.apply(rank, self.slot[rank].index(-1), expert)
        steps, margin = effort
        best, replicas = self.keep()
        worst, self.cut = self.evaluator.worst_and_cut()
        top = best // margin
        for left in range(steps, 0, -1):
            if best <= enough or self.cut == 2 ** len(self.slot) - 1:
                break
            proposal = self.propose()
            if proposal is None:
                continue
            rank, place, added = proposal
            level = top * left // steps * left // steps
            if not self.evaluator.keeps((rank, self.slot[rank][place], added), max(level, worst)):
                continue
            self.apply(rank, place, added)
            if self.evaluator.worst_and_cut()[0] == 0:
                best, replicas = self.keep()
            worst, self.cut = self.evaluator.worst_and_cut()
        return replicas

    def keep(self) -> tuple[int, list[tuple[int, int]]]:
        best = self.evaluator.max_load()
        self.evaluator.limit = best - 1
        return best, [(e, rank) for rank, slots in enumerate(self.slot) for e in slots if e >= 0]

    def draw(self, count: int) -> int:
        self.random = (self.random * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.random >> 32) * count >> 32

    def in_cut(self, ranks: set[int]) -> bool:
        return all(self.cut >> rank & 1 for rank in ranks)

    def propose(self) -> tuple[int, int, int] | None:
        outside = [r for r in range(len(self.slot)) if not self.cut >> r & 1]
        rank = outside[self.draw(len(outside))]
        slots = self.slot[rank]
        place = slots.index(-1) if -1 in slots else self.draw(len(slots))
        dropped = slots[place]
        falls_back = dropped >= 0 and self.in_cut(self.holders[dropped] - {rank})
        added = self.draw_expert(self.tokens[dropped] if falls_back else 0)
        if added is None:
            return None
        home = added // self.home_experts
        same_home = dropped >= 0 and dropped // self.home_experts == home
        return (rank, place, added) if same_home or self.sent[home] < self.fan_out else None

    def draw_expert(self, more_than: int) -> int | None:
        inside = [r for r in range(len(self.slot)) if self.cut >> r & 1]
        for _ in range(3):
            first = inside[self.draw(len(inside))] * self.home_experts
            experts = sorted(range(first, first + self.home_experts), key=lambda e: -self.tokens[e])
            hotter = [e for e in experts if self.tokens[e] > more_than]
            if hotter:
                expert = hotter[self.draw(len(hotter))]
                if self.in_cut(self.holders[expert]):
                    return expert
        return None

    def apply(self, rank: int, place: int, added: int) -> None:
        dropped = self.slot[rank][place]
        self.evaluator.commit((rank, dropped, added))
        self.slot[rank][place] = added
        if dropped >= 0:
            self.holders[dropped].remove(rank)
            self.sent[dropped // self.home_experts] -= 1
        self.holders[added].add(rank)
        self.sent[added // self.home_experts] += 1
