"""Seconds of flows and collectives over the links of a cluster.

A byte between two ranks passes the links of the outermost level at which they differ, at both ends, and those of every
level inside it except the innermost: to leave its datacenter it must leave its node. The innermost level is the fabric
between neighbors, which carries nothing else. A rank uses the link of its offset among those of its node or datacenter.

Links are fluid: all bytes of a stage share them at once. A stage takes the time of its busiest link plus the latency of
its hops, a lower bound that a good schedule approaches. Congestion inside switches, protocols and unfair shares are not
modelled.

A ring of `P` ranks has `P - 1` hops, of which an outer level carries as many as it has members, less one. NCCL counts
them likewise (`src/graph/tuning.cc`), and its trees by the logarithm of the nodes. All ranks of the cluster take part,
in groups of `sizes` members at each level.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Num

from jax_moe_lb.sim.cluster import Cluster, Collective

PerLink = Num[np.ndarray, "_ _"]
RankBytes = Num[np.ndarray, "R R"]


@dataclass(frozen=True)
class Flow:
    """A flow has the bytes of one stage on every link of every level.

    Args:
        sent: for each level `[members, links]`, the bytes that each link of each member sends; `[1, 1]` where all links
            carry the same.
        received: for each level the bytes that each link receives, in the same shape.
        hops: for each level, how many messages follow each other there, each after the one before; `()`: all messages
            are under way at once.
    """

    sent: tuple[PerLink, ...]
    received: tuple[PerLink, ...]
    hops: tuple[int, ...] = ()

    def times(self, factor: float) -> "Flow":
        """Multiplies the bytes by `factor`."""
        return Flow(tuple(factor * a for a in self.sent), tuple(factor * a for a in self.received), self.hops)

    @property
    def reversed(self) -> "Flow":
        """Sends the same bytes on their way back."""
        return Flow(self.received, self.sent, self.hops)

    @property
    def is_empty(self) -> bool:
        """Tells whether no byte travels."""
        return not any(a.any() for a in self.sent)


def flow(rank_bytes: RankBytes, cluster: Cluster) -> Flow:
    """Computes the flow of what every rank sends to every other.

    Args:
        rank_bytes: `[R, R]`, bytes from rank to rank; what a rank keeps, on the diagonal, travels nowhere.
        cluster: the links.
    """
    sides = []
    for matrix in (rank_bytes, rank_bytes.T):
        inside = [_inside(matrix, size) for size in cluster.inner]
        last = len(inside) - 1
        # The innermost level carries what stays inside the next outer member, another one all that leaves its members.
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
    """Computes the flow if all ranks send and receive the same.

    Args:
        rank_bytes: for each level the bytes that one rank sends to ranks which differ from it there, and not further
            out.
        cluster: the links.
    """
    loads, last = [], len(rank_bytes) - 1
    for at, (level, inner) in enumerate(zip(cluster.levels, cluster.inner, strict=True)):
        # Bytes for another member of an outer level leave by the links of this one as well.
        passing = rank_bytes[last] if at == last else sum(rank_bytes[: at + 1])
        loads.append(np.full((1, 1), passing * inner / level.links))
    return Flow(tuple(loads), tuple(loads))


def all_to_all(rank_bytes: float, sizes: tuple[int, ...], cluster: Cluster) -> Flow:
    """Computes the flow if every rank spreads its bytes evenly over a group, itself included.

    Args:
        rank_bytes: the bytes of one rank.
        sizes: members of the group at each level: all of a level's, or one for each of its expert domains.
        cluster: the links.
    """
    left, by_level = rank_bytes, []
    for size in sizes:
        # What stays inside a member is what the next level spreads.
        by_level.append(left * (size - 1) / size)
        left /= size
    return even_flow(tuple(by_level), cluster)


def seconds(flow: Flow, cluster: Cluster, *, messages: int = 1, copy_engine: bool = False) -> float:
    """Computes what a stage takes at least: the time of its busiest link, and the latency of its hops.

    Args:
        flow: the bytes on links.
        cluster: rates and latencies.
        messages: how often the latency is paid, one message after the other.
        copy_engine: whether the copy engines' rate limits a rank as well.
    """
    return busy_s(flow, cluster, copy_engine=copy_engine) + messages * latency_s(flow, cluster)


def busy_s(flow: Flow, cluster: Cluster, *, copy_engine: bool = False) -> float:
    """Computes the time of the busiest link.

    Args:
        flow: the bytes on links.
        cluster: the rates.
        copy_engine: whether the copy engines' rate limits a rank as well.
    """
    return max(level_seconds(flow, cluster, copy_engine=copy_engine))


def level_seconds(flow: Flow, cluster: Cluster, *, copy_engine: bool = False) -> tuple[float, ...]:
    """Computes the time of the busiest link of each level; levels work side by side.

    Args:
        flow: the bytes on links.
        cluster: the rates.
        copy_engine: whether the copy engines' rate limits a rank as well.
    """
    times = []
    for at, level in enumerate(cluster.levels):
        most = max(flow.sent[at].max(initial=0), flow.received[at].max(initial=0))
        rate = level.bytes_per_s
        if copy_engine and cluster.copy_bytes_per_s is not None:
            rate = min(rate, cluster.copy_bytes_per_s * cluster.inner[at] / level.links)
        times.append(float(most) / rate)
    return tuple(times)


def latency_s(flow: Flow, cluster: Cluster) -> float:
    """Computes the latency of one message of a flow: of the slowest level that it crosses, or of its hops in a row.

    Args:
        flow: the bytes on links, and their hops.
        cluster: the latencies.
    """
    latencies = [level.latency_s for level in cluster.levels]
    if flow.hops:
        return math.fsum(hops * latency for hops, latency in zip(flow.hops, latencies, strict=True))
    used = (sent.any() or received.any() for sent, received in zip(flow.sent, flow.received, strict=True))
    return max((latency for latency, is_used in zip(latencies, used, strict=True) if is_used), default=0.0)


def level_bytes(flow: Flow, cluster: Cluster) -> tuple[float, ...]:
    """Sums up what all links of each level send together, in bytes."""
    totals = []
    for sent, level, inner in zip(flow.sent, cluster.levels, cluster.inner, strict=True):
        num_links = cluster.num_ranks // inner * level.links
        # An even flow has one entry for all links.
        totals.append(float(sent.sum()) * num_links / sent.size)
    return tuple(totals)


def _inside(matrix: RankBytes, size: int) -> Num[np.ndarray, "R"]:
    """Sums up what each rank sends to ranks of its own block of `size`, itself included."""
    blocks = len(matrix) // size
    own = np.einsum("bibj->bi", matrix.reshape(blocks, size, blocks, size))
    return own.reshape(-1)


def _on_links(rank_bytes: Num[np.ndarray, "R"], cluster: Cluster, at: int) -> PerLink:
    """Sums the bytes of ranks by the link that each of them uses at a level."""
    # Neighbours share a link: rank `i` of a member has link `i // (ranks per link)`.
    links = cluster.levels[at].links
    return rank_bytes.reshape(-1, links, cluster.inner[at] // links).sum(2)


MessageSizes = tuple[int, ...]
"""The members of a group at each level, outermost first."""


def all_gather(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Computes the flows of an all-gather.

    Args:
        num_bytes: what each rank has of it.
        sizes: the members of a group at each level.
        cluster: the links, and the algorithm.
    """
    ranks, way = math.prod(sizes), cluster.communication.collectives
    if ranks == 1:
        return ()
    if way == Collective.DIRECT:
        return (all_to_all(num_bytes * ranks, sizes, cluster),)
    if way == Collective.RING:
        return (_ring(num_bytes * (ranks - 1), sizes, _ring_hops(sizes), cluster),)
    flows, held = [], num_bytes
    for at, size in enumerate(sizes):
        # From the outermost level inwards: so a piece crosses outer links once for each member there.
        if size > 1:
            hops = size - 1 if way == Collective.HIERARCHICAL else _doublings(size)
            flows.append(_at_level(held * (size - 1), at, hops, cluster))
            held *= size
    return tuple(flows)


def reduce_scatter(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Computes the flows of a reduce-scatter: those of an all-gather, the other way round.

    Args:
        num_bytes: what each rank has of the sum at the end.
        sizes: the members of a group at each level.
        cluster: the links, and the algorithm.
    """
    return tuple(flow.reversed for flow in reversed(all_gather(num_bytes, sizes, cluster)))


def all_reduce(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Computes the flows of a sum that every rank gets.

    Args:
        num_bytes: the bytes of the sum.
        sizes: the members of a group at each level.
        cluster: the links, and the algorithm.
    """
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
    """Counts the steps of an exchange by pairs, each at the outermost level at which its pairs differ.

    Args:
        sizes: the members of a group at each level.
    """
    return tuple((size - 1) * math.prod(sizes[at + 1 :]) for at, size in enumerate(sizes))


def _ring(passed_on: float, sizes: MessageSizes, hops: tuple[int, ...], cluster: Cluster) -> Flow:
    """Puts on links what each rank passes on to the next one; rings start at every rank, so that all links carry it."""
    ranks, by_level, outside = math.prod(sizes), [], 0
    for at in range(len(sizes)):
        members = math.prod(sizes[: at + 1])
        crossing = members if members > 1 else 0
        # Where the ring leaves a member of an outer level it leaves one of this level too, and counts there.
        by_level.append(passed_on * (crossing - outside) / ranks)
        outside = crossing
    return replace(even_flow(tuple(by_level), cluster), hops=hops)


def _ring_hops(sizes: MessageSizes) -> tuple[int, ...]:
    members = [math.prod(sizes[: at + 1]) for at in range(len(sizes))]
    return tuple(mine - outer for mine, outer in zip(members, [1, *members], strict=False))


def _double_tree(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> Flow:
    """Every rank but the root sends to its parent and hears from it, in two trees with half of the bytes each."""
    ranks = math.prod(sizes)
    by_level = tuple(2 * num_bytes * edges / ranks for edges in _ring_hops(sizes))
    return replace(even_flow(by_level, cluster), hops=tuple(2 * _doublings(size) for size in sizes))


def _at_level(rank_bytes: float, at: int, hops: int, cluster: Cluster) -> Flow:
    levels = range(len(cluster.levels))
    flow = even_flow(tuple(rank_bytes if level == at else 0.0 for level in levels), cluster)
    return replace(flow, hops=tuple(hops if level == at else 0 for level in levels))


def _doublings(size: int) -> int:
    """Rounds the logarithm up, in integers."""
    return (size - 1).bit_length()
