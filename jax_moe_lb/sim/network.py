"""Seconds of flows and collectives over the links of a cluster.

A byte between two ranks uses the links of the outermost level on which the ranks differ, at both ends. It also uses the
links of every level inside it, except the innermost: to leave its datacenter, it must leave its node. The innermost
level is the fabric between neighbors and carries only their bytes. A rank uses the link of its offset among the links
of the node or datacenter.

Links are fluid: all bytes of a stage share them at once. A stage takes the time of the busiest link plus the latency of
its hops, a lower bound approached by good schedules. The model ignores congestion inside switches, protocol overhead
and unfair sharing.

A ring of `P` ranks has `P - 1` hops; an outer level of `m` members carries `m - 1` of them. NCCL uses the same count
(`src/graph/tuning.cc`), and the logarithm of the number of nodes for its trees. All ranks of the cluster take part, in
groups of `sizes` members at each level.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Num

from jax_moe_lb.sim.cluster import Cluster, Collective
from jax_moe_lb.transport.wave_rows import spread_evenly

PerLink = Num[np.ndarray, "_ _"]
RankBytes = Num[np.ndarray, "R R"]


@dataclass(frozen=True)
class Flow:
    """Bytes of one stage on every link of every level."""

    # Per level `[members, links]`, bytes sent by each link of each member; `[1, 1]` if all links carry the same
    sent: tuple[PerLink, ...]
    received: tuple[PerLink, ...]  # per level, bytes received by each link, in the same shape
    # Per level, the number of sequential messages, or the mean of several flows; `()` (default) if all messages overlap
    hops: tuple[int | float, ...] = ()
    in_turn: bool = False  # if True, levels transfer one after the other; False by default

    def times(self, factor: float) -> "Flow":
        """Multiply the bytes by `factor`."""
        sent, received = (tuple(factor * a for a in side) for side in (self.sent, self.received))
        return replace(self, sent=sent, received=received)

    @property
    def reversed(self) -> "Flow":
        """Flow of the same bytes in the opposite direction."""
        return replace(self, sent=self.received, received=self.sent)

    @property
    def is_empty(self) -> bool:
        """True if no link carries bytes."""
        return not any(self.uses)

    @cached_property
    def most(self) -> tuple[float, ...]:
        """Per level, the bytes of the busiest link."""
        sides = zip(self.sent, self.received, strict=True)
        return tuple(float(max(sent.max(initial=0), received.max(initial=0))) for sent, received in sides)

    @cached_property
    def mean_sent(self) -> tuple[float, ...]:
        """Per level, the bytes sent by a link, mean over links."""
        # An even flow has one entry for all links.
        return tuple(float(sent.mean()) for sent in self.sent)

    @cached_property
    def uses(self) -> tuple[bool, ...]:
        """Per level, True if a link carries bytes."""
        return tuple(most > 0 for most in self.most)


def flow(rank_bytes: RankBytes, cluster: Cluster) -> Flow:
    """Compute the flow of an exchange between ranks."""
    sides = []
    for matrix in (rank_bytes, rank_bytes.T):
        inside = [_inside(matrix, size) for size in cluster.inner]
        last = len(inside) - 1
        # The innermost level carries bytes inside the next outer member; other levels carry all bytes leaving a member.
        everything = matrix.sum(1)
        sides.append(
            tuple(
                _on_links((inside[at - 1] if at == last > 0 else everything) - inside[at], cluster, at)
                for at in range(len(inside))
            )
        )
    sent, received = sides
    return Flow(sent, received)


def even_flow(rank_bytes: tuple[float, ...], cluster: Cluster) -> Flow:
    """Compute the flow of an exchange in which all ranks send and receive the same bytes."""
    loads, last = [], len(rank_bytes) - 1
    for at, (level, inner) in enumerate(zip(cluster.levels, cluster.inner, strict=True)):
        # Bytes for another member of an outer level leave by the links of this one as well.
        passing = rank_bytes[last] if at == last else sum(rank_bytes[: at + 1])
        loads.append(np.full((1, 1), passing * inner / level.links))
    return Flow(tuple(loads), tuple(loads))


def with_messages(one: Flow, messages: float) -> Flow:
    """Return a flow with a number of messages in sequence, at the outermost level."""
    return replace(one, hops=(messages, *(0 for _ in one.sent[1:])))


def all_to_all(rank_bytes: float, sizes: tuple[int, ...], cluster: Cluster) -> Flow:
    """Compute the flow if every rank spreads its bytes evenly over a group, itself included."""
    return even_flow(spread_evenly(rank_bytes, sizes), cluster)


def seconds(flow: Flow, cluster: Cluster, *, messages: int = 1, copy_engine: bool = False) -> float:
    """Compute the seconds of a stage: the time of the busiest link plus the latency of the hops, a lower bound."""
    return busy_s(flow, cluster, copy_engine=copy_engine) + messages * latency_s(flow, cluster)


def busy_s(flow: Flow, cluster: Cluster, *, copy_engine: bool = False) -> float:
    """Compute the time of the busiest link, in seconds."""
    times = level_seconds(flow, cluster, copy_engine=copy_engine)
    return math.fsum(times) if flow.in_turn else max(times)


def level_seconds(flow: Flow, cluster: Cluster, *, copy_engine: bool = False) -> tuple[float, ...]:
    """Compute the time of the busiest link per level, in seconds."""
    times = []
    for at, level in enumerate(cluster.levels):
        rate = level.bytes_per_s
        if copy_engine and cluster.copy_bytes_per_s is not None:
            rate = min(rate, cluster.copy_bytes_per_s * cluster.inner[at] / level.links)
        times.append(flow.most[at] / rate)
    return tuple(times)


def latency_s(flow: Flow, cluster: Cluster) -> float:
    """Compute the latency of one message of a flow, in seconds."""
    # With `hops`, it is the sum over all hops, else the latency of the slowest level in use.
    latencies = [level.latency_s for level in cluster.levels]
    if flow.hops:
        return math.fsum(hops * latency for hops, latency in zip(flow.hops, latencies, strict=True))
    return max((latency for latency, is_used in zip(latencies, flow.uses, strict=True) if is_used), default=0.0)


def level_bytes(flow: Flow, cluster: Cluster) -> tuple[float, ...]:
    """Sum the bytes sent by all links per level."""
    totals = []
    for mean, level, inner in zip(flow.mean_sent, cluster.levels, cluster.inner, strict=True):
        totals.append(mean * (cluster.num_ranks // inner * level.links))
    return tuple(totals)


def _inside(matrix: RankBytes, size: int) -> Num[np.ndarray, "R"]:
    """Sum the bytes from each rank to the ranks of its own block of `size`, itself included."""
    blocks = len(matrix) // size
    own = np.einsum("bibj->bi", matrix.reshape(blocks, size, blocks, size))
    return own.reshape(-1)


def _on_links(rank_bytes: Num[np.ndarray, "R"], cluster: Cluster, at: int) -> PerLink:
    """Sum the bytes of ranks over the links that they use at a level."""
    # Neighbors share a link: rank `i` of a member has link `i // (ranks per link)`.
    links = cluster.levels[at].links
    return rank_bytes.reshape(-1, links, cluster.inner[at] // links).sum(2)


MessageSizes = tuple[int, ...]
"""Members of a group at each level, outermost first."""


def all_gather(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Compute the flows of an all-gather."""
    ranks, way = math.prod(sizes), cluster.communication.collectives
    if ranks == 1:
        return ()
    if way == Collective.DIRECT:
        return (all_to_all(num_bytes * ranks, sizes, cluster),)
    if way == Collective.RING:
        return (_ring(num_bytes * (ranks - 1), sizes, _ring_hops(sizes), cluster),)
    flows, held = [], num_bytes
    for at, size in enumerate(sizes):
        # From the outermost level inwards, so that a shard crosses outer links once per member.
        if size > 1:
            hops = size - 1 if way == Collective.HIERARCHICAL else _doublings(size)
            flows.append(_at_level(held * (size - 1), at, hops, cluster))
            held *= size
    return tuple(flows)


def reduce_scatter(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Compute the flows of a reduce-scatter: those of an all-gather, reversed."""
    return tuple(flow.reversed for flow in reversed(all_gather(num_bytes, sizes, cluster)))


def all_reduce(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Compute the flows of an all-reduce."""
    ranks = math.prod(sizes)
    if ranks == 1:
        return ()
    match cluster.communication.collectives:
        case Collective.RING:
            passed_on = 2 * num_bytes * (ranks - 1) / ranks
            return (_ring(passed_on, sizes, tuple(2 * hops for hops in _ring_hops(sizes)), cluster),)
        case Collective.TREE:
            return (_double_tree(num_bytes, sizes, cluster),)
        case _:
            shard = num_bytes / ranks
            return (*reduce_scatter(shard, sizes, cluster), *all_gather(shard, sizes, cluster))


def pair_hops(sizes: MessageSizes) -> tuple[int, ...]:
    """Count the steps of a pairwise exchange by level, each at the outermost level on which its pairs differ."""
    return tuple((size - 1) * math.prod(sizes[at + 1 :]) for at, size in enumerate(sizes))


def _ring(passed_on: float, sizes: MessageSizes, hops: tuple[int, ...], cluster: Cluster) -> Flow:
    """Compute the flow of a ring, as the mean over rings starting at every rank, so that all links carry it."""
    ranks, by_level, outside = math.prod(sizes), [], 0
    for at in range(len(sizes)):
        members = math.prod(sizes[: at + 1])
        crossing = members if members > 1 else 0
        # A hop that leaves a member of an outer level leaves one of this level too; count it at the outer level.
        by_level.append(passed_on * (crossing - outside) / ranks)
        outside = crossing
    return replace(even_flow(tuple(by_level), cluster), hops=hops)


def _ring_hops(sizes: MessageSizes) -> tuple[int, ...]:
    members = [math.prod(sizes[: at + 1]) for at in range(len(sizes))]
    return tuple(mine - outer for mine, outer in zip(members, [1, *members], strict=False))


def _double_tree(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> Flow:
    """Compute the flow of two trees with half of the bytes each; all ranks but the root exchange with the parent."""
    ranks = math.prod(sizes)
    by_level = tuple(2 * num_bytes * edges / ranks for edges in _ring_hops(sizes))
    return replace(even_flow(by_level, cluster), hops=tuple(2 * _doublings(size) for size in sizes))


def _at_level(rank_bytes: float, at: int, hops: int, cluster: Cluster) -> Flow:
    levels = range(len(cluster.levels))
    flow = even_flow(tuple(rank_bytes if level == at else 0.0 for level in levels), cluster)
    return replace(flow, hops=tuple(hops if level == at else 0 for level in levels))


def _doublings(size: int) -> int:
    """Round the binary logarithm up, in integers."""
    return (size - 1).bit_length()
