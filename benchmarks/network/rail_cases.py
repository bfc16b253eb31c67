"""Skewed all-to-alls between two nodes of four ranks: token copies per expert, from which RailS plans."""

import numpy as np

from jax_moe_lb import Topology
from jax_moe_lb.balancers import RailS
from jax_moe_lb.core import plain_plan
from jax_moe_lb.core.plan import Plan, rows_between
from jax_moe_lb.core.topology import Level

NODES, RAILS = 2, 4
RANKS = NODES * RAILS
TOPOLOGY = Topology((Level("node", NODES), Level("gpu", RAILS)), RAILS, rails_per_node=RAILS)
EXPERTS = 16
TOKENS = 8192


def cases(seed: int) -> dict[str, np.ndarray]:
    """Return the token copies of each rank for each expert, `[RANKS, EXPERTS]`, before `scaled`."""
    rng = np.random.default_rng(seed)
    home = np.arange(EXPERTS) * RANKS // EXPERTS
    node, offset = np.arange(RANKS) // RAILS, np.arange(RANKS) % RAILS
    hot_receiver = np.where(offset[home] == 1, 9.0, 1.0) * np.ones((RANKS, 1))
    hot_sender = np.where(offset == 2, 9.0, 1.0)[:, None] * np.ones(EXPERTS)
    pair = (np.arange(RANKS)[:, None] == 2) & (home == 5)
    sparse = rng.gamma(2, size=(RANKS, EXPERTS)) * (rng.random((RANKS, EXPERTS)) >= 0.8)
    popular = np.arange(1.0, EXPERTS + 1) ** -1.2
    weights = {
        "even": np.ones((RANKS, EXPERTS)),
        "hot receiver": hot_receiver,
        "hot sender": hot_sender,
        "hot pair": np.where(pair, 30.0, 1.0),
        "Zipf 1.2": rng.multinomial(2 * TOKENS, rng.permutation(popular) / popular.sum(), RANKS).astype(float),
        "own preferences": _preferences(rng, 1.5),
        "sparse 0.8": sparse,
    }
    return {name: np.where(node[:, None] == node[home], 0, weight) for name, weight in weights.items()}


def _preferences(rng: np.random.Generator, spread: float) -> np.ndarray:
    """Return counts with two experts per token and different preferences on each rank."""
    logits = spread * rng.normal(size=(RANKS, 1, EXPERTS)) + rng.gumbel(size=(RANKS, TOKENS, EXPERTS))
    chosen = np.argsort(-logits, -1)[:, :, :2].reshape(RANKS, -1)
    return np.stack([np.bincount(row, minlength=EXPERTS) for row in chosen]).astype(float)


def scaled(weights: np.ndarray, rows: int) -> np.ndarray:
    """Return counts `[RANKS, EXPERTS]` scaled to about `rows` rows of the busiest node, as sender or receiver."""
    return (weights * rows / busiest_node(weights.reshape(RANKS, RANKS, -1).sum(-1))).round().astype(np.int32)


def busiest_node(rows: np.ndarray) -> float:
    """Return the rows sent or received by the busiest node, from `[RANKS, RANKS]` rows."""
    between = rows.reshape(NODES, RAILS, NODES, RAILS).sum((1, 3))
    return max(between.sum(0).max(), between.sum(1).max())


def sprayed(counts: np.ndarray) -> Plan:
    """Return plain expert parallelism with the rails of `RailS`."""
    return RailS().rebalance(counts, plain_plan(counts, TOPOLOGY), TOPOLOGY, ())[0]


def plan_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows between ranks, `[RANKS, RANKS]`, and by rail, `[RANKS, RANKS, RAILS]`, by `RailS`."""
    plan = sprayed(counts)
    return np.asarray(rows_between(counts, plan)), np.asarray(plan.rails)


def by_receiver(rows: np.ndarray) -> np.ndarray:
    """Return every row on the receiving rank's rail, as in `MultiRailDispatch` without `plan.rails`."""
    return rows[:, :, None] * (np.arange(RANKS)[:, None] % RAILS == np.arange(RAILS))
