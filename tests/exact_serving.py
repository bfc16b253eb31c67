"""Assignment of tokens to replicas in `moe_lb::Exact`; see exact_reference.py."""

from collections.abc import Iterator

import numpy as np


class Serving:
    """State of serving.h. Entry e < E is expert e at home; later ones are replicas, in the order added."""

    def __init__(self, tokens: np.ndarray, num_ranks: int, replicas: tuple[tuple[int, int], ...] = ()) -> None:
        self.num_ranks, self.num_experts = num_ranks, len(tokens)
        self.home_experts = len(tokens) // num_ranks
        self.tokens = [int(count) for count in tokens]
        self.expert = list(range(self.num_experts))
        self.rank = [expert // self.home_experts for expert in self.expert]
        self.load = [sum(self.tokens[r * self.home_experts : (r + 1) * self.home_experts]) for r in range(num_ranks)]
        self.of_expert: list[list[int]] = [[] for _ in tokens]
        self.of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
        for expert, rank in replicas:
            self.add(expert, rank, 0)

    def replicas(self) -> list[int]:
        return sorted(entry for entries in self.of_rank for entry in entries)

    def fan_out(self) -> int:
        sent = [0] * self.num_ranks
        for entry in self.replicas():
            sent[self.expert[entry] // self.home_experts] += 1
        return max(sent)

    def add(self, expert: int, rank: int, tokens: int) -> None:
        entry = len(self.tokens)
        self.tokens.append(0)
        self.expert.append(expert)
        self.rank.append(rank)
        self.of_expert[expert].append(entry)
        self.of_rank[rank].append(entry)
        self.shift(expert, entry, tokens)

    def shift(self, source: int, target: int, tokens: int) -> None:
        for entry, more in ((source, -tokens), (target, tokens)):
            self.tokens[entry] += more
            self.load[self.rank[entry]] += more

    def level(self, limit: int) -> int:
        for rank in range(self.num_ranks):
            while (reached := self.relieve(rank, limit)) is not None:
                limit = -(-sum(self.load[r] for r in reached) // len(reached))
        return limit

    def relieve(self, source: int, limit: int) -> list[int] | None:
        """Return None if the rank is within the limit; otherwise all ranks reachable by its tokens."""
        while self.load[source] > limit:
            queue, came = [source], {source: (-1, -1)}
            experts: set[int] = set()
            sink = next((rank for rank in self._search(queue, came, experts) if self.load[rank] < limit), None)
            if sink is None:
                return queue
            path = []
            rank = sink
            while rank != source:
                path.append(came[rank])
                rank = self.rank[came[rank][0]]
            tokens = min([self.load[source] - limit, limit - self.load[sink], *(self.tokens[a] for a, _ in path)])
            for taken, given in path:
                self.shift(taken, given, tokens)
        return None

    def _search(self, queue: list[int], came: dict[int, tuple[int, int]], experts: set[int]) -> Iterator[int]:
        for rank in queue:  # the loop extends the queue
            homes = range(rank * self.home_experts, (rank + 1) * self.home_experts)
            for entry in [e for e in homes if self.of_expert[e]] + self.of_rank[rank]:
                expert = self.expert[entry]
                if self.tokens[entry] == 0 or expert in experts:
                    continue
                experts.add(expert)
                for other in [expert, *self.of_expert[expert]]:
                    if self.rank[other] not in came:
                        came[self.rank[other]] = (entry, other)
                        queue.append(self.rank[other])
                        yield self.rank[other]


def chain(tokens: np.ndarray, num_ranks: int, slots: int, fan_out: int, limit: int, rule: str) -> Serving:
    """Return the plan of chain.h."""
    plan = Serving(tokens, num_ranks)
    start = list(plan.load)
    used, sent = [0] * num_ranks, [0] * num_ranks
    givers = [r for r in range(num_ranks) if start[r] > limit]

    def hottest(rank: int) -> int:
        experts = range(rank * plan.home_experts, (rank + 1) * plan.home_experts)
        return max(experts, key=lambda e: plan.tokens[e])

    def key(rank: int, room: int) -> tuple[int, ...]:
        hot, surplus = plan.tokens[hottest(rank)], plan.load[rank] - limit
        return {
            "surplus": (1, surplus) if hot >= room else (0, hot),
            "useful": (min(hot, surplus, room), hot),
            "hottest": (hot,),
            "in turn": (start[rank],),
        }[rule]

    while givers:
        receivers = [r for r in range(num_ranks) if plan.load[r] < limit and used[r] < slots]
        if not receivers:
            break
        receiver = max(receivers, key=lambda r: limit - plan.load[r])
        room = limit - plan.load[receiver]
        giver = max(givers, key=lambda r: key(r, room))
        expert = hottest(giver)
        most = plan.load[giver] - limit if rule == "in turn" else room
        plan.add(expert, receiver, min(plan.tokens[expert], room, most))
        used[receiver] += 1
        sent[giver] += 1
        givers = [r for r in givers if plan.load[r] > limit and sent[r] < fan_out]
    return plan


def thin(plan: Serving, limit: int) -> None:
    """Apply thinning.h."""
    for entry in sorted(plan.replicas(), key=lambda e: plan.tokens[e]):
        saved = list(plan.tokens), list(plan.load)
        expert, rank = plan.expert[entry], plan.rank[entry]
        at = plan.of_expert[expert].index(entry), plan.of_rank[rank].index(entry)
        plan.shift(entry, expert, plan.tokens[entry])
        plan.of_expert[expert].remove(entry)
        plan.of_rank[rank].remove(entry)
        if plan.relieve(plan.rank[expert], limit) is not None:
            plan.tokens, plan.load = saved
            plan.of_expert[expert].insert(at[0], entry)
            plan.of_rank[rank].insert(at[1], entry)


def localize(plan: Serving, counts: np.ndarray, limit: int, slots: int) -> None:
    """Apply localize.h."""
    replicas = plan.replicas()

    def holds(rank: int, expert: int) -> bool:
        return expert // plan.home_experts == rank or any(plan.expert[e] == expert for e in plan.of_rank[rank])

    def gain(entry: int, to: int) -> int:
        here, there = counts[plan.rank[entry], plan.expert[entry]], counts[to, plan.expert[entry]]
        return min(there, plan.tokens[entry]) - min(here, plan.tokens[entry])

    def fits(rank: int, more: int) -> bool:
        return more <= 0 or plan.load[rank] + more <= limit

    def move(entry: int, to: int) -> None:
        plan.of_rank[plan.rank[entry]].remove(entry)
        plan.of_rank[to].append(entry)
        plan.load[plan.rank[entry]] -= plan.tokens[entry]
        plan.load[to] += plan.tokens[entry]
        plan.rank[entry] = to

    for i, a in enumerate(replicas):
        for to in range(plan.num_ranks):
            free = len(plan.of_rank[to]) < slots and not holds(to, plan.expert[a])
            if free and gain(a, to) > 0 and fits(to, plan.tokens[a]):
                move(a, to)
        for b in replicas[i + 1 :]:
            at, to = plan.rank[a], plan.rank[b]
            more = plan.tokens[b] - plan.tokens[a]
            clash = holds(to, plan.expert[a]) or holds(at, plan.expert[b])
            if not clash and fits(at, more) and fits(to, -more) and gain(a, to) + gain(b, at) > 0:
                move(a, to)
                move(b, at)
