"""UltraEP's planner following its released code step by step, in plain Python.

It includes checks that this library's planner omits because they cannot fail. The released code computes the mean in
float32, exact up to 2**24 tokens per domain; above, this library is exact, as here.
"""

import numpy as np


def plan(placement, quota, domain, eps=0.01, least=1024):
    """Return placement, quota, and the limit of every domain."""
    placement, new_quota, limits = placement.copy(), quota.copy(), []
    num_ranks = placement.shape[0]
    home = quota.shape[0] // num_ranks
    for first in range(0, num_ranks, domain):
        problem = Domain(placement, quota, range(first, first + domain), home, least)
        limit, replicas = problem.search(np.float32(eps))
        limits.append(limit)
        for expert, rank, tokens in replicas:
            placement[rank, list(placement[rank]).index(-1)] = expert
            new_quota[expert, expert // home] -= tokens
            new_quota[expert, rank] += tokens
    return placement, new_quota, limits


class Domain:
    def __init__(self, placement, quota, ranks, home, least):
        self.placement, self.quota, self.ranks, self.least = placement, quota, ranks, least
        self.load = {r: int(quota[:, r].sum()) for r in ranks}
        self.sources = sorted(ranks, key=lambda r: (-self.load[r], r))
        self.experts = {r: sorted(range(r * home, r * home + home), key=lambda e: (-quota[e, r], e)) for r in ranks}

    def search(self, eps):
        total, members = sum(self.load.values()), len(self.ranks)
        low = -(-total // members)
        assert total > 2**24 or low == int(np.ceil(np.float32(total) / np.float32(members)))
        high = max(max(self.load.values()), low)
        limit = int(np.ceil(np.float32(low) * (np.float32(1) + eps)))
        assert total > 2**24 or limit >= low
        limit = max(limit, low)
        for _ in range(3):
            replicas = self.attempt(limit, dynamic=True)
            if replicas is not None:
                return limit, replicas
            limit = min(high, limit + max(1, -(-high // 100)))
        return self.narrow(self.bisect(low, high), high)

    def bisect(self, low, high):
        """Return the lowest limit with at least as much capacity below it as surplus above."""
        while low < high:
            middle = (low + high) // 2
            surplus = sum(max(load - middle, 0) for load in self.load.values())
            room = sum(max(middle - load, 0) for load in self.load.values())
            low, high = (low, middle) if surplus <= room else (middle + 1, high)
        return low

    def narrow(self, low, high):
        """Test four limits at a time."""
        if self.attempt(low, dynamic=False) is not None:
            return low, self.attempt(low, dynamic=False)
        while high - low > 4:
            limits = [low + (high - low) * way // 5 for way in (1, 2, 3, 4)]
            fits = [self.attempt(limit, dynamic=False) is not None for limit in limits]
            if any(fits):
                way = fits.index(True)
                low, high = (limits[way - 1] + 1 if way else low), limits[way]
            else:
                low = limits[3] + 1
        for limit in range(low, high):
            if self.attempt(limit, dynamic=False) is not None:
                return limit, self.attempt(limit, dynamic=False)
        return high, self.attempt(high, dynamic=False)

    def attempt(self, limit, dynamic):
        """Return replicas `(expert, rank, tokens)` in order of creation, or `None`."""
        needs = {r: max(self.load[r] - limit, 0) for r in self.ranks}
        room = {r: max(limit - self.load[r], 0) for r in self.ranks}
        if sum(needs.values()) > sum(room.values()):
            return None
        used = {r: int((self.placement[r] >= 0).sum()) for r in self.ranks}
        holds = {(r, int(e)) for r in self.ranks for e in self.placement[r]}
        replicas = []
        for source in self.sources:
            need = needs[source]
            for expert in self.experts[source]:
                left = max(int(self.quota[expert, source]) - 1, 0)
                while need > 0 and left > 0:
                    able = [r for r in self.ranks if room[r] and used[r] < self.placement.shape[1]]
                    able = [r for r in able if (r, expert) not in holds]
                    if not able:
                        break
                    floor = max(1, -(-need // len(able))) if dynamic else self.least
                    able = [r for r in able if min(need, room[r], left) >= floor]
                    if not able:
                        break
                    rank = max(able, key=lambda r: (room[r], -r))
                    tokens = min(need, room[rank], left)
                    replicas.append((expert, rank, tokens))
                    holds.add((rank, expert))
                    room[rank] -= tokens
                    used[rank] += 1
                    need -= tokens
                    left -= tokens
            if need > 0:
                return None
        return replicas
