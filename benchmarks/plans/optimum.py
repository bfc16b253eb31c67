"""Optimal maximum load of a domain, as a mixed-integer program (HiGHS)."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix


def optimum(
    tokens: np.ndarray, num_ranks: int, num_slots: int, candidates: int = 16, limit_s: float = 20.0
) -> tuple[float, float]:
    """Return the lowest max/mean load found, and a proven lower bound for these candidates.

    Quotas are continuous and replicas binary; only the `candidates` hottest experts of each rank may be replicated.
    """
    home_experts = len(tokens) // num_ranks
    load = tokens * num_ranks / tokens.sum()
    base = load.reshape(num_ranks, home_experts).sum(1)
    hot = np.argsort(-load.reshape(num_ranks, home_experts), axis=1, kind="stable")[:, :candidates]
    experts = (hot + home_experts * np.arange(num_ranks)[:, None]).reshape(-1)
    expert, rank = (a.reshape(-1) for a in np.meshgrid(experts, np.arange(num_ranks), indexing="ij"))
    away = expert // home_experts != rank
    expert, rank = expert[away], rank[away]
    n = len(expert)
    pairs = np.arange(n)
    quota, made = 1 + pairs, 1 + n + pairs  # columns; column 0 is the maximum load

    def rows(row: np.ndarray, column: np.ndarray, value: np.ndarray | float, count: int) -> coo_matrix:
        return coo_matrix((np.broadcast_to(value, row.shape), (row, column)), shape=(count, 1 + 2 * n))

    ranks = np.arange(num_ranks)
    loads = rows(ranks, 0 * ranks, -1.0, num_ranks) + rows(rank, quota, 1.0, num_ranks)
    loads += rows(expert // home_experts, quota, -1.0, num_ranks)
    constraints = [
        LinearConstraint(loads.tocsr(), -np.inf, -base),
        LinearConstraint(rows(rank, made, 1.0, num_ranks).tocsr(), 0, num_slots - home_experts),
        LinearConstraint(rows(expert, quota, 1.0, len(tokens)).tocsr(), 0, load),
        LinearConstraint((rows(pairs, quota, 1.0, n) - rows(pairs, made, load[expert], n)).tocsr(), -np.inf, 0),
    ]
    cost = np.zeros(1 + 2 * n)
    cost[0] = 1
    lower, upper = np.zeros(1 + 2 * n), np.ones(1 + 2 * n)
    lower[0], upper[0] = 1.0, base.max()
    upper[quota] = load[expert]
    integral = np.zeros(1 + 2 * n)
    integral[made] = 1
    ends = {"time_limit": limit_s, "mip_rel_gap": 5e-4}
    result = milp(cost, constraints=constraints, integrality=integral, bounds=Bounds(lower, upper), options=ends)
    return (np.nan if result.x is None else result.fun), result.mip_dual_bound
