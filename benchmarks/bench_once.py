"""Rows of `Once` and `Forward` between ranks, counted from the tables of their programs.

    python -m benchmarks.bench_once --out FILE.json

8 virtual CPU devices form 4 or 2 nodes; 256 experts, 8 per token, as in DeepSeek-V3. The programs compute the lists of
every rank, and the tables of these lists are the rows of the exchanges. The distinct pairs of tokens and nodes, and of
tokens and ranks, are counted in NumPy from routing and plan. Rows that stay on their rank are not counted. Under plans
with a proportional split, as those of UltraEP, sources choose the copies for each rank (`transport/serving_ranks.py`).
The last columns compare with copies in the order of tokens.

Recorded loads are the last step of training of the preset tiny without a router loss: 16 experts, 2 per token. A
recording has counts only, so the tokens of each rank are sampled from its counts.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from benchmarks.bench_stale_plans import recorded
from benchmarks.results import Table, out_option, report
from jax_moe_lb import Buffers, Plan, System, Topology, exact, plain, ultraep, use_virtual_cpu_devices
from jax_moe_lb.core import imbalance, load, nearest_first, plain_plan, rows_between
from jax_moe_lb.transport import Forward, Once
from jax_moe_lb.transport.serving_ranks import preferring

AXES = ("node", "gpu")
SHAPES = ((4, 2), (2, 4))
"""Nodes, and ranks of a node."""

RANKS, EXPERTS, PER_TOKEN, SLOTS = 8, 256, 8, 2
ONE_ROUND = Buffers(headroom=RANKS)
"""Receive buffer for any load: the tables then have all rows."""

RECORDED_EXPERTS, RECORDED_PER_TOKEN = 16, 2

GROUPS, GROUPS_PER_TOKEN = 8, 4
"""Node-limited routing of DeepSeek-V3."""


def routing(kind: str, num_tokens: int) -> np.ndarray:
    """Return the experts of every token, `[R, T, K]`, distinct for each token.

    Args:
        kind: "uniform", "Zipf" or "recorded"; with "node-limited", a token chooses among 4 of 8 groups of experts.
        num_tokens: `T`, tokens of a rank.
    """
    rng = np.random.default_rng(0)
    if kind == "recorded":
        # [layers, R, E]: the most uneven layer.
        counts = recorded("no router loss", 0)[-1]
        chosen = counts[np.argmax(counts.sum(1).max(1))]
        logits = rng.gumbel(size=(RANKS, num_tokens, chosen.shape[1])) + np.log(np.maximum(chosen, 0.5))[:, None]
        return np.argsort(-logits, -1)[..., :RECORDED_PER_TOKEN].astype(np.int32)
    logits = rng.gumbel(size=(RANKS, num_tokens, EXPERTS))
    if "Zipf" in kind:
        logits += np.log(rng.permutation(np.arange(1.0, EXPERTS + 1)) ** -0.8)
    if "node-limited" in kind:
        # The score of a group is the sum of its two highest, as in DeepSeek-V3.
        scores = np.sort(logits.reshape(RANKS, num_tokens, GROUPS, -1), -1)[..., -2:].sum(-1)
        lowest = np.sort(scores, -1)[..., -GROUPS_PER_TOKEN, None]
        logits = np.where(np.repeat(scores >= lowest, EXPERTS // GROUPS, -1), logits, -np.inf)
    return np.argsort(-logits, -1)[..., :PER_TOKEN].astype(np.int32)


def mesh(shape: tuple[int, int]) -> Mesh:
    """Return the mesh of all devices, by nodes and ranks of a node."""
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2)


@functools.cache
def tables_of(dispatch: Once | Forward, shape: tuple[int, int]) -> Callable[..., tuple[jax.Array | None, jax.Array]]:
    """Return a program from routing, counts and plan to the tables of all ranks.

    These are the rows between the ranks of the first hop, if any, and of the last.
    """

    def one_rank(experts: jax.Array, counts: jax.Array, plan: Plan) -> tuple[jax.Array | None, jax.Array]:
        receipt = dispatch.address(experts, counts, plan, Topology.from_mesh(mesh(shape), AXES))
        between = None if receipt.between is None else receipt.between.table[None]
        return between, receipt.lists.table[None]

    ranks, whole = PartitionSpec(AXES), PartitionSpec()
    return jax.jit(
        jax.shard_map(one_rank, mesh=mesh(shape), in_specs=(ranks, whole, whole), out_specs=ranks, check_vma=False)
    )


Choose = Callable[[np.ndarray, np.ndarray], Any]
"""Function from experts `[N, K]` and copies of each expert to each rank `[E, P]` to the rank of each choice."""


@dataclass(frozen=True)
class Case:
    """Routing and plan of a microbatch.

    Args:
        shape: nodes, and ranks of a node.
        experts: `[R, T, K]` int32.
        counts: `[R, E]` int32.
        plan: plan as NumPy arrays.
    """

    shape: tuple[int, int]
    experts: np.ndarray
    counts: np.ndarray
    plan: Plan

    @classmethod
    def of(cls, kind: str, system: System, num_tokens: int, shape: tuple[int, int]) -> "Case":
        """Plan the counts of a routing on the host."""
        topology, experts = Topology.from_mesh(mesh(shape), AXES), routing(kind, num_tokens)
        num_experts = RECORDED_EXPERTS if kind == "recorded" else EXPERTS
        counts = np.stack([np.bincount(one.reshape(-1), minlength=num_experts) for one in experts]).astype(np.int32)
        # The same slots for all plans: one compilation.
        start = plain_plan(counts, topology, num_experts // RANKS + SLOTS)
        return cls(shape, experts, counts, system.balancer.rebalance(counts, start, topology, ())[0])

    def node_pairs(self) -> int:
        """Return the distinct pairs of a token and another node with an expert of it."""
        nodes, members = self.shape
        node, own = self.experts // (self.counts.shape[1] // nodes), np.arange(RANKS)[:, None] // members
        return int(sum(((node == n).any(2) & (own != n)).sum() for n in range(nodes)))

    def rank_pairs(self, choose: Choose) -> int:
        """Return the distinct pairs of a token and another rank that serves it.

        Args:
            choose: ranks of the copies of a source.
        """
        pairs = 0
        for rank in range(RANKS):
            going = nearest_first(self.counts, self.plan.quota, rank, self.plan.domain, self.plan.split)
            pairs += _pairs(choose(self.experts[rank], going), going.shape[1], rank)
        return pairs

    def pairs_inside_nodes(self, choose: Choose) -> int:
        """Return the distinct pairs of a token and a rank other than its rail rank in the node of that rank.

        Args:
            choose: ranks of the copies of a rail rank.
        """
        nodes, members = self.shape
        (_, num_experts), pairs = self.counts.shape, 0
        per_node = num_experts // nodes
        for node in range(nodes):
            mine = slice(node * per_node, (node + 1) * per_node)
            counts = self.counts.reshape(nodes, members, num_experts)[:, :, mine].sum(0, dtype=np.int32)
            quota = self.plan.quota[mine, node * members : (node + 1) * members]
            for offset in range(members):
                tokens = self.experts[offset::members].reshape(-1, self.experts.shape[2]) - node * per_node
                going = nearest_first(counts, quota, offset, self.plan.domain, self.plan.split)
                inside = np.where((tokens >= 0) & (tokens < per_node), tokens, -1)
                pairs += _pairs(choose(inside, going), members, offset)
        return pairs

    @property
    def chosen(self) -> Choose:
        """Ranks of copies under the plan's split, as `lists_of` chooses them."""
        return jax.jit(preferring) if self.plan.split.tier == "proportional" else _in_order


def _in_order(experts: np.ndarray, going: np.ndarray) -> np.ndarray:
    """Return the rank of each choice, with the copies of each expert sent to ranks in order."""
    rank = np.full(experts.shape, -1)
    for expert, by_rank in enumerate(going):
        rank[experts == expert] = np.repeat(np.arange(len(by_rank)), by_rank)
    return rank


def _pairs(rank: np.ndarray, num_ranks: int, own: int) -> int:
    """Count the pairs of tokens and other ranks."""
    visits = (np.asarray(rank)[..., None] == np.arange(num_ranks)).any(1)
    visits[:, own] = False
    return int(visits.sum())


def row(kind: str, name: str, system: System, num_tokens: int, shape: tuple[int, int]) -> list[float | str]:
    """Return a row of the table: rows per token, and over the distinct pairs."""
    case, (nodes, members) = Case.of(kind, system, num_tokens, shape), shape
    given = case.experts.reshape(-1, case.experts.shape[2]), case.counts, case.plan
    (between, inside), (_, once) = (
        jax.tree.map(np.asarray, tables_of(dispatch, shape)(*given))
        for dispatch in (Forward(ONE_ROUND), Once(ONE_ROUND))
    )
    copies, node = np.array(rows_between(case.counts, case.plan)), np.arange(RANKS) // members
    far = node[:, None] != node
    # A table is equal on all ranks of its group: offset o, or node n, has it on its first rank.
    hop = sum(int(one.sum() - np.trace(one)) for one in between[:members])
    last = sum(int(one.sum() - np.trace(one)) for one in inside[::members])
    straight, tokens = int(once[0].sum() - np.trace(once[0])), RANKS * num_tokens
    return [
        f"{nodes} x {members}",
        kind,
        name,
        float(imbalance(load(case.plan))),
        max(float(imbalance(of_node)) for of_node in np.asarray(load(case.plan)).reshape(nodes, members)),
        copies[far].sum() / tokens,
        hop / tokens,
        hop / case.node_pairs(),
        (copies.sum() - np.trace(copies)) / tokens,
        straight / tokens,
        straight / case.rank_pairs(case.chosen),
        last / tokens,
        last / case.pairs_inside_nodes(case.chosen),
        100 * (1 - straight / case.rank_pairs(_in_order)),
        100 * (1 - last / case.pairs_inside_nodes(_in_order)),
    ]


COLUMNS = {
    "nodes": "",
    "routing": "",
    "plan": "",
    "imbalance": ".3f",
    "inside nodes": ".3f",
    "between nodes, Direct": ".2f",
    "between nodes, Forward": ".2f",
    "over (token, node) pairs": ".3f",
    "to other ranks, Direct": ".2f",
    "to other ranks, Once": ".2f",
    "over (token, rank) pairs": ".3f",
    "inside nodes, Forward": ".2f",
    "over (token, rank) pairs in the node": ".3f",
    "saved by the choice of ranks, Once %": ".1f",
    "saved by the choice of ranks, Forward %": ".1f",
}


def main() -> None:
    """Count the rows of all routings and plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="Tokens per rank.")
    out_option(parser)
    given = parser.parse_args()
    use_virtual_cpu_devices(RANKS)
    kinds = ("uniform", "Zipf", "uniform, node-limited", "Zipf, node-limited", "recorded")
    plans = {"plain": plain(), "exact": exact(SLOTS), "ultraep": ultraep(SLOTS)}
    rows = [
        row(kind, name, system, given.tokens, shape)
        for shape in SHAPES
        for kind in kinds
        for name, system in plans.items()
    ]
    title = f"Rows per token; {RANKS} ranks, {EXPERTS} experts, {PER_TOKEN} per token, recorded loads excepted"
    report({"rows": Table(COLUMNS, rows, title)}, given.out)


if __name__ == "__main__":
    main()
