"""Collectives as flows: how many bytes every link carries, and how many hops follow each other at every level.

A ring of `P` ranks passes every piece on `P - 1` times. What it pays is the latencies of those hops: as the ring goes
through one member of a level after the other, as many of them cross an outer level as it has members, less one. NCCL's
own choice of algorithms counts them so (`src/graph/tuning.cc`), and its trees by the logarithm of the nodes. A function
returns flows that follow each other. All ranks of the cluster take part, in groups of `sizes` members at each level.
"""

import math
from dataclasses import replace

from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.communication import Collective
from jax_moe_lb.sim.network import Flow, all_to_all, even_flow

Sizes = tuple[int, ...]
"""The members of a group at each level, outermost first."""


def all_gather(num_bytes: float, sizes: Sizes, cluster: Cluster) -> tuple[Flow, ...]:
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


def reduce_scatter(num_bytes: float, sizes: Sizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Computes the flows of a reduce-scatter: those of an all-gather, the other way round.

    Args:
        num_bytes: what each rank has of the sum at the end.
        sizes: the members of a group at each level.
        cluster: the links, and the algorithm.
    """
    return tuple(flow.reversed for flow in reversed(all_gather(num_bytes, sizes, cluster)))


def all_reduce(num_bytes: float, sizes: Sizes, cluster: Cluster) -> tuple[Flow, ...]:
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


def pair_hops(sizes: Sizes) -> tuple[int, ...]:
    """Counts the steps of an exchange by pairs, each at the outermost level at which its pairs differ.

    Args:
        sizes: the members of a group at each level.
    """
    return tuple((size - 1) * math.prod(sizes[at + 1 :]) for at, size in enumerate(sizes))


def _ring(passed_on: float, sizes: Sizes, hops: tuple[int, ...], cluster: Cluster) -> Flow:
    """Puts on links what each rank passes on to the next one; rings start at every rank, so that all links carry it."""
    ranks, by_level, outside = math.prod(sizes), [], 0
    for at in range(len(sizes)):
        members = math.prod(sizes[: at + 1])
        crossing = members if members > 1 else 0
        # Where the ring leaves a member of an outer level it leaves one of this level too, and counts there.
        by_level.append(passed_on * (crossing - outside) / ranks)
        outside = crossing
    return replace(even_flow(tuple(by_level), cluster), hops=hops)


def _ring_hops(sizes: Sizes) -> tuple[int, ...]:
    members = [math.prod(sizes[: at + 1]) for at in range(len(sizes))]
    return tuple(mine - outer for mine, outer in zip(members, [1, *members], strict=False))


def _double_tree(num_bytes: float, sizes: Sizes, cluster: Cluster) -> Flow:
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
