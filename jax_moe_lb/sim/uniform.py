"""Layers of machines that are too large for counts of shape `[R, E]`.

`uniform_work` assumes that every rank sends the same number of token copies to every expert. Plain expert parallelism
is then balanced, all ranks do the same, and one rank stands for all. Levels are exchanged as in `work.py`, whose result
for even counts this equals. It samples and extrapolates nothing.

`sampled_work` simulates some of the outermost members, for which systems can plan. Rows of slots, bytes to other
members and weights that move in a domain come from the sample. The exchange of counts and addresses, gathers of expert
domains and memory come from the whole machine. A token leaves its member less often with fewer members; this is
corrected. The sample stands for a machine whose parts are equally popular, and the worst of a thousand members may be
worse.
"""

from dataclasses import replace

import numpy as np

from jax_moe_lb.core.topology import home_experts_per_rank
from jax_moe_lb.core.types import Counts
from jax_moe_lb.layer.systems import System
from jax_moe_lb.recordings.yaml_file import MOST_PLANNED_RANKS
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import Flow, all_to_all, even_flow
from jax_moe_lb.sim.traffic import share_in_member
from jax_moe_lb.sim.work import LayerWork, Migration, Wave, exchanged, layer_work, shared_work, widths_of
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


def sample_of(cluster: Cluster, most_ranks: int = MOST_PLANNED_RANKS) -> Cluster | None:
    """Returns a machine of fewer outermost members, of equal size; `None` where that says nothing about the whole.

    Of the divisors of their number that are small enough it takes the one with the most divisors itself, so that expert
    domains of many sizes can be tried.

    Args:
        cluster: the machine.
        most_ranks: how many ranks the sample has at most.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> whole = Cluster((Links("dc", 1000, 1e9), Links("gpu", 8, 1e11)))
        >>> sample_of(whole).levels[0].size, sample_of(Cluster((Links("gpu", 1000, 1e9),)))
        (20, None)
    """
    outer, most = cluster.levels[0], most_ranks // cluster.inner[0]
    sizes = [size for size in range(2, most + 1) if outer.size % size == 0]
    # Where weights move between the outermost members a sample would have smaller domains.
    if not sizes or cluster.ranks_per_domain > cluster.inner[0]:
        return None
    best = max(sizes, key=lambda size: (sum(size % part == 0 for part in range(1, size + 1)), size))
    return replace(cluster, levels=(replace(outer, size=best), *cluster.levels[1:]))


def experts_of(model: ModelShape, cluster: Cluster, sample: Cluster) -> int:
    """Counts the experts whose homes are in a sample: as many for each rank as in the whole.

    Args:
        model: the sizes of the layers on the whole machine.
        cluster: the whole machine.
        sample: what `sample_of` returned.
    """
    return model.experts // cluster.num_ranks * sample.num_ranks


def sampled_work(
    system: System, model: ModelShape, cluster: Cluster, sample: Cluster, counts: Counts, migration: Migration
) -> LayerWork:
    """Computes the work of one layer of the whole machine, with the plan of a sample.

    Args:
        system: the strategies.
        model: the sizes of rows and experts, on the whole machine.
        cluster: the whole machine.
        sample: what `sample_of` returned.
        counts: `[R, E]` int32 of the sample.
        migration: which experts are gathered before; the sizes of its domains divide both machines' levels.

    Raises:
        ValueError: the sample is one expert domain, so that nobody in it exchanges what ranks of the whole do.
    """
    size = migration.sizes(cluster)[0]
    if size == sample.levels[0].size:
        raise ValueError(f"domain_sizes is {migration.domain_sizes}; expected fewer than the {size} of the sample")
    part = replace(model, experts=counts.shape[1])
    planned, _ = layer_work(system, part, sample, counts, migration)
    whole = shared_work(model, cluster, migration, model.experts, system.dispatch)
    inside = tuple(
        level.size // members for level, members in zip(cluster.levels, migration.sizes(cluster), strict=True)
    )
    leaves = _leaves(inside[0]) / _leaves(sample.levels[0].size // size)
    return replace(
        planned,
        gather=whole.gather,
        gather_home=whole.gather_home,
        counts=whole.counts,
        address=whole.address,
        waves=tuple(_more_outside(wave, leaves, inside, cluster) for wave in planned.waves),
    )


def _leaves(members: int) -> float:
    """Returns the part of evenly spread rows that go to other members."""
    return (members - 1) / members


def _more_outside(wave: Wave, factor: float, inside: tuple[int, ...], cluster: Cluster) -> Wave:
    def more(flow: Flow) -> Flow:
        sides = ((side[0] * factor, *side[1:]) for side in (flow.sent, flow.received))
        sent, received = sides
        # As many pairs follow each other as the whole machine has.
        return exchanged(replace(flow, sent=sent, received=received), inside, cluster)

    return replace(wave, dispatch=tuple(map(more, wave.dispatch)))
