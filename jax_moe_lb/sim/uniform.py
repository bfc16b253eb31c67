"""`uniform_work` makes a layer whose routing is uniform, for clusters whose `[R, E]` counts nobody could hold.

It assumes that every rank sends the same number of token copies to every expert, so that plain expert parallelism is
level and no balancer has anything to do. Then all ranks do the same, all links of a level carry the same, and
one rank stands for all: arrays have one entry. Levels are exchanged as they are in `work.py`, whose result for even
counts this equals. Nothing is sampled, nothing extrapolated.
"""

from dataclasses import replace

import numpy as np

from jax_moe_lb.checks import home_experts_per_rank
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.forwarding import share_in_member
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import Flow, all_to_all, even_flow
from jax_moe_lb.sim.work import LayerWork, Migration, Wave, exchanged, shared_work, widths_of
from jax_moe_lb.transport.direct import Direct


def uniform_work(model: ModelShape, cluster: Cluster, migration: Migration = Migration()) -> LayerWork:
    """Computes the work of a layer under uniform routing, of plain expert parallelism or, with a migration, HybridEP.

    Args:
        model: the sizes of the layer.
        cluster: the machine.
        migration: the expert domains in which experts are gathered; none by default.

    Raises:
        ValueError: the experts are no multiple of the ranks, or ranks differ by jitter.
    """
    if cluster.jitter:
        raise ValueError(f"Cluster.jitter is {cluster.jitter}; expected 0 where one rank stands for all")
    home_experts_per_rank(model.experts, cluster.num_ranks, "model")
    inside = tuple(level.size // size for level, size in zip(cluster.levels, migration.sizes(cluster), strict=True))
    copies = model.tokens * model.per_token
    # Members of an expert domain hold each other's experts, so a rank serves those of its whole domain.
    held = model.experts // int(np.prod(inside))
    widths = widths_of(model, cluster, Direct())
    tokens = _by_level if cluster.communication.by_level else _straight
    dispatch = exchanged(tokens(model, inside, cluster).times(widths.out), inside, cluster)
    wave = Wave((dispatch,), np.full((1, held), copies / held), 1, widths)
    shared = shared_work(model, cluster, migration, model.experts, Direct())
    return replace(shared, waves=(wave,), load=np.array([copies]))


def _straight(model: ModelShape, inside: tuple[int, ...], cluster: Cluster) -> Flow:
    """Returns the token copies on links, each on its way to its rank."""
    return all_to_all(float(model.tokens * model.per_token), inside, cluster)


def _by_level(model: ModelShape, inside: tuple[int, ...], cluster: Cluster) -> Flow:
    """Returns what is on links if tokens go level by level."""
    by_level, outer = [], 1
    for size in inside:
        members = outer * size
        # Of each rank of its offset in other members a rank sends on what is for their neighbours here.
        share = model.per_token / members
        if cluster.communication.once_per_member:
            share = share_in_member(model.experts, model.per_token, members)
        by_level.append(outer * (size - 1) * model.tokens * share)
        outer = members
    return even_flow(tuple(by_level), cluster)
