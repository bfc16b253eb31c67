"""Layers of machines too large for counts of shape `[R, E]`.

`uniform_work` assumes that every rank sends the same number of token copies to every expert. Plain expert parallelism
is then balanced, all ranks behave the same, and one rank stands for all. Exchanges over the levels follow `work.py`,
whose result for even counts is equal. It needs no sampling or extrapolation.

`sampled_work` simulates some of the outermost members, few enough for planners. The sample gives rows of slots, bytes
to other members, and weights moved in a domain. The whole machine gives the exchange of counts and addresses, gathers
of expert domains, and memory. With fewer members, fewer tokens leave their member; a factor corrects this. The sample
represents a machine whose parts are equally popular; the worst of a thousand members may be worse.
"""

from dataclasses import replace

import numpy as np

from jax_moe_lb.core.topology import home_experts_per_rank
from jax_moe_lb.core.types import Counts
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.limits import MOST_PLANNED_RANKS
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import Flow, even_flow
from jax_moe_lb.sim.work import LayerWork, Wave, exchanged, layer_work, shared_work, widths_of
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.wave_rows import EvenRouting


def uniform_work(
    model: ModelShape, cluster: Cluster, migration: Migration = Migration(), dispatch: Dispatch = Direct()
) -> LayerWork:
    """Compute the work of a layer under uniform routing: plain expert parallelism or, with a migration, HybridEP."""
    if cluster.jitter:
        raise ValueError(f"Cluster.jitter is {cluster.jitter}; expected 0, as one rank stands for all")
    home_experts_per_rank(model.experts, cluster.num_ranks, "model")
    inside = migration.group_sizes(cluster)
    copies = model.tokens * model.per_token
    # Members of an expert domain hold each other's experts, so a rank serves those of its whole domain.
    held = model.experts // int(np.prod(inside))
    widths, cost = widths_of(model, cluster, dispatch), dispatch.cost()
    hops = cost.even_hops(EvenRouting(model.experts, model.per_token, model.tokens), inside)
    flows = (even_flow(tuple(widths.out * rows for rows in hop), cluster) for hop in hops)
    exchanges = tuple(exchanged(one, inside, cluster, by_level=cost.by_level) for one in flows)
    gathered = cost.row_arrays(model.tokens, model.per_token, cluster.topology(inside)).gathered(float(copies))
    rows = np.full((1, held), copies / held)
    wave = Wave(exchanges, rows, 1, widths, gathered, cost.early_hops, cost.chunks_of_hops())
    shared = shared_work(model, cluster, migration, model.experts, dispatch)
    return replace(shared, waves=(wave,), load=np.array([copies]))


def sample_of(cluster: Cluster, most_ranks: int = MOST_PLANNED_RANKS) -> Cluster | None:
    """Return a machine with fewer outermost members of equal size, or None if no sample represents the whole."""
    # Among the divisors of the number of members within the limit, it takes the one with the most divisors of its own.
    # This allows expert domains of many sizes.
    outer, most = cluster.levels[0], most_ranks // cluster.inner[0]
    sizes = [size for size in range(2, most + 1) if outer.size % size == 0]
    # If weights move between the outermost members, a sample would have smaller domains.
    if not sizes or cluster.ranks_per_domain > cluster.inner[0]:
        return None
    best = max(sizes, key=lambda size: (sum(size % part == 0 for part in range(1, size + 1)), size))
    return replace(cluster, levels=(replace(outer, size=best), *cluster.levels[1:]))


def experts_of(model: ModelShape, cluster: Cluster, sample: Cluster) -> int:
    """Count the experts at home in a sample: as many per rank as in the whole machine."""
    return model.experts // cluster.num_ranks * sample.num_ranks


def sampled_work(
    system: System, model: ModelShape, cluster: Cluster, sample: Cluster, counts: Counts, migration: Migration
) -> LayerWork:
    """Compute the work of one layer of the whole machine, with the plan of a sample."""
    size = migration.sizes(cluster)[0]
    if size == sample.levels[0].size:
        raise ValueError(f"domain_sizes is {migration.domain_sizes}; expected fewer than the {size} of the sample")
    part = replace(model, experts=counts.shape[1])
    planned, _ = layer_work(system, part, sample, counts, migration)
    whole = shared_work(model, cluster, migration, model.experts, system.dispatch)
    inside = migration.group_sizes(cluster)
    leaves = _leaves(inside[0]) / _leaves(sample.levels[0].size // size)
    by_level = system.dispatch.cost().by_level
    return replace(
        planned,
        gather=whole.gather,
        gather_home=whole.gather_home,
        counts=whole.counts,
        address=whole.address,
        waves=tuple(_more_outside(wave, leaves, inside, cluster, by_level) for wave in planned.waves),
    )


def _leaves(members: int) -> float:
    """Return the share of evenly spread rows sent to other members."""
    return (members - 1) / members


def _more_outside(wave: Wave, factor: float, inside: tuple[int, ...], cluster: Cluster, by_level: bool) -> Wave:
    def more(flow: Flow) -> Flow:
        sides = ((side[0] * factor, *side[1:]) for side in (flow.sent, flow.received))
        sent, received = sides
        # The whole machine has more pairs, hence more hops.
        return exchanged(replace(flow, sent=sent, received=received), inside, cluster, by_level=by_level)

    return replace(wave, dispatch=tuple(map(more, wave.dispatch)))
