"""RailS in a model of NICs: load balance between rails, and its effect on completion time, without a network simulator.

The time of an all-to-all is the time of its busiest NIC; switches and links inside a node are never the bottleneck.
Nodes have as many GPUs as NICs. The lower bound is from theorem 3: the busiest node, as sender or receiver, divided
evenly over its rails.
"""

import argparse
import heapq
from collections.abc import Mapping

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


# ---- workloads ------------------------------------------------------------------------


def sparse(rng: np.random.Generator, sparsity: float) -> np.ndarray:
    """Sample flows of random sizes (gamma of shape 2), a fraction of them zero: `[R, R]` rows, 0 inside nodes."""
    rows = MEAN_ROWS / 2 * rng.gamma(2, size=(RANKS, RANKS)) * (rng.random((RANKS, RANKS)) >= sparsity)
    return between_nodes_only(rows)


def popular(rng: np.random.Generator, exponent: float) -> np.ndarray:
    """Sample tokens with two experts each, one expert per GPU, with Zipf popularity."""
    share = rng.permutation(np.arange(1.0, RANKS + 1) ** -exponent)
    tokens = MEAN_ROWS * RANKS
    return between_nodes_only(rng.multinomial(tokens, share / share.sum(), RANKS))


def mixtral(rng: np.random.Generator, spread: float) -> np.ndarray:
    """Sample tokens with two of eight experts on the GPUs of two nodes of four; routing differs between GPUs."""
    logits = spread * rng.normal(size=(8, 1, 8)) + rng.gumbel(size=(8, 4096, 8))
    chosen = np.argsort(-logits, -1)[:, :, :2].reshape(8, -1)
    return np.stack([np.bincount(row, minlength=8) for row in chosen]).astype(np.int32)


def between_nodes_only(rows: np.ndarray) -> np.ndarray:
    node = np.arange(RANKS) // MEMBERS
    return np.where(node[:, None] == node, 0, rows).astype(np.int32)


# ---- plans: rows by rail, [R, R, N] -----------------------------------------------------


def on_rail(rows: np.ndarray, rail: np.ndarray, num_rails: int) -> np.ndarray:
    """Put each flow on one rail."""
    return rows[:, :, None] * (rail[:, :, None] == np.arange(num_rails))


def by_source(rows: np.ndarray, members: int, rng: np.random.Generator) -> np.ndarray:
    """Use the NIC of the sending GPU."""
    del rng
    return on_rail(rows, np.broadcast_to(np.arange(len(rows))[:, None] % members, rows.shape), members)


def by_receiver(rows: np.ndarray, members: int, rng: np.random.Generator) -> np.ndarray:
    """Use the NIC of the receiving GPU, as without a plan."""
    del rng
    return on_rail(rows, np.broadcast_to(np.arange(len(rows)) % members, rows.shape), members)


def hashed(rows: np.ndarray, members: int, rng: np.random.Generator) -> np.ndarray:
    """Put every flow on a random NIC, as ECMP does."""
    return on_rail(rows, rng.integers(0, members, rows.shape), members)


def pooled(rows: np.ndarray, members: int, rng: np.random.Generator, parts: float = np.inf) -> np.ndarray:
    """Pack all rows sent by a node with LPT: whole flows, or chunks of the mean flow over `parts`."""
    del rng
    rails = np.zeros((*rows.shape, members), np.int32)
    chunk = rows[rows > 0].mean() / parts if np.isfinite(parts) else rows.max() + 1
    for first in range(0, len(rows), members):
        items = _cut(rows, np.arange(first, first + members), np.arange(len(rows)), int(max(chunk, 1)))
        _pack(rails, items, members)
    return rails


def per_destination(rows: np.ndarray, members: int, rng: np.random.Generator) -> np.ndarray:
    """Pack rows from node to node with LPT, in chunks of a quarter of the mean flow, independently."""
    del rng
    rails = np.zeros((*rows.shape, members), np.int32)
    chunk = int(max(rows[rows > 0].mean() / 4, 1))
    for first in range(0, len(rows), members):
        for to in range(0, len(rows), members):
            _pack(rails, _cut(rows, np.arange(first, first + members), np.arange(to, to + members), chunk), members)
    return rails


def _cut(rows: np.ndarray, sources: np.ndarray, targets: np.ndarray, chunk: int) -> list[tuple[int, int, int]]:
    items = []
    for source in sources:
        for target in targets:
            full, rest = divmod(int(rows[source, target]), chunk)
            items += [(chunk, source, target)] * full + ([(rest, source, target)] if rest else [])
    return items


def _pack(rails: np.ndarray, items: list[tuple[int, int, int]], num_rails: int) -> None:
    if items:
        size, source, target = np.array(items).T
        np.add.at(rails, (source, target, _lightest_first(size, num_rails)), size)


def _lightest_first(sizes: np.ndarray, num_rails: int) -> np.ndarray:
    """Return the rail of each item by LPT: largest first, to the least loaded rail; ties go to the lower index."""
    rails, load = np.empty(len(sizes), np.intp), [(0, rail) for rail in range(num_rails)]
    for item in np.argsort(-sizes, kind="stable"):
        total, rail = load[0]
        rails[item] = rail
        heapq.heapreplace(load, (total + int(sizes[item]), rail))
    return rails


def rails_of(rows: np.ndarray, members: int, rng: np.random.Generator, chunks: int = 16) -> np.ndarray:
    """Return the plan of the library."""
    del rng
    return np.asarray(spray(rows, np.ones(members, np.int32), members, chunks))


PLANS = {
    "source's NIC": by_source,
    "receiver's NIC": by_receiver,
    "hashed": hashed,
    "LPT, whole flows": pooled,
    "LPT, pooled": lambda rows, members, rng: pooled(rows, members, rng, 4),
    "LPT per destination": per_destination,
    "RailS": rails_of,
}


# ---- results --------------------------------------------------------------------------


def loads(rails: np.ndarray, members: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows sent and received by each NIC, `[G, N]` for `G` nodes."""
    num_nodes = len(rails) // members
    total = rails.reshape(num_nodes, members, num_nodes, members, -1).sum((1, 3), dtype=np.int64)
    total = total * ~np.eye(num_nodes, dtype=bool)[:, :, None]
    return total.sum(1), total.sum(0)


def bound(rows: np.ndarray, members: int) -> float:
    """Return the busiest node's rows over its rails, a lower bound of every plan."""
    sent, received = loads(rows[:, :, None], members)
    return max(sent.max(), received.max()) / members


def over_bound(plan, draw, members: int = MEMBERS) -> np.ndarray:
    """Return the busiest NIC over the bound, as sender, as receiver, and as either: means over seeds."""
    ratios = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        rows = draw(rng)
        sent, received = loads(plan(rows, members, rng), members)
        ratios.append(np.array([sent.max(), received.max(), max(sent.max(), received.max())]) / bound(rows, members))
    return np.mean(ratios, 0)


def table_of_plans() -> Table:
    """Return the balance of sending and receiving NICs."""
    left_out = (0, 0.8, 0.95)
    columns = {"plan": ""} | {f"{way}, {s:g} left out": ".2f" for s in left_out for way in ("sending", "receiving")}
    rows: list[list[Value]] = []
    for name, plan in PLANS.items():
        cells = [over_bound(plan, lambda rng, s=s: sparse(rng, s))[:2].tolist() for s in left_out]
        rows.append([name, *(number for cell in cells for number in cell)])
    return Table(columns, rows, "Busiest NIC over the bound; 8 nodes of 8, means of 5 seeds")


WORKLOADS = {
    "sparsity 0": (lambda rng: sparse(rng, 0.0), MEMBERS),
    "sparsity 0.8": (lambda rng: sparse(rng, 0.8), MEMBERS),
    "sparsity 0.95": (lambda rng: sparse(rng, 0.95), MEMBERS),
    "sparsity 0.99": (lambda rng: sparse(rng, 0.99), MEMBERS),
    "popular 0.6": (lambda rng: popular(rng, 0.6), MEMBERS),
    "popular 1.2": (lambda rng: popular(rng, 1.2), MEMBERS),
    "Mixtral, even": (lambda rng: mixtral(rng, 0.3), 4),
    "Mixtral, skewed": (lambda rng: mixtral(rng, 1.5), 4),
}
BASELINES = ("source's NIC", "receiver's NIC", "hashed")


def table_of_times() -> Table:
    """Return completion times relative to plans without balancing."""
    rows: list[list[Value]] = []
    for name, (draw, members) in WORKLOADS.items():
        ours = over_bound(rails_of, draw, members)[2]
        cells = [over_bound(PLANS[base], draw, members)[2] for base in BASELINES]
        changes = [100 * change for cell in cells for change in (ours / cell - 1, cell / ours - 1)]
        rows.append([name, *map(float, changes), float(ours)])
    against = [f"{what} against {base}, %" for base in BASELINES for what in ("time", "bandwidth")]
    columns = {"traffic": ""} | dict.fromkeys(against, "+.0f") | {"time over the bound": ".3f"}
    return Table(columns, rows, "Completion time and bus bandwidth of RailS against other plans")


def table_of_chunks() -> Table:
    """Return costs and gains of more chunks."""
    rows = sparse(np.random.default_rng(0), 0.8)
    small = (rows / 40).astype(np.int32)
    every = (1, 2, 4, 8, 16, 32, 64, 256)
    times = interleaved_s({chunks: (lambda c=chunks: rails_of(rows, MEMBERS, None, c)) for chunks in every}, repeats=9)
    lines: list[list[Value]] = []
    for chunks in every:
        *_, time = over_bound(lambda *args, c=chunks: rails_of(*args, c), lambda rng: sparse(rng, 0.8))
        few = max(load.max() for load in loads(rails_of(small, MEMBERS, None, chunks), MEMBERS))
        few /= bound(small, MEMBERS)
        lines.append([chunks, float(time), float(few), float(_messages(rows, chunks)), spread(times[chunks] * 1e6)])
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
        best = bound(rows, MEMBERS) * MEMBERS / sum(1 / seconds)
        told = [load * np.where(load > 0, seconds, 0) for load in loads(spray(rows, ticks, MEMBERS, 16), MEMBERS)]
        even = [load * seconds for load in loads(rails_of(rows, MEMBERS, None), MEMBERS)]
        reached = [float(max(load.max() for load in loads_s)) for loads_s in (told, even)]
        lines.append([name, *(time / best if np.isfinite(time) else "never ends" for time in reached)])
    columns = {"rail": "", "speed known": ".3f", "speed unknown": ".3f"}
    return Table(columns, lines, "One rail of eight slower: time over that of the best split")


def benchmark(given: argparse.Namespace) -> Mapping[str, Table]:
    plans, times, chunks, rails = table_of_plans(), table_of_times(), table_of_chunks(), table_of_rails()
    return {"plans": plans, "times": times, "chunks": chunks, "rails": rails}
