"""RailS in a model of NICs: load balance between rails, by chunks and with slow rails, without a network simulator.

The time of an all-to-all is the time of its busiest NIC; switches and links inside a node are never the bottleneck.
Nodes have as many GPUs as NICs. The lower bound is from theorem 3: the busiest node, as sender or receiver, divided
evenly over its rails.
"""

import argparse
import heapq
import itertools
from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.render.results import Table, Value, spread
from benchmarks.render.timing import interleaved_s
from jax_moe_lb.balancers.rails import ticks_of
from jax_moe_lb.planners.spray import spray

MEMBERS = NODES = 8
RANKS = MEMBERS * NODES
SEEDS = 5
MEAN_ROWS = 4000
"""Mean flow between two GPUs in rows, large enough to make integer rounding negligible."""


def sparse(rng: np.random.Generator, sparsity: float) -> np.ndarray:
    """Sample flows of random sizes (gamma of shape 2), a fraction of them zero: `[R, R]` rows, 0 inside nodes."""
    rows = MEAN_ROWS / 2 * rng.gamma(2, size=(RANKS, RANKS)) * (rng.random((RANKS, RANKS)) >= sparsity)
    node = np.arange(RANKS) // MEMBERS
    return np.where(node[:, None] == node, 0, rows).astype(np.int32)


# ---- plans: rows by rail, [R, R, N] -----------------------------------------------------

Plan = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def on_rail(rows: np.ndarray, rail: np.ndarray) -> np.ndarray:
    """Put each flow on one rail."""
    rails = np.broadcast_to(rail % MEMBERS, rows.shape)
    return rows[:, :, None] * (rails[:, :, None] == np.arange(MEMBERS))


def packed(rows: np.ndarray, num_targets: int, parts: float) -> np.ndarray:
    """Pack the rows of each node for some ranks at a time with LPT: whole flows, or chunks of the mean over `parts`."""
    rails = np.zeros((RANKS, RANKS, MEMBERS), np.int32)
    chunk = max(int(rows[rows > 0].mean() / parts), 1) if np.isfinite(parts) else int(rows.max()) + 1
    for first, to in itertools.product(range(0, RANKS, MEMBERS), range(0, RANKS, num_targets)):
        items = []
        for source, target in itertools.product(range(first, first + MEMBERS), range(to, to + num_targets)):
            full, rest = divmod(int(rows[source, target]), chunk)
            items += [(chunk, source, target)] * full + ([(rest, source, target)] if rest else [])
        if items:
            size, source, target = np.array(items).T
            np.add.at(rails, (source, target, _lightest_first(size)), size)
    return rails


def _lightest_first(sizes: np.ndarray) -> np.ndarray:
    """Return the rail of each item by LPT: largest first, to the least loaded rail; ties go to the lower index."""
    rails, load = np.empty(len(sizes), np.intp), [(0, rail) for rail in range(MEMBERS)]
    for item in np.argsort(-sizes, kind="stable"):
        total, rail = load[0]
        rails[item] = rail
        heapq.heapreplace(load, (total + int(sizes[item]), rail))
    return rails


def rails_of(rows: np.ndarray, chunks: int = 16) -> np.ndarray:
    """Return the plan of the library."""
    return np.asarray(spray(rows, np.ones(MEMBERS, np.int32), MEMBERS, chunks))


PLANS: dict[str, Plan] = {
    "source's NIC": lambda rows, rng: on_rail(rows, np.arange(RANKS)[:, None]),
    "receiver's NIC": lambda rows, rng: on_rail(rows, np.arange(RANKS)),
    "hashed": lambda rows, rng: on_rail(rows, rng.integers(0, MEMBERS, rows.shape)),
    "LPT, whole flows": lambda rows, rng: packed(rows, RANKS, np.inf),
    "LPT, pooled": lambda rows, rng: packed(rows, RANKS, 4),
    "LPT per destination": lambda rows, rng: packed(rows, MEMBERS, 4),
    "RailS": lambda rows, rng: rails_of(rows),
}


# ---- results --------------------------------------------------------------------------


def loads(rails: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows sent and received by each NIC, `[G, N]` for `G` nodes."""
    total = rails.reshape(NODES, MEMBERS, NODES, MEMBERS, -1).sum((1, 3), dtype=np.int64)
    total = total * ~np.eye(NODES, dtype=bool)[:, :, None]
    return total.sum(1), total.sum(0)


def bound(rows: np.ndarray) -> float:
    """Return the busiest node's rows over its rails, a lower bound of every plan."""
    sent, received = loads(rows[:, :, None])
    return max(sent.max(), received.max()) / MEMBERS


def over_bound(plan: Plan, sparsity: float) -> list[float]:
    """Return the busiest NIC over the bound, as sender, as receiver, and as either: means over seeds."""
    ratios = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        rows = sparse(rng, sparsity)
        sent, received = (side.max() for side in loads(plan(rows, rng)))
        ratios.append(np.array([sent, received, max(sent, received)]) / bound(rows))
    return np.mean(ratios, 0).tolist()


def table_of_plans() -> Table:
    """Return the balance of sending and receiving NICs."""
    left_out = (0, 0.8, 0.95)
    columns = {"plan": ""} | {f"{way}, {s:g} left out": ".2f" for s in left_out for way in ("sending", "receiving")}
    rows: list[list[Value]] = []
    for name, plan in PLANS.items():
        rows.append([name, *(number for sparsity in left_out for number in over_bound(plan, sparsity)[:2])])
    return Table(columns, rows, "Busiest NIC over the bound; 8 nodes of 8, means of 5 seeds")


def table_of_chunks() -> Table:
    """Return costs and gains of more chunks."""
    rows = sparse(np.random.default_rng(0), 0.8)
    small = (rows / 40).astype(np.int32)
    every = (1, 2, 4, 8, 16, 32, 64, 256)
    times = interleaved_s({chunks: (lambda c=chunks: rails_of(rows, c)) for chunks in every}, repeats=9)
    lines: list[list[Value]] = []
    for chunks in every:
        *_, time = over_bound(lambda rows, rng, c=chunks: rails_of(rows, c), 0.8)
        few = max(load.max() for load in loads(rails_of(small, chunks))) / bound(small)
        lines.append([chunks, time, float(few), float(_messages(rows, chunks)), spread(times[chunks] * 1e6)])
    columns = {"chunks": "d", "time over the bound": ".3f", "100 rows a flow": ".3f", "messages of a NIC": ".0f"}
    title = "Chunks of each pair of nodes on each rail; sparsity 0.8; planning in C++ for 64 ranks"
    return Table(columns | {"planning, us": ".0f"}, lines, title)


def _messages(rows: np.ndarray, chunks: int) -> float:
    """Return the mean number of chunks and remainders sent by a NIC."""
    blocks = rows.reshape(NODES, MEMBERS, NODES, MEMBERS).swapaxes(1, 2).reshape(-1, MEMBERS**2)
    chunk = np.maximum(blocks.sum(1) // MEMBERS // chunks, 1)[:, None]
    return (-(-blocks // chunk)).sum() / RANKS


def table_of_rails() -> Table:
    """Return the effects of slow and dead rails, with and without known speeds."""
    lines: list[list[Value]] = []
    rows = sparse(np.random.default_rng(0), 0.8)
    for name, speeds in (("half as fast", (2,) * 7 + (1,)), ("a tenth", (10,) * 7 + (1,)), ("dead", (1,) * 7 + (0,))):
        ticks = np.array(ticks_of(speeds), np.int32)
        seconds = np.array([1 / speed if speed else np.inf for speed in speeds]) * max(speeds)
        best = bound(rows) * MEMBERS / sum(1 / seconds)
        told = [load * np.where(load > 0, seconds, 0) for load in loads(spray(rows, ticks, MEMBERS, 16))]
        even = [load * seconds for load in loads(rails_of(rows))]
        reached = [float(max(load.max() for load in loads_s)) for loads_s in (told, even)]
        lines.append([name, *(time / best if np.isfinite(time) else "never ends" for time in reached)])
    columns = {"rail": "", "speed known": ".3f", "speed unknown": ".3f"}
    return Table(columns, lines, "One rail of eight slower: time over that of the best split")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    return {"plans": table_of_plans(), "chunks": table_of_chunks(), "rails": table_of_rails()}
