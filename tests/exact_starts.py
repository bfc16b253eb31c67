"""Further placements of `moe_lb::Exact` under a limit; see exact_reference.py."""

import math

import numpy as np

from tests.exact_serving import Serving

MOST_KEY = 2**32 - 1


class Variation:
    """Search order of variation.h."""

    def __init__(self, number: int) -> None:
        self.number = number

    def noise(self, kind: int, index: int) -> int:
        bits = ((4 * index + kind) * 0x9E3779B9 + self.number * 0x85EBCA6B) % 2**32
        bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
        bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
        return ((bits ^ bits >> 16) >> 21) - 1024

    def weight(self, kind: int, index: int, reach: int) -> int:
        # Division in C++ rounds towards 0.
        return 1024 + int(self.noise(kind, index) * (reach >> self.number // 2 % 4) / 1024)

    def goal(self, rank: int, limit: int) -> int:
        return limit - max(int(limit // 10 * self.noise(2, rank) / 1024), 0) * (self.number % 2)

    def limit(self, best: int, mean: int) -> int:
        return best - max((best - mean) >> (1 + self.number // 8 % 8), 1)


def weighted(tokens: int, weight: int) -> int:
    return max(tokens * weight >> 10, min(tokens, 1))


def varied_rounds(num_slots: int) -> tuple[int, int]:
    """Return the number of rounds of three orders, and those without success that end them."""
    number = min(max(1600 // num_slots, 4), 50)
    return number, max(4, number // 2)


def varied_chain(tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int, limit: int, order: Variation) -> Serving:
    """Return the plan of varied_chain.h."""
    plan = Serving(tokens, num_ranks)
    used, sent = [0] * num_ranks, [0] * num_ranks
    goal = [order.goal(rank, limit) for rank in range(num_ranks)]
    liking = [order.weight(0, expert, 154) for expert in range(len(tokens))]
    welcome = [order.weight(1, rank, 512) for rank in range(num_ranks)]
    pressing = max(order.noise(3, 0), 0)

    def hottest(rank: int) -> int:
        experts = range(rank * plan.home_experts, (rank + 1) * plan.home_experts)
        return max(experts, key=lambda e: weighted(plan.tokens[e], liking[e]))

    def key(rank: int) -> int:
        expert = hottest(rank)
        above = max(plan.load[rank] - limit, 0) * pressing >> 10
        return min(weighted(plan.tokens[expert], liking[expert]) + above, MOST_KEY)

    receiver = -1
    while True:
        goal = [limit if load <= its else its for load, its in zip(plan.load, goal, strict=True)]
        ranks = range(num_ranks)
        receivers = [r for r in ranks if plan.load[r] <= goal[r] and plan.load[r] < limit and used[r] < slots]
        donors = [r for r in ranks if plan.load[r] > goal[r] and sent[r] < fan_out]
        if not receivers or not donors:
            return plan
        if receiver not in receivers or order.number % 4 != 2:
            receiver = max(receivers, key=lambda r: weighted(limit - plan.load[r], welcome[r]))
        donor = max(donors, key=key)
        expert = hottest(donor)
        plan.add(expert, receiver, min(plan.tokens[expert], limit - plan.load[receiver]))
        used[receiver] += 1
        sent[donor] += 1


def holds(plan: Serving, rank: int, expert: int) -> bool:
    return plan.rank[expert] == rank or any(plan.rank[entry] == rank for entry in plan.of_expert[expert])


def greedy_pass(tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int, mean: int) -> Serving:
    """Return the plan of `OnePass::FillGreedy`."""
    plan = Serving(tokens, num_ranks)
    surplus = [max(load - mean, 0) for load in plan.load]
    sent = [0] * num_ranks

    def room(rank: int) -> int:
        return max(mean - plan.load[rank], 0)

    while max(surplus) > 0:
        donor = int(np.argmax(surplus))
        homes = range(donor * plan.home_experts, (donor + 1) * plan.home_experts)
        old = [entry for expert in homes for entry in plan.of_expert[expert]]
        places = {entry: (plan.rank[entry], plan.of_rank[plan.rank[entry]].index(entry)) for entry in old}
        kept = [(min(plan.tokens[plan.expert[a]], room(plan.rank[a])), a) for a in sorted(old, key=places.__getitem__)]
        most, entry = max(kept, key=lambda one: one[0], default=(0, -1))
        free = [rank for rank in range(num_ranks) if room(rank) > 0 and len(plan.of_rank[rank]) < slots]
        made, expert, to = 0, -1, -1
        if free and sent[donor] < fan_out:
            to = max(free, key=room)
            absent = [e for e in homes if not holds(plan, to, e)]
            expert = max(absent, key=lambda e: plan.tokens[e], default=-1)
            made = min(plan.tokens[expert], room(to)) if expert >= 0 else 0
        moved = min(max(most, made), surplus[donor])
        surplus[donor] = surplus[donor] - moved if moved else 0
        if made > most:
            plan.add(expert, to, moved)
            sent[donor] += 1
        elif moved:
            plan.shift(plan.expert[entry], entry, moved)
    return plan


def ultraep_pass(tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int, mean: int) -> Serving:
    """Return the plan of `OnePass::FillUltraEp`."""
    plan = Serving(tokens, num_ranks)
    first = math.ceil(np.float32(mean) * np.float32(np.float32(1) + np.float32(0.01)))
    high = max(plan.load)
    limit = high if np.float32(first) >= np.float32(high) else max(mean, first)
    for donor in sorted(range(num_ranks), key=lambda r: -plan.load[r]):
        need, sent = plan.load[donor] - limit, 0
        homes = range(donor * plan.home_experts, (donor + 1) * plan.home_experts)
        for expert in sorted(homes, key=lambda e: -plan.tokens[e]) if need > 0 else ():
            while need > 0 and plan.tokens[expert] > 1:
                able = [r for r in range(num_ranks) if plan.load[r] < limit and len(plan.of_rank[r]) < slots]
                able = [r for r in able if not holds(plan, r, expert)]
                to = min(able, key=lambda r: plan.load[r], default=-1)
                moved = min(need, limit - plan.load[to], plan.tokens[expert] - 1) if able else 0
                if not able or moved < -(-need // len(able)) or sent == fan_out:
                    break
                plan.add(expert, to, moved)
                need -= moved
                sent += 1
        if need > 0:
            return plan
    return plan
