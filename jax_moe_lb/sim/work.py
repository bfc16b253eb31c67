"""`layer_work` says what one layer does, in bytes on links and rows in slots, out of the plans of a `System`."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.core.plan import Plan, load, rows_between
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import (
    Flow,
    MessageSizes,
    all_gather,
    all_reduce,
    all_to_all,
    flow,
    pair_hops,
    reduce_scatter,
)
from jax_moe_lb.sim.traffic import (
    Group,
    copies_to,
    forwarded,
    gradients_between,
    groups,
    plan_layer,
    replicas_between,
    rows_by_expert,
    rows_per_slot,
    tokens_to,
)
from jax_moe_lb.transport.compression import Codec
from jax_moe_lb.transport.dispatch import Dispatch

ERROR_WORDS = 4
"""The number of integers that travel with each rank's counts and say what its router got wrong: `pipeline.count`."""


@dataclass(frozen=True)
class Migration:
    """Describes HybridEP's gather of experts inside expert domains, before tokens are known
    (`transport/expert_domains.py`).

    Give it to `simulate` to have experts travel where links are slow; the default gathers nothing.

    Args:
        domain_sizes: `S` of every level, outermost first; `()`: no gather, plain expert parallelism.
            `choose_expert_domains` models which are fastest.
        codec: what travels of an expert; all of it by default.
        gather_again: whether the backward pass gathers again, instead of having kept the experts.
        gradients_home: whether gradients of gathered experts return to their homes, as in this library. HybridEP's
            paper counts no such bytes.
        mean_travels: whether the shared expert that `codec` needs is summed over all ranks before every gather, as in
            this library. HybridEP's paper does that beside the backward pass and does not count it.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> cluster = Cluster((Links("dc", 4, 1.25e9), Links("gpu", 8, 100e9)))
        >>> Migration(domain_sizes=(2, 1)).sizes(cluster), Migration().sizes(cluster)
        ((2, 1), (1, 1))
    """

    domain_sizes: tuple[int, ...] = ()
    codec: Codec = field(default_factory=Codec)
    gather_again: bool = False
    gradients_home: bool = True
    mean_travels: bool = True

    def sizes(self, cluster: Cluster) -> tuple[int, ...]:
        """Returns the size of an expert domain at every level of the cluster, outermost first.

        Args:
            cluster: the machine.

        Raises:
            ValueError: `domain_sizes` has another number of levels, or no divisors of their sizes.
        """
        sizes = self.domain_sizes or (1,) * len(cluster.levels)
        members = tuple(level.size for level in cluster.levels)
        if len(sizes) != len(members) or any(s < 1 or size % s for s, size in zip(sizes, members, strict=True)):
            raise ValueError(f"domain_sizes is {sizes}; expected a divisor of each of the levels' sizes {members}")
        return sizes

    def gathered_bytes(self, model: ModelShape, cluster: Cluster) -> int:
        """Returns the bytes of the experts that a rank holds beyond its home experts, in each layer.

        Args:
            model: the sizes of the layer.
            cluster: the machine.
        """
        others = math.prod(self.sizes(cluster)) - 1
        return model.experts // cluster.num_ranks * others * model.expert_bytes


class RowBytes(NamedTuple):
    """Has the bytes of a row on its ways.

    Args:
        out: of a token copy to its expert.
        back: of what its expert puts out.
        gradients_out: of the gradient of that, to the expert.
        gradients_back: of the gradient of the token.
    """

    out: float = 1.0
    back: float = 1.0
    gradients_out: float = 1.0
    gradients_back: float = 1.0


@dataclass(frozen=True)
class Wave:
    """Holds token copies that are served together.

    Args:
        dispatch: the exchanges that bring them to their ranks, one after the other.
        rows: `[R, S]`, the rows of each slot of each rank; one line where all ranks have the same.
        rounds: how often the receive buffer is filled; 1 is usual under a good plan.
        widths: the bytes of a row; those of `dispatch` are `widths.out`.
    """

    dispatch: tuple[Flow, ...]
    rows: Num[np.ndarray, "R S"]
    rounds: int
    widths: RowBytes

    @property
    def back(self) -> tuple[Flow, ...]:
        """Returns the exchanges that bring outputs to where their tokens came from."""
        return self._returned(self.widths.back)

    @property
    def gradients_back(self) -> tuple[Flow, ...]:
        """Returns the exchanges that bring the gradients of tokens to where these came from."""
        return self._returned(self.widths.gradients_back)

    def gradients_out(self, copies: int) -> tuple[Flow, ...]:
        """Returns the exchanges that bring the gradients of outputs to their ranks, and copies of the tokens again.

        Args:
            copies: how often these are sent again.
        """
        factor = copies + self.widths.gradients_out / self.widths.out
        return tuple(flow.times(factor) for flow in self.dispatch)

    def _returned(self, row_bytes: float) -> tuple[Flow, ...]:
        return tuple(flow.reversed.times(row_bytes / self.widths.out) for flow in reversed(self.dispatch))


@dataclass(frozen=True)
class LayerWork:
    """Holds what one layer does in one microbatch; `Scheduler` puts it on a timeline.

    Args:
        gather: the exchanges that gather experts in expert domains, level by level, after the all-reduce of the shared
            expert where there is one; they need no counts.
        gather_home: the exchanges that bring the gradients of gathered experts home.
        gather_again: whether the backward pass gathers again; see `Migration`.
        counts: the exchanges of the all-gather of the counts.
        address: the exchange in which ranks say where their rows are; it waits for the plan.
        planner_s: the time from counts to plan, in seconds; 0 where the placement does not depend on the load.
        replicate: the exchange that copies weights into slots; `None` where there are no replicas.
        return_home: the exchange that brings the gradients of replicas home; `None` where there are none.
        joins: whether weights of replicas are put into one array with those of home experts.
        engine: whether weights are copied by copy engines, which have a stream of their own.
        early: whether weights travel before counts are known, as the placement does not depend on them.
        waves: the waves of tokens, in order. With two, the first needs no plan.
        passes_home: whether the second wave's rows come from the homes of their experts, and their outputs return
            there; see `TransportCost.passes_home`.
        num_home: `L`, the home experts of a rank, which have its first slots.
        load: `[R]`, the token copies that each rank serves.
    """

    gather: tuple[Flow, ...]
    gather_home: tuple[Flow, ...]
    gather_again: bool
    counts: tuple[Flow, ...]
    address: Flow
    planner_s: float
    replicate: Flow | None
    return_home: Flow | None
    joins: bool
    engine: bool
    early: bool
    waves: tuple[Wave, ...]
    passes_home: bool
    num_home: int
    load: Int[np.ndarray, "R"]

    @property
    def rounds(self) -> int:
        """Counts how often the receive buffer is filled."""
        # Rows that go on from home are in it already.
        return self.waves[0].rounds if self.passes_home else sum(wave.rounds for wave in self.waves)


def layer_work(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    counts: Counts,
    migration: Migration = Migration(),
    states: list[State] | None = None,
) -> tuple[LayerWork, list[State]]:
    """Computes the work of one layer under a system, from its own plans.

    `simulate` calls it for every layer; call it yourself to look at flows and rows without a clock.

    Args:
        system: the strategies.
        model: the sizes of rows and experts.
        cluster: the ranks and their links.
        counts: `[R, E]` int32, the token copies that each rank of the cluster routes to each expert, experts by home.
        migration: which experts are gathered before; none by default.
        states: what the balancer remembers, one state per group; `None` before the first step.

    Returns:
        The work, and the new states.
    """
    sizes = migration.sizes(cluster)
    system = replace(system, balancer=system.balancer.sized(model.facts))
    parts, after = [], []
    found = groups(cluster, sizes)
    for group, state in zip(found, states or [None] * len(found), strict=True):
        mine = counts[group.ranks]
        state = system.balancer.init(mine.shape) if state is None else state
        plan, waves, state = plan_layer(system, group, mine, counts.shape[1] // len(group.ranks), state)
        parts.append(_part(system, model, group, mine, plan, waves))
        after.append(state)
    return _merged(system, model, cluster, migration, counts, parts), after


@dataclass(frozen=True)
class _Part:
    """Holds the work of one group of ranks, in matrices over the cluster's ranks."""

    ranks: Int[np.ndarray, "R"]
    waves: list[tuple[tuple[np.ndarray, ...], np.ndarray, int]]
    weights: np.ndarray
    gradients: np.ndarray
    load: Int[np.ndarray, "R"]


def _part(
    system: System, model: ModelShape, group: Group, counts: Counts, plan: Plan, waves: list[tuple[Counts, Plan]]
) -> _Part:
    topology, load_after = group.cluster.topology(group.sizes), np.zeros(len(group.ranks), np.int64)
    cost = system.dispatch.cost()
    moved: list[tuple[tuple[np.ndarray, ...], np.ndarray, int]] = []
    for at, (wave_counts, wave_plan) in enumerate(waves):
        # In 64 bits, because these rows times their bytes exceed 32.
        rows = rows_between(wave_counts, wave_plan).astype(np.int64)
        matrices = cost.hops(rows, wave_plan, topology)
        if group.cluster.communication.by_level:
            matrices = _by_level(matrices, model, group, counts, wave_counts, wave_plan)
        # As many rounds as there are at home.
        rounds = moved[0][2] if moved and cost.passes_home else _rounds(system, model, wave_plan)
        if cost.passes_home and at == 0:
            # What is at home for the second wave is not served in this one.
            wave_plan = replace(wave_plan, quota=wave_plan.quota - sum(later.T for later, _ in waves[1:]))
        moved.append((tuple(map(group.spread, matrices)), rows_per_slot(wave_plan), rounds))
        load_after += load(wave_plan)
    weights, gradients = group.spread(replicas_between(plan)), group.spread(gradients_between(plan))
    return _Part(group.ranks, moved, weights, gradients, load_after)


def _by_level(
    matrices: tuple[np.ndarray, ...], model: ModelShape, group: Group, counts: Counts, wave_counts: Counts, plan: Plan
) -> tuple[np.ndarray, ...]:
    """Sends what hops have level by level, and tokens of a dispatch of one hop once where that is wanted."""
    # The hops of rails have another rank in the middle, to which each copy goes for itself.
    if group.cluster.communication.once_per_member and len(matrices) == 1:
        reach = tokens_to(rows_by_expert(wave_counts, plan), counts, model.per_token, group.sizes)
        return (forwarded(reach, group.sizes),)
    return tuple(forwarded(copies_to(matrix, group.sizes), group.sizes) for matrix in matrices)


def widths_of(model: ModelShape, cluster: Cluster, dispatch: Dispatch) -> RowBytes:
    """Returns the bytes of a row on its ways.

    Args:
        model: its width, and its own bytes of a number.
        cluster: its communication may say otherwise.
        dispatch: its transfer, which gradients do not take.
    """
    plainly = float(model.row_bytes)
    forward = plainly if dispatch.transfer is None else float(dispatch.transfer.row_bytes(model.hidden))
    out, back = cluster.communication.dispatch_bytes, cluster.communication.combine_bytes
    outward = (forward, plainly) if out is None else (model.hidden * out,) * 2
    inward = (forward, plainly) if back is None else (model.hidden * back,) * 2
    return RowBytes(outward[0], inward[0], outward[1], inward[1])


def _rounds(system: System, model: ModelShape, plan: Plan) -> int:
    # Rounded up, in integers.
    return -(-int(load(plan).max()) // receive_capacity(system, model))


def receive_capacity(system: System, model: ModelShape) -> int:
    """Returns `A`, the rows that a rank can receive in one round.

    Args:
        system: its dispatch sets the buffers.
        model: its tokens and choices say how many copies a rank has.
    """
    return system.dispatch.buffers.rows(model.tokens * model.per_token)


def _merged(
    system: System, model: ModelShape, cluster: Cluster, migration: Migration, counts: Counts, parts: list[_Part]
) -> LayerWork:
    inside = tuple(level.size // size for level, size in zip(cluster.levels, migration.sizes(cluster), strict=True))

    widths = widths_of(model, cluster, system.dispatch)

    def on_links(matrices: Any, num_bytes: float) -> Flow:
        return flow(sum(matrices) * num_bytes, cluster)

    waves = []
    for at, (matrices, rows, _) in enumerate(parts[0].waves):
        # Groups have different ranks, so their lines are disjoint; on links what they send adds up.
        by_rank = np.zeros((cluster.num_ranks, rows.shape[1]), np.int64)
        for part in parts:
            by_rank[part.ranks] = part.waves[at][1]
        hops = [on_links((p.waves[at][0][hop] for p in parts), widths.out) for hop in range(len(matrices))]
        dispatch = [exchanged(hop, inside, cluster) for hop in hops]
        # One number stands for all groups: they share links, so a layer lasts as long as its busiest group.
        rounds = max(part.waves[at][2] for part in parts)
        waves.append(Wave(tuple(dispatch), by_rank, rounds, widths))
    loads = np.zeros(cluster.num_ranks, np.int64)
    for part in parts:
        loads[part.ranks] = part.load
    weights = on_links((part.weights for part in parts), float(model.expert_bytes))
    gradients = on_links((part.gradients for part in parts), float(model.expert_gradient_bytes))
    return replace(
        shared_work(model, cluster, migration, counts.shape[1], system.dispatch),
        # A placement that does not depend on the load is there before tokens are: nothing is planned in the layer.
        planner_s=cluster.planner_s if system.balancer.needs_counts else 0.0,
        replicate=None if weights.is_empty else weights,
        return_home=None if gradients.is_empty else gradients,
        joins=system.needs_contiguous_weights,
        engine=system.replicate.uses_copy_engines,
        early=not system.balancer.needs_counts,
        waves=tuple(waves),
        passes_home=system.dispatch.cost().passes_home,
        num_home=counts.shape[1] // len(parts[0].ranks),
        load=loads,
    )


def shared_work(
    model: ModelShape, cluster: Cluster, migration: Migration, num_experts: int, dispatch: Dispatch
) -> LayerWork:
    """Computes the work that does not depend on the load: gathers, and the exchanges of counts and addresses.

    Args:
        model: the sizes of rows and experts.
        cluster: the ranks and their links.
        migration: which experts are gathered before.
        num_experts: `E`.
        dispatch: it says how much a rank tells every other of where its rows are.

    Returns:
        Work without waves, planner or replicas, which the caller puts in.
    """
    sizes = migration.sizes(cluster)
    inside = tuple(level.size // size for level, size in zip(cluster.levels, sizes, strict=True))
    members, num_home = math.prod(inside), num_experts // cluster.num_ranks
    travelling = float(model.encoded_bytes(migration.codec, num_home))
    returning = float(num_home * model.expert_gradient_bytes * migration.gradients_home)
    return LayerWork(
        gather=(*_mean(model, migration, cluster), *_gather(travelling, sizes, cluster)),
        gather_home=_home(returning, sizes, cluster),
        gather_again=migration.gather_again,
        # Integers have 4 bytes.
        counts=all_gather(4.0 * (num_experts + ERROR_WORDS), inside, cluster),
        address=exchanged(all_to_all(float(members * dispatch.cost().address_bytes), inside, cluster), inside, cluster),
        planner_s=0.0,
        replicate=None,
        return_home=None,
        joins=False,
        engine=False,
        early=False,
        waves=(),
        passes_home=False,
        num_home=num_home,
        load=np.zeros(1, np.int64),
    )


def _mean(model: ModelShape, migration: Migration, cluster: Cluster) -> tuple[Flow, ...]:
    """Returns the all-reduce of the shared expert, which a codec needs to encode experts as differences from it."""
    wanted = migration.codec.shares and migration.mean_travels and math.prod(migration.sizes(cluster)) > 1
    everyone = tuple(level.size for level in cluster.levels)
    return all_reduce(float(model.expert_bytes), everyone, cluster) if wanted else ()


def _gather(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Gathers from the outermost level inwards; each level forwards what the outer ones brought.

    So every expert crosses the slow outer links once for each domain member there, and not once for each rank.
    """
    # `transport/expert_domains.py` has one all-gather for each level, whatever the algorithm.
    held = [num_bytes * math.prod(sizes[:at]) for at in range(len(sizes))]
    return tuple(one for at, each in enumerate(held) for one in all_gather(each, _one_level(sizes, at), cluster))


def _home(num_bytes: float, sizes: MessageSizes, cluster: Cluster) -> tuple[Flow, ...]:
    """Sums the gradients of gathered experts at home, level by level from the innermost."""
    if not num_bytes:
        return ()
    held = [num_bytes * math.prod(sizes[:at]) for at in range(len(sizes))]
    levels = reversed(list(enumerate(held)))
    return tuple(one for at, each in levels for one in reduce_scatter(each, _one_level(sizes, at), cluster))


def _one_level(sizes: MessageSizes, at: int) -> MessageSizes:
    return tuple(size if level == at else 1 for level, size in enumerate(sizes))


def exchanged(tokens: Flow, inside: MessageSizes, cluster: Cluster) -> Flow:
    """Returns the flow of an exchange between the ranks of a group, with the hops that it has.

    Args:
        tokens: the bytes on links.
        inside: the members of a group at each level.
        cluster: how its exchanges go.
    """
    how = cluster.communication
    if how.by_level:
        # The levels that it uses follow each other.
        used = (sent.any() or received.any() for sent, received in zip(tokens.sent, tokens.received, strict=True))
        pairs = [size - 1 if how.by_pairs else 1 for size in inside]
        return replace(tokens, hops=tuple(hops if is_used else 0 for hops, is_used in zip(pairs, used, strict=True)))
    return replace(tokens, hops=pair_hops(inside)) if how.by_pairs else tokens
