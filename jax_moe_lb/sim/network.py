"""A flow says how many bytes every link carries, and `seconds` how long they take.

A byte from one rank to another passes by links of the outermost level at which the two differ, at both ends, and by
those of every level inside that one but the innermost: to leave its datacenter it must leave its node. The innermost
level is the fabric between neighbours, which nothing else uses. A rank sends and receives on its own link of those that
its node or datacenter has: the one of its offset.

Links are fluid: all bytes of a stage share them at once, whatever their order. So a stage takes the time of its busiest
link, and one latency. That is a lower bound which a good schedule comes near to; congestion inside switches, protocols
and unfair shares are not modelled.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Num

from jax_moe_lb.sim.cluster import Cluster

PerLink = Num[np.ndarray, "_ _"]
RankBytes = Num[np.ndarray, "R R"]


@dataclass(frozen=True)
class Flow:
    """A flow has the bytes of one stage on every link of every level.

    Args:
        sent: for each level `[members, links]`, the bytes that each link of each member sends; `[1, 1]` where all links
            carry the same.
        received: for each level the bytes that each link receives, in the same shape.
    """

    sent: tuple[PerLink, ...]
    received: tuple[PerLink, ...]

    def __add__(self, other: "Flow") -> "Flow":
        """Adds the bytes of two flows that share the links."""
        sent = tuple(a + b for a, b in zip(self.sent, other.sent, strict=True))
        return Flow(sent, tuple(a + b for a, b in zip(self.received, other.received, strict=True)))

    def times(self, factor: float) -> "Flow":
        """Multiplies the bytes by `factor`."""
        return Flow(tuple(factor * a for a in self.sent), tuple(factor * a for a in self.received))

    @property
    def reversed(self) -> "Flow":
        """Sends the same bytes on their way back."""
        return Flow(self.received, self.sent)

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
    return Flow(*sides)


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


def all_reduce(num_bytes: float, cluster: Cluster) -> Flow:
    """Computes the flow of a sum over all ranks, on a ring in their order, which enters and leaves every member once.

    Args:
        num_bytes: the bytes of the sum.
        cluster: the links.
    """
    passed_on = 2 * num_bytes * (cluster.num_ranks - 1) / cluster.num_ranks
    by_level, outside = [], 0
    for inner in cluster.inner:
        members = cluster.num_ranks // inner
        crossing = members if members > 1 else 0
        # Where the ring leaves a member of an outer level it leaves one of this level too, and counts there.
        by_level.append(passed_on * (crossing - outside) / cluster.num_ranks)
        outside = crossing
    return even_flow(tuple(by_level), cluster)


def seconds(flow: Flow, cluster: Cluster, *, messages: int = 1, copy_engine: bool = False) -> float:
    """Computes what a stage takes at least: the time of its busiest link, and of the slowest latency that it crosses.

    Args:
        flow: the bytes on links.
        cluster: rates and latencies.
        messages: how often the latency is paid, one message after the other.
        copy_engine: whether the copy engines' rate limits a rank as well.
    """
    busy = latency = 0.0
    for at, level in enumerate(cluster.levels):
        most = max(flow.sent[at].max(initial=0), flow.received[at].max(initial=0))
        if most:
            rate = level.bytes_per_s
            if copy_engine and cluster.copy_bytes_per_s is not None:
                rate = min(rate, cluster.copy_bytes_per_s * cluster.inner[at] / level.links)
            # Levels work side by side, and so do their latencies.
            busy, latency = max(busy, float(most) / rate), max(latency, level.latency_s)
    return busy + messages * latency


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
