"""Fastest choices for a model on a cluster, with their uncertainty and break-even point.

`other_sizes` varies the inputs of the search: the number of ranks sharing the experts, and tokens per rank. Fewer ranks
share the experts if the machine has several expert-parallel groups. Tokens then stay nearer and loads are more even. In
return, each rank holds more experts, whose gradients are summed over the groups. All groups have the same routing, so
only one is simulated, with the counts of its own ranks. Times are per layer and token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.advise.choice import Candidate, Choice, with_memory
from jax_moe_lb.advise.evaluate import Evaluator, Workload, permute_to_homes
from jax_moe_lb.advise.fit import fits_in_memory, groups_of, needs
from jax_moe_lb.advise.search import SearchResult, SearchResults, Space, search
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.migration import Migration
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.run import keeps_history, remembered, simulate
from jax_moe_lb.sim.stream_model import Work, choose_expert_domains
from jax_moe_lb.transport.compression import Codec

FACTORS = (0.5, 1, 2, 4)
"""Tested multiples of the tokens per rank."""

MOST_CHOICES = 3
"""Number of choices tested per size, beside plain."""


@dataclass(frozen=True)
class Size:
    """Number of ranks and tokens, with the fastest choice for them."""

    ranks: int  # number of ranks sharing the experts
    tokens: int  # tokens of a rank per microbatch
    choice: Choice  # fastest choice that fits into memory; fastest of all if none fits
    token_s: float  # seconds of one layer per token of a rank, median over the workloads
    total_bytes: float  # memory of a rank, in bytes
    refused: str | None  # required and available memory if it does not fit; None if it fits or the memory is unknown


def other_sizes(judge: Evaluator, choices: Sequence[Choice], workloads: Sequence[Workload]) -> list[Size]:
    """Evaluate other degrees of expert parallelism and microbatch sizes."""
    tried = list(dict.fromkeys([*[one for one in choices if not one.domain_sizes][:MOST_CHOICES], Choice()]))
    found = []
    for cluster in groups_of(judge.cluster):
        for factor in FACTORS:
            tokens = int(judge.model.tokens * factor)
            # Planners count the copies of a layer in int32.
            if 0 < tokens * judge.model.per_token * cluster.num_ranks <= INT32_MAX:
                found.append(_size(judge, cluster, tokens, tried, workloads))
    return sorted(found, key=lambda size: (size.refused is not None, size.token_s))


def _size(
    judge: Evaluator, cluster: Cluster, tokens: int, tried: Sequence[Choice], workloads: Sequence[Workload]
) -> Size:
    model = judge.model
    here = Evaluator(model.with_tokens(tokens), cluster, judge.step)
    loads = [workload.first_layer(cluster.num_ranks, tokens / model.tokens) for workload in workloads]
    fitting = [choice for choice in tried if fits_in_memory(here, choice)]
    times_s = {c: float(np.median([here.glance(c, load) for load in loads])) for c in fitting or tried}
    best = min(times_s, key=lambda choice: times_s[choice])
    token_s = (times_s[best] + sum_s(judge, cluster)) / tokens
    refused = None if fitting else needs(here, best)
    return Size(cluster.num_ranks, tokens, best, token_s, here.memory(best).total, refused)


def sum_s(judge: Evaluator, group: Cluster) -> float:
    """Compute the exposed seconds to sum one layer's gradients over parallel groups."""
    groups, total_s, held = judge.cluster.num_ranks // group.num_ranks, 0.0, 1
    if groups == 1 or not judge.step.backward:
        return 0.0
    num_bytes = judge.model.experts // group.num_ranks * judge.model.expert_gradient_bytes
    # Reduce-scatter and all-gather level by level from the inside; each level sums the shards of its inner levels.
    pairs = list(zip(judge.cluster.levels, group.levels, judge.cluster.inner, strict=True))
    for level, inside, inner in reversed(pairs):
        members = level.size // inside.size
        if members > 1:
            rate = level.bytes_per_s * level.links / inner
            total_s += 2 * (members - 1) / members * num_bytes / held / rate + 2 * (members - 1) * level.latency_s
            held *= members
    return total_s


SWEPT_TOKENS = tuple(2**power for power in range(4, 18))
"""Numbers of tokens per rank tried by `pays_from`."""

WORTH_IT = 0.01
"""Minimum gain, as a fraction of the step, to recommend a system other than plain."""

UNIFORM = Workload("uniform", None)
"""Workload of uniform routing, for machines with too many ranks to plan."""


@dataclass(frozen=True)
class Advice:
    """Recommended choices, with their gain over plain expert parallelism."""

    found: SearchResults  # results of the search without compression, so that values do not change
    # Best choices with compressed experts, if requested. They change the computed values, so they are never `best`.
    compressed: tuple[SearchResult, ...]
    # Minimum tokens per rank from which the best choice is faster than plain. None if it is at none of the tried sizes,
    # or if the best choice is plain.
    pays_from: int | None
    # Other degrees of expert parallelism and microbatch sizes, each with its fastest choice, as returned by
    # `other_sizes`. Empty if the counts are unknown.
    sizes: tuple[Size, ...] = ()

    @property
    def best(self) -> SearchResult:
        """Fastest result; the simplest of equally fast ones."""
        return self.found.outcomes[0]

    @property
    def plain(self) -> SearchResult:
        """Result of plain expert parallelism, the baseline."""
        return next(one for one in self.found.outcomes if one.choice == Choice())

    @property
    def gains(self) -> tuple[float, ...]:
        """Fraction of plain's step saved by the best choice, per workload."""
        return tuple(1 - ratio for ratio in self.best.ratios(self.plain))

    @property
    def gain(self) -> float:
        """Median of `gains`."""
        return float(np.median(self.gains))

    @property
    def leave_off(self) -> bool:
        """True if plain fits and suffices: the gain is too small, or plain is faster by as much on some workload."""
        return self.found.fits and (self.gain < WORTH_IT or min(self.gains) < -WORTH_IT)

    @property
    def alike(self) -> tuple[SearchResult, ...]:
        """Other results that these workloads cannot distinguish from the best: the range of their ratios includes 1."""
        others = (one for one in self.found.outcomes[1:] if one.choice not in self.found.refused)
        return tuple(one for one in others if one.is_like(self.best))


def advise(
    judge: Evaluator,
    space: Space,
    shapes: Sequence[Workload],
    workloads: Sequence[Workload],
    ratio: float = 1.0,
) -> Advice:
    """Search for the fastest choices on some workloads."""
    found, compressed = search(space, judge, shapes, workloads), list[SearchResult]()
    if ratio > 1:
        others = search(replace(space, ratio=ratio), judge, shapes, workloads)
        compressed = [one for one in others.outcomes if one.choice.ratio > 1]
    best, where = found.outcomes[0], None
    # Other sizes and token numbers need the counts of all ranks.
    counted = workloads[0].counts is not None and judge.sample is None
    sizes = other_sizes(judge, [one.choice for one in found.outcomes], shapes) if counted else []
    if best.choice != Choice() and counted:
        pair = judge.candidate(best.choice), judge.candidate(Choice())
        where = pays_from(*pair, judge.model, judge.cluster, workloads[0], judge.step)
    return Advice(found, tuple(compressed), where, tuple(sizes))


def chosen_migration(model: ModelShape, cluster: Cluster, codec: Codec, step: Step) -> Migration:
    """Choose HybridEP's expert domains with `choose_expert_domains`."""
    # The backward pass gathers again if the gathered experts of all layers would take more than half of a rank's
    # memory.
    pre_expert_s, home = model.before_experts_s(cluster), model.experts // cluster.num_ranks
    work = Work(
        token_bytes=float(model.tokens * model.per_token * model.row_bytes),
        expert_bytes=float(model.encoded_bytes(codec, home)),
        pre_expert_s=pre_expert_s,
        gradient_bytes=float(model.encoded_bytes(codec.of_gradients, home)) if step.backward else 0.0,
        backward_s=2 * pre_expert_s,
        backward_exchanges=3 if step.recompute else 2,
    )
    sizes = choose_expert_domains(work, cluster.topology()).domain_sizes
    return with_memory(Migration(sizes, codec), model, cluster, step)


def pays_from(
    candidate: Candidate, baseline: Candidate, model: ModelShape, cluster: Cluster, workload: Workload, step: Step
) -> int | None:
    """Find the minimum tokens per rank, a power of two, from which `candidate` stays faster than `baseline`."""
    # It scales the routing of the workload and of the steps before it in proportion, and simulates one layer.
    found: int | None = None
    routed = [(one, permute_to_homes(workload, one, cluster)[0].astype(np.float64)) for one in (candidate, baseline)]
    before = workload.first_layer().before if keeps_history(candidate.system, model, cluster) else None
    # Iterate from the largest size down, so that the result stays faster at all larger sizes.
    for tokens in reversed(SWEPT_TOKENS):
        scaled = replace(model.with_tokens(tokens), layers=1)
        # Rounding changes each entry by at most one token, so the skew remains.
        wanted = [np.rint(counts * (tokens / model.tokens)) for _, counts in routed]
        # With very many ranks, the largest sizes exceed the planners' int32 counts.
        if wanted[0].sum() > INT32_MAX:
            continue
        steps = () if before is None else np.rint(before * (tokens / model.tokens)).astype(np.int32)
        states = remembered(candidate.system, scaled, cluster, steps), None
        times = [
            simulate(one.system, scaled, cluster, c.astype(np.int32), migration=one.migration, step=step, states=s)
            for (one, _), c, s in zip(routed, wanted, states, strict=True)
        ]
        if times[0].step_s >= times[1].step_s:
            break
        found = tokens
    return found
