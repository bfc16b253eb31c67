"""Work of one layer under a `System`: bytes on links and rows in slots, from the system's own plans.

Two functions serve machines too large for counts of shape `[R, E]`. `uniform_work` assumes that every rank sends the
same number of token copies to every expert. Plain expert parallelism is then balanced, and one rank stands for all. For
even counts it equals `layer_work`, without sampling or extrapolation.

`sampled_work` simulates some of the outermost members, few enough for planners. The sample gives rows of slots, bytes
to other members, and weights moved in a domain. The whole machine gives the exchange of counts and addresses, gathers
of expert domains, and memory. With fewer members, fewer tokens leave their member; a factor corrects this. The sample
represents a machine whose parts are equally popular; the worst of a thousand members may be worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Num

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.plan import Plan, replica_copies
from jax_moe_lb.core.topology import Topology, home_experts_per_rank
from jax_moe_lb.core.types import Counts, State
from jax_moe_lb.layer.plan_on_host import plan_groups
from jax_moe_lb.layer.systems import System
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.hbm import (
    arriving_bytes,
    empty_row_bytes,
    joins_weights,
    summed_in_loop,
)
from jax_moe_lb.sim.limits import MOST_PLANNED_RANKS
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.network import Flow, MessageSizes, all_gather, all_to_all, even_flow, flow, pair_hops, with_messages
from jax_moe_lb.sim.padded import (
    PaddedHop,
    TurnRows,
    exchange_hops,
    padded_replicas,
    replicas_by_slot,
    rounds_by_share,
    rounds_in_phases,
    rounds_of_copies,
)
from jax_moe_lb.sim.planner_times import needs_counts, planning_s
from jax_moe_lb.transport.cost import TransportCost
from jax_moe_lb.transport.direct import Direct
from jax_moe_lb.transport.dispatch import Dispatch
from jax_moe_lb.transport.wave_rows import EvenRouting, RowsBetween, WaveRows, rows_of_groups

ERROR_WORDS = 4
"""Number of integers with the router's error code, sent beside each rank's counts; see `layer.moe.count`."""


ExpertMatrix = Int[np.ndarray, "R R"]
"""Number of experts from rank (row) to rank (column), int64."""


def replicas_between(plan: Plan) -> ExpertMatrix:
    """Count the experts whose weights each rank copies to each rank, from the home or from the plan's relay."""
    return replica_copies(plan).sum(2)


def gradients_between(plan: Plan) -> ExpertMatrix:
    """Count the gradients of replicas that each rank sends to each home; relays do not forward gradients."""
    return replica_copies(plan, from_home=True).sum(2).T


def rows_per_slot(plan: Plan) -> Int[np.ndarray, "R S"]:
    """Count the rows served by each slot."""
    # The -1 of an empty slot is read as expert 0, and its rows are then masked.
    rows = plan.quota[np.maximum(plan.placement, 0), np.arange(plan.num_ranks)[:, None]]
    return np.where(plan.placement >= 0, rows, 0)


def groups(cluster: Cluster, sizes: tuple[int, ...]) -> list[Int[np.ndarray, "G"]]:
    """Return the ranks of all groups that exchange tokens: those of equal offset in expert domains of some sizes."""
    levels = [level.size for level in cluster.levels]
    ranks = np.arange(cluster.num_ranks).reshape(
        [n for size, s in zip(levels, sizes, strict=True) for n in (size // s, s)]
    )
    depth = len(levels)
    # Split every level into domains and offsets; offsets come first, so that ranks of equal offset are adjacent.
    return list(ranks.transpose(*range(1, 2 * depth, 2), *range(0, 2 * depth, 2)).reshape(math.prod(sizes), -1))


def between_all(
    found: Sequence[Int[np.ndarray, "G"]], matrices: Sequence[Num[np.ndarray, "G G"]]
) -> Num[np.ndarray, "R R"]:
    """Return the matrix over the cluster's ranks with the matrices of all groups, 0 between groups."""
    # A single group is the whole cluster in the same order, so no copy is needed.
    if len(found) == 1:
        return matrices[0]
    ranks, blocks = np.stack(found), np.stack(matrices)
    whole = np.zeros((ranks.size,) * 2, blocks.dtype)
    whole[ranks[:, :, None], ranks[:, None]] = blocks
    return whole


class RowBytes(NamedTuple):
    """Bytes of a row in each exchange."""

    out: float = 1.0  # token copy, sent to its expert
    back: float = 1.0  # output of the expert, returned
    gradients_out: float = 1.0  # gradient of the output, sent to the expert
    gradients_back: float = 1.0  # gradient of the token copy, returned


@dataclass(frozen=True)
class Wave:
    """Token copies served together."""

    dispatch: tuple[Flow, ...]  # exchanges that bring the copies to their ranks, in sequence
    rows: Num[np.ndarray, "R S"]  # rows of each slot of each rank; a single row of slots if all ranks have the same
    rounds: int  # number of fills of the receive buffer; 1 is usual under a good plan
    widths: RowBytes  # bytes of a row; those of `dispatch` are `widths.out`
    # Mean rows that a rank gathers: for every exchange, and for the products if the received rows are tokens
    gathered: float
    early: int = 0  # number of first exchanges that need no plan; 0 by default
    chunks: tuple[int, int] = (1, 1)  # exchanges per hop, on the way out and back; see `TransportCost.chunks_of_hops`
    # Exchanges of the outputs with the bytes of rows on the way out, in sequence; `()` (default) if they are those of
    # `dispatch` in the opposite direction
    returning: tuple[Flow, ...] = ()
    # Rows in turns that all ranks end together; None (default) if no rank waits for others
    turns: TurnRows | None = None
    empty: Num[np.ndarray, "R"] | float = 0.0  # rows of all fills without a token copy; 0 by default, if unknown

    @cached_property
    def back(self) -> tuple[Flow, ...]:
        """Exchanges that return outputs to the ranks of the tokens."""
        return self._returned(self.widths.back)

    @cached_property
    def gradients_back(self) -> tuple[Flow, ...]:
        """Exchanges that return the gradients of tokens to the ranks."""
        return self._returned(self.widths.gradients_back)

    def gradients_out(self, copies: int) -> tuple[Flow, ...]:
        """Return the exchanges that send gradients of outputs to the experts' ranks, and token copies again."""
        return self._gradients_out[copies]

    @cached_property
    def _gradients_out(self) -> tuple[tuple[Flow, ...], ...]:
        factors = (copies + self.widths.gradients_out / self.widths.out for copies in (0, 1))
        return tuple(tuple(flow.times(factor) for flow in self.dispatch) for factor in factors)

    def _returned(self, row_bytes: float) -> tuple[Flow, ...]:
        flows = self.returning or tuple(flow.reversed for flow in reversed(self.dispatch))
        return tuple(flow.times(row_bytes / self.widths.out) for flow in flows)


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer in one microbatch, as input of `Scheduler`."""

    # Exchanges that gather experts in expert domains, level by level, after the all-reduce of the shared expert, if
    # any. They do not depend on counts.
    gather: tuple[Flow, ...]
    gather_home: tuple[Flow, ...]  # exchanges that return the gradients of gathered experts to their homes
    gather_again: bool  # if True, the backward pass gathers again; see `Migration`
    counts: tuple[Flow, ...]  # exchanges of the all-gather of counts
    address: Flow  # exchange of the addresses of rows between ranks; it waits for the plan
    planner_s: float = 0.0  # seconds from counts to plan; 0 if the placement does not depend on the load
    replicate: Flow | None = None  # exchange that copies weights into slots, or None without replicas
    # Exchange that returns the gradients of replicas to their homes, or None without replicas
    return_home: Flow | None = None
    joins: bool = False  # if True, weights of replicas and home experts are concatenated into one array
    arriving: float = 0.0  # bytes that a rank reads and writes in its memory, at most, for the gradients of replicas
    engine: bool = False  # if True, copy engines copy the weights, on a stream of their own
    early: bool = False  # if True, weights travel before counts are known, as the placement does not depend on them
    waves: tuple[Wave, ...] = ()  # waves of tokens, in order. The first of two waves needs no plan.
    # If True, the second wave's rows come from the homes of their experts, and their outputs return there; see
    # `TransportCost.passes_home`
    passes_home: bool = False

    @property
    def load(self) -> Int[np.ndarray, "R"]:
        """Token copies served by each rank."""
        # Under uniform routing, the rows of a slot are a fraction.
        return np.rint(np.sum([wave.rows.sum(1) for wave in self.waves], 0)).astype(np.int64)

    @property
    def rounds(self) -> int:
        """Number of fills of the receive buffer."""
        # In two phases, moved rows are already in the buffer of their home.
        return self.waves[0].rounds if self.passes_home else sum(wave.rounds for wave in self.waves)


def layer_work(
    system: System,
    model: ModelShape,
    cluster: Cluster,
    counts: Counts,
    migration: Migration = Migration(),
    states: list[State] | None = None,
) -> tuple[LayerWork, list[State]]:
    """Compute the work of one layer under a system, from its own plans."""
    # `simulate` calls it for every layer. Call it directly to inspect flows and rows without times.
    found = groups(cluster, migration.sizes(cluster))
    topology, num_home = cluster.topology(migration.group_sizes(cluster)), counts.shape[1] // len(found[0])
    system = system.limit_slots(counts.shape[1], num_home)
    system = replace(system, balancer=system.balancer.sized(layer_facts(system, model, cluster)))
    planned = plan_groups(system, [counts[ranks] for ranks in found], topology, num_home, states)
    waves = [rows_of_groups(wave, model.per_token) for wave in zip(*(one.waves for one in planned), strict=True)]
    plans, joins = [one.plan for one in planned], joins_weights(system, model, cluster)
    weights, gradients = _replica_flows(plans, found, model, cluster)
    work = replace(
        shared_work(model, cluster, migration, counts.shape[1], system.dispatch),
        planner_s=_planner_s(system, cluster, planned[0].plan),
        replicate=None if weights.is_empty else weights,
        return_home=None if gradients.is_empty else gradients,
        joins=joins,
        arriving=max(_arriving(gradients_between(plan), plan.slots * joins, model) for plan in plans),
        engine=system.replicate.uses_copy_engines and not cluster.communication.padded,
        early=not needs_counts(system.balancer),
        waves=_waves(system.dispatch, model, cluster, topology, found, waves),
        passes_home=system.dispatch.cost().passes_home,
    )
    return work, [one.state for one in planned]


def layer_facts(system: System, model: ModelShape, cluster: Cluster) -> LayerCost:
    """Return the sizes of a layer, with the time between layers and the rows of all rounds of a rank."""
    buffers = system.dispatch.buffers
    most = buffers.max_rounds
    max_rows = None if most is None else most * buffers.rows(model.tokens * model.per_token)
    return replace(
        model.facts,
        between_s=model.before_experts_s(cluster),
        slot_copies=round(cluster.gemm.slot_rows),
        max_rows=max_rows,
        round_rows=buffers.rows(model.tokens * model.per_token),
        round_s=_round_s(system, model, cluster),
        relays=system.replicate.relay_options,
    )


def _round_s(system: System, model: ModelShape, cluster: Cluster) -> float:
    """Return the seconds of a further round in training, beyond the products; see `Scheduler`."""
    if cluster.hbm_bytes_per_s is None:
        return cluster.round_s
    rows, copies = system.dispatch.cost().row_arrays(model.tokens, model.per_token, cluster.topology()), model.tokens
    slots = model.experts // cluster.num_ranks + system.replica_slots
    summed = summed_in_loop(float(slots * model.expert_bytes), model)
    permuted = 3 * 2 * rows.gathered(float(copies * model.per_token)) * model.row_bytes
    empty = rows.computed * empty_row_bytes(model, 3)
    return cluster.round_s + (summed + permuted + empty) / cluster.hbm_bytes_per_s


class _WaveOfGroup(NamedTuple):
    """Rows of a wave of one group; the hops have the padding and the turns if exchanges are padded."""

    hops: tuple[RowsBetween, ...]  # between the ranks
    rows: np.ndarray  # by slot
    rounds: int
    padded: tuple[PaddedHop, ...] = ()
    turns: TurnRows | None = None


def _waves_of_group(
    cost: TransportCost, topology: Topology, waves: tuple[WaveRows, ...], num_copies: int, padded: bool
) -> list[_WaveOfGroup]:
    found: list[_WaveOfGroup] = []
    for at, wave in enumerate(waves):
        plan = wave.plan
        # The second phase has as many rounds as the first.
        rounds = found[0].rounds if found and cost.passes_home else cost.rounds(wave, topology, num_copies)
        if cost.passes_home and at == 0:
            # The rows of the second wave are not served at home.
            plan = replace(plan, quota=plan.quota - sum(later.counts.T for later in waves[1:]))
        found.append(_WaveOfGroup(cost.hops(wave, topology), rows_per_slot(plan), rounds))
    return _with_padding(found, waves, cost, num_copies) if padded else found


def _with_padding(
    parts: list[_WaveOfGroup], waves: tuple[WaveRows, ...], cost: TransportCost, num_copies: int
) -> list[_WaveOfGroup]:
    """Return the waves of a group with the exchanges as padded permutes."""
    room = cost.buffers.rows(num_copies)
    if cost.passes_home:
        first, second = waves
        moves = second.counts.any(0)
        home, _ = rounds_of_copies(first, room, moves)
        rounds = rounds_in_phases(first.plan, second.plan, moves, room)
        # The rows of a round move on from one buffer to another.
        hop = PaddedHop.of(rounds.between, room, cost.buffer_rows(num_copies) - room)
        return [
            parts[0]._replace(padded=(PaddedHop.of(home, num_copies, room),), turns=rounds.staying),
            parts[1]._replace(padded=(hop,), turns=rounds.moved),
        ]
    found = []
    for part, wave in zip(parts, waves, strict=True):
        rows, turns = [rounds_by_share(hop, room) for hop in part.hops], None
        if len(part.hops) == 1 and not cost.once_per_member:
            rows[0], turns = rounds_of_copies(wave, room)
        found.append(part._replace(padded=tuple(PaddedHop.of(hop, num_copies, room) for hop in rows), turns=turns))
    return found


def _planner_s(system: System, cluster: Cluster, plan: Plan) -> float:
    """Return the seconds from counts to plan."""
    # Without counts, the placement is fixed before the layer, so no planning time is needed.
    if not needs_counts(system.balancer):
        return 0.0
    if cluster.planner_s is not None:
        return cluster.planner_s
    return planning_s(system.balancer, plan.num_ranks, plan.domain, plan.num_experts, cluster.host_wait_s)


def widths_of(model: ModelShape, cluster: Cluster, dispatch: Dispatch) -> RowBytes:
    """Return the bytes of a row in each exchange."""
    plainly = float(model.row_bytes)
    forward = plainly if dispatch.transfer is None else float(dispatch.transfer.row_bytes(model.hidden))
    out, back = cluster.communication.dispatch_bytes, cluster.communication.combine_bytes
    outward = (forward, plainly) if out is None else (model.hidden * out,) * 2
    # Partial sums return unquantized.
    returned = plainly if dispatch.cost().once_per_member else forward
    inward = (returned, plainly) if back is None else (model.hidden * back,) * 2
    # Tokens travel with their choices, and gradients of tokens return with those of the weights.
    beside = dispatch.cost().choice_bytes(model.per_token)
    return RowBytes(outward[0] + beside, inward[0], outward[1], inward[1] + beside / 2)


def _on_links(
    found: Sequence[Int[np.ndarray, "G"]], matrices: Sequence[RowsBetween], num_bytes: float, cluster: Cluster
) -> Flow:
    # Groups have disjoint ranks and rows, and share links.
    return flow(between_all(found, matrices) * num_bytes, cluster)


def _waves(
    dispatch: Dispatch,
    model: ModelShape,
    cluster: Cluster,
    topology: Topology,
    found: list[Int[np.ndarray, "G"]],
    by_wave: list[list[WaveRows]],
) -> tuple[Wave, ...]:
    cost, widths, padded = dispatch.cost(), widths_of(model, cluster, dispatch), cluster.communication.padded
    arrays, num_copies = cost.row_arrays(model.tokens, model.per_token, topology), model.tokens * model.per_token
    by_group = [_waves_of_group(cost, topology, waves, num_copies, padded) for waves in zip(*by_wave, strict=True)]
    waves = []
    for parts in zip(*by_group, strict=True):
        rows = np.zeros((cluster.num_ranks, parts[0].rows.shape[1]), np.int64)
        for ranks, part in zip(found, parts, strict=True):
            rows[ranks] = part.rows
        # Groups share links, so the layer lasts as long as the group with the most rounds.
        rounds = max(part.rounds for part in parts)
        gathered = float(np.mean([arrays.gathered(float(part.rows.sum()) / len(part.rows)) for part in parts]))
        empty = 0.0 if cost.passes_home else np.maximum(rounds * arrays.computed - rows.sum(1), 0)
        wave = Wave((), rows, rounds, widths, gathered, cost.early_hops, cost.chunks_of_hops(), empty=empty)
        if padded:
            waves.append(_padded_wave(wave, found, parts, cluster))
            continue
        hops = [_on_links(found, hop, widths.out, cluster) for hop in zip(*(part.hops for part in parts), strict=True)]
        sizes = tuple(level.size for level in topology.levels)
        exchanges = tuple(exchanged(hop, sizes, cluster, by_level=cost.by_level) for hop in hops)
        waves.append(replace(wave, dispatch=exchanges))
    return tuple(waves)


def _replica_flows(
    plans: list[Plan], found: list[Int[np.ndarray, "G"]], model: ModelShape, cluster: Cluster
) -> tuple[Flow, Flow]:
    """Return the exchange of replicas and the one of the gradients on the way home."""
    expert_bytes = float(model.expert_bytes)
    if not cluster.communication.padded:
        weights = _on_links(found, list(map(replicas_between, plans)), expert_bytes, cluster)
        return weights, _on_links(found, list(map(gradients_between, plans)), expert_bytes, cluster)
    # A permute is one operation of all groups, as long as the largest pair of any group needs.
    hop = padded_replicas(np.max(list(map(replicas_by_slot, plans)), 0), plans[0].num_home, plans[0].domain)
    ways = ((hop.out, hop.permutes_out), (hop.back, hop.permutes_back))
    weights, gradients = (
        with_messages(
            _on_links(found, [experts] * len(plans), expert_bytes, cluster),
            exchange_hops(cluster.num_ranks, permutes, 1),
        )
        for experts, permutes in ways
    )
    return weights, gradients


def _arriving(gradients: np.ndarray, joined_slots: int, model: ModelShape) -> float:
    """Return the bytes for the gradients of replicas in the memory of the busiest rank."""
    ranks = zip(gradients.sum(1), gradients.sum(0), strict=True)
    return max(arriving_bytes(int(sent), int(arriving), joined_slots, model) for sent, arriving in ranks)


def _padded_wave(
    wave: Wave, found: list[Int[np.ndarray, "G"]], parts: tuple[_WaveOfGroup, ...], cluster: Cluster
) -> Wave:
    """Return a wave with the exchanges and turns of all groups, whose permutes are operations of all ranks."""
    hops = list(zip(*(part.padded for part in parts), strict=True))

    def exchange(matrices: list[RowsBetween], permutes: int) -> Flow:
        # A permute is between the halves of a group, or inside both of them.
        sent = replace(_on_links(found, matrices, wave.widths.out, cluster), in_turn=True)
        return with_messages(sent, exchange_hops(cluster.num_ranks, permutes, wave.rounds))

    out = [exchange([one.out for one in hop], max(one.permutes_out for one in hop)) for hop in hops]
    back = [exchange([one.back for one in hop], max(one.permutes_back for one in hop)) for hop in reversed(hops)]
    of_ranks = [(ranks, part.turns) for ranks, part in zip(found, parts, strict=True) if part.turns is not None]
    turns = None
    if of_ranks:
        turns = np.zeros((max(len(one) for _, one in of_ranks), *wave.rows.shape), np.int64)
        for ranks, one in of_ranks:
            turns[: len(one), ranks] = one
    return replace(wave, dispatch=tuple(out), returning=tuple(back), turns=turns)


def shared_work(
    model: ModelShape, cluster: Cluster, migration: Migration, num_experts: int, dispatch: Dispatch
) -> LayerWork:
    """Compute the work that does not depend on the load: gathers, and the exchanges of counts and addresses."""
    inside = migration.group_sizes(cluster)
    members, num_home = math.prod(inside), num_experts // cluster.num_ranks
    travelling = float(model.encoded_bytes(migration.codec, num_home))
    returning = float(model.encoded_bytes(migration.codec.of_gradients, num_home) * migration.gradients_home)
    # int32 has 4 bytes.
    counts = all_gather(4.0 * (num_experts + ERROR_WORDS), inside, cluster)
    address = exchanged(all_to_all(float(members * dispatch.cost().address_bytes), inside, cluster), inside, cluster)
    gather, gather_home = migration.gather(travelling, cluster), migration.gather_home(returning, cluster)
    if cluster.communication.padded:
        # An all-gather is one operation, and addresses follow from the counts.
        hops = exchange_hops(cluster.num_ranks, 0, 1)
        counts, address = tuple(with_messages(one, hops) for one in counts), address.times(0.0)
        # A level of two members takes two permutes for each weight array, or for all encoded ones.
        permutes = 2 * (1 if migration.codec.compresses else model.matrices)
        hops = exchange_hops(cluster.num_ranks, permutes, 1)
        gather, gather_home = (tuple(with_messages(one, hops) for one in way) for way in (gather, gather_home))
    return LayerWork(
        gather=(*migration.mean(model, cluster), *gather),
        gather_home=gather_home,
        gather_again=migration.gather_again,
        counts=counts,
        address=address,
    )


def exchanged(tokens: Flow, inside: MessageSizes, cluster: Cluster, *, by_level: bool = False) -> Flow:
    """Return the flow of an exchange between the ranks of a group, with the hops."""
    if by_level:
        # Less than a byte is a rounding error of a difference of sums.
        used = [max(sent.max(), got.max()) >= 1 for sent, got in zip(tokens.sent, tokens.received, strict=True)]
        sent, received = (
            tuple(one if is_used else np.zeros_like(one) for one, is_used in zip(side, used, strict=True))
            for side in (tokens.sent, tokens.received)
        )
        tokens = replace(tokens, sent=sent, received=received)
        inside = tuple(size if is_used else 1 for size, is_used in zip(inside, used, strict=True))
    return replace(tokens, hops=pair_hops(inside)) if cluster.communication.by_pairs else tokens


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
    if cost.passes_home:
        raise ValueError(f"dispatch is {type(dispatch).__name__}; expected one without a second phase, such as Direct")
    hops = cost.even_hops(EvenRouting(model.experts, model.per_token, model.tokens), inside)
    flows = (even_flow(tuple(widths.out * rows for rows in hop), cluster) for hop in hops)
    exchanges = tuple(exchanged(one, inside, cluster, by_level=cost.by_level) for one in flows)
    gathered = cost.row_arrays(model.tokens, model.per_token, cluster.topology(inside)).gathered(float(copies))
    rows = np.full((1, held), copies / held)
    wave = Wave(exchanges, rows, 1, widths, gathered, cost.early_hops, cost.chunks_of_hops())
    shared = shared_work(model, cluster, migration, model.experts, dispatch)
    return replace(shared, waves=(wave,))


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


def sampled_model(model: ModelShape, cluster: Cluster, sample: Cluster) -> ModelShape:
    """Return the model of a sample: as many home experts per rank as in the whole machine, and the whole router."""
    experts = model.experts // cluster.num_ranks * sample.num_ranks
    return replace(model, experts=experts, pre_expert_s=model.before_experts_s(cluster))


def sampled_work(
    system: System, model: ModelShape, cluster: Cluster, sample: Cluster, counts: Counts, migration: Migration
) -> LayerWork:
    """Compute the work of one layer of the whole machine, with the plan of a sample."""
    size = migration.sizes(cluster)[0]
    if size == sample.levels[0].size:
        raise ValueError(f"domain_sizes is {migration.domain_sizes}; expected fewer than the {size} of the sample")
    planned, _ = layer_work(system, sampled_model(model, cluster, sample), sample, counts, migration)
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
