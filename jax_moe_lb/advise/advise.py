"""`advise`: the fastest choices for a model on a cluster, with their uncertainty and break-even point.

`other_sizes` varies the inputs of the search: the number of ranks that share the experts, and tokens per rank. Fewer
ranks share the experts if the machine has several expert-parallel groups. Tokens then stay nearer and loads are more
even, but each rank holds more experts, whose gradients are summed over the groups. All groups route alike, so one is
simulated, with the counts of its own ranks. Times are those of one layer per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.advise.choice import Candidate, Choice, with_memory
from jax_moe_lb.advise.evaluate import Evaluator, Workload, permute_to_homes
from jax_moe_lb.advise.search import SearchResult, SearchResults, Space, fits_in_memory, needs, search
from jax_moe_lb.core.topology import INT32_MAX
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape, Step
from jax_moe_lb.sim.run import keeps_history, remembered, simulate
from jax_moe_lb.sim.stream_model import Work, choose_expert_domains
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.transport.compression import Codec

FACTORS = (0.5, 1, 2, 4)
"""So many times the tokens of a rank are tried."""

MOST_CHOICES = 3
"""So many choices are tried for each size, plain beside them."""


@dataclass(frozen=True)
class Size:
    """This is a size with the fastest choice for it.

    Args:
        ranks: how many ranks share the experts.
        tokens: the tokens of a rank in a microbatch.
        choice: the fastest of those that fit; of all, if none does.
        token_s: the seconds of one layer for each token of a rank, the median over the workloads.
        total_bytes: the memory of a rank.
        refused: why it does not fit; `None` where it does, or where nobody knows how much memory there is.
    """

    ranks: int
    tokens: int
    choice: Choice
    token_s: float
    total_bytes: float
    refused: str | None


def other_sizes(judge: Evaluator, choices: Sequence[Choice], workloads: Sequence[Workload]) -> list[Size]:
    """Looks at other degrees of expert parallelism and microbatches, the fastest of what fits first.

    Args:
        judge: the model, the machine and the step as they are; its own size is among those that come back.
        choices: what to try, the best first. Expert domains are left out: they fit one machine.
        workloads: one of each shape. They have counts.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, Step
        >>> from jax_moe_lb.sim.loads import LoadShape
        >>> from jax_moe_lb.advise.evaluate import drawn_workloads
        >>> model = ModelShape(layers=2, hidden=256, inner=512, experts=8, per_token=2, tokens=1024)
        >>> judge = Evaluator(model, Cluster((Links("node", 2, 1e9), Links("gpu", 2, 50e9))), Step())
        >>> found = other_sizes(judge, [Choice()], drawn_workloads(model, 4, 1.5, 1, [LoadShape.RANKS], 1, 0))
        >>> sorted({size.ranks for size in found}), sorted({size.tokens for size in found})
        ([2, 4], [512, 1024, 2048, 4096])
    """
    tried = list(dict.fromkeys([*[one for one in choices if not one.domain_sizes][:MOST_CHOICES], Choice()]))
    found = []
    for cluster in groups_of(judge.cluster):
        for factor in FACTORS:
            tokens = int(judge.model.tokens * factor)
            # Planners count the copies of a layer in int32.
            if 0 < tokens * judge.model.per_token * cluster.num_ranks <= INT32_MAX:
                found.append(_size(judge, cluster, tokens, tried, workloads))
    return sorted(found, key=lambda size: (size.refused is not None, size.token_s))


def groups_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the machine, and groups of half of it, a quarter and so on, which nodes and datacenters bound.

    Args:
        cluster: the machine.
    """
    yield cluster
    for at, level in enumerate(cluster.levels[:-1]):
        size = level.size
        while size % 2 == 0 and size > 1:
            size //= 2
            outer = tuple(replace(one, size=1) for one in cluster.levels[:at])
            yield replace(cluster, levels=(*outer, replace(level, size=size), *cluster.levels[at + 1 :]))
        if size > 1:
            # Beyond an odd number of members only one of them alone is left.
            outer = tuple(replace(one, size=1) for one in cluster.levels[: at + 1])
            yield replace(cluster, levels=(*outer, *cluster.levels[at + 1 :]))


def _size(
    judge: Evaluator, cluster: Cluster, tokens: int, tried: Sequence[Choice], workloads: Sequence[Workload]
) -> Size:
    model = judge.model
    before_s = None if model.pre_expert_s is None else model.pre_expert_s * tokens / model.tokens
    here = Evaluator(replace(model, tokens=tokens, pre_expert_s=before_s), cluster, judge.step)
    loads = [_resized(workload, cluster.num_ranks, tokens / model.tokens) for workload in workloads]
    fitting = [choice for choice in tried if fits_in_memory(here, choice)]
    times_s = {c: float(np.median([here.glance(c, load) for load in loads])) for c in fitting or tried}
    best = min(times_s, key=lambda choice: times_s[choice])
    token_s = (times_s[best] + sum_s(judge, cluster)) / tokens
    refused = None if fitting else needs(here, best)
    return Size(cluster.num_ranks, tokens, best, token_s, here.memory(best).total, refused)


def sum_s(judge: Evaluator, group: Cluster) -> float:
    """Computes the seconds in which one layer's gradients are summed over groups side by side, if nothing hides it.

    Args:
        judge: its machine has the groups, and its step may have no gradients.
        group: one of them.
    """
    groups, total_s, held = judge.cluster.num_ranks // group.num_ranks, 0.0, 1
    if groups == 1 or not judge.step.backward:
        return 0.0
    num_bytes = judge.model.experts // group.num_ranks * judge.model.expert_gradient_bytes
    # Level by level from the inside, each with what the levels inside it have left to it: scattered and gathered again.
    pairs = list(zip(judge.cluster.levels, group.levels, judge.cluster.inner, strict=True))
    for level, inside, inner in reversed(pairs):
        members = level.size // inside.size
        if members > 1:
            rate = level.bytes_per_s * level.links / inner
            total_s += 2 * (members - 1) / members * num_bytes / held / rate + 2 * (members - 1) * level.latency_s
            held *= members
    return total_s


def _resized(workload: Workload, ranks: int, factor: float) -> Workload:
    """Takes the counts of the first ranks, with other numbers of tokens of the same popularity."""
    if workload.counts is None:
        raise ValueError(f"workload {workload.name!r} has no counts; expected some")
    # Rounding keeps the skew, up to a token of every entry.
    counts = np.rint(workload.counts[:1, :ranks] * factor).astype(np.int32)
    earlier, before = workload.earlier, workload.before
    return Workload(
        workload.name,
        counts,
        None if earlier is None else earlier[:1],
        None if before is None else np.rint(before[:, :1, :ranks] * factor).astype(np.int32),
    )


SWEPT_TOKENS = tuple(2**power for power in range(4, 18))
"""`pays_from` looks at so many tokens per rank."""

WORTH_IT = 0.01
"""Gains below this fraction of a step are no reason for a more complicated system."""

UNIFORM = Workload("uniform", None)
"""This workload stands for all where there are too many ranks to plan for."""


@dataclass(frozen=True)
class Advice:
    """An advice says what to do.

    Args:
        found: what a search among choices that leave values as they are has found.
        compressed: the best choices that compress experts, if these were asked for: they change what is computed, so
            that they are never the best.
        pays_from: tokens per rank from which on the best is faster than plain; `None` if at none that was tried, or if
            it is plain.
        sizes: other degrees of expert parallelism and other microbatches, with the fastest choice for each, the fastest
            of what fits first; none where nobody knows the counts.
    """

    found: SearchResults
    compressed: tuple[SearchResult, ...]
    pays_from: int | None
    sizes: tuple[Size, ...] = ()

    @property
    def best(self) -> SearchResult:
        """Returns the fastest outcome; of those that are equal the simplest."""
        return self.found.outcomes[0]

    @property
    def plain(self) -> SearchResult:
        """Returns the baseline."""
        return next(one for one in self.found.outcomes if one.choice == Choice())

    @property
    def gains(self) -> tuple[float, ...]:
        """Returns, for each workload, the fraction of plain's step that the best saves."""
        return tuple(1 - ratio for ratio in self.best.ratios(self.plain))

    @property
    def gain(self) -> float:
        """Returns the median of `gains`."""
        return float(np.median(self.gains))

    @property
    def leave_off(self) -> bool:
        """Tells whether plain will do: on some workload it is as fast, or the gain is not worth it."""
        return self.gain < WORTH_IT or self.plain.is_like(self.best)

    @property
    def alike(self) -> tuple[SearchResult, ...]:
        """Returns the others that these workloads cannot tell from the best: the range of the ratios includes 1."""
        return tuple(one for one in self.found.outcomes[1:] if one.is_like(self.best))


def advise(
    judge: Evaluator,
    space: Space,
    shapes: Sequence[Workload],
    workloads: Sequence[Workload],
    ratio: float | None = None,
) -> Advice:
    """Searches for the fastest choices on some workloads.

    Args:
        judge: the model, the machine and the step.
        space: the choices that leave values as they are; its `ratio` is 1.
        shapes: one workload of each shape, with which the search chooses what to look at for long.
        workloads: the workloads on which choices are compared.
        ratio: also looks for choices that compress gathered experts so many times.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, Step
        >>> from jax_moe_lb.sim.loads import LoadShape
        >>> from jax_moe_lb.advise.evaluate import drawn_workloads
        >>> model = ModelShape(layers=2, hidden=256, inner=512, experts=8, per_token=2, tokens=4096)
        >>> cluster = Cluster((Links("gpu", 4, 50e9),))
        >>> workloads = drawn_workloads(model, 4, 2.0, 1, [LoadShape.RANKS], draws=1, seed=0)
        >>> answer = advise(Evaluator(model, cluster, Step()), Space(cluster, 2), workloads, workloads)
        >>> answer.best.median_s < answer.plain.median_s, answer.leave_off
        (True, False)
    """
    found, compressed = search(space, judge, shapes, workloads), list[SearchResult]()
    if ratio is not None and ratio > 1:
        others = search(replace(space, ratio=ratio), judge, shapes, workloads)
        compressed = [one for one in others.outcomes if one.choice.ratio > 1]
    best, where = found.outcomes[0], None
    # Other sizes and other tokens need the counts of all ranks.
    counted = workloads[0].counts is not None and judge.sample is None
    sizes = other_sizes(judge, [one.choice for one in found.outcomes], shapes) if counted else []
    if best.choice != Choice() and counted:
        pair = judge.candidate(best.choice), judge.candidate(Choice())
        where = pays_from(*pair, judge.model, judge.cluster, workloads[0], judge.step)
    return Advice(found, tuple(compressed), where, tuple(sizes))


def chosen_migration(model: ModelShape, cluster: Cluster, codec: Codec, step: Step) -> Migration:
    """Chooses HybridEP's expert domains, by `choose_expert_domains`.

    The backward pass gathers again if all layers' gathered experts would take more than half of a rank's memory.

    Args:
        model: the sizes of the layers.
        cluster: the machine.
        codec: what experts are encoded with.
        step: the passes of a step; gradients count where it has a backward pass.
    """
    pre_expert_s, home = model.before_experts_s(cluster), model.experts // cluster.num_ranks
    work = Work(
        token_bytes=float(model.tokens * model.per_token * model.row_bytes),
        expert_bytes=float(model.encoded_bytes(codec, home)),
        pre_expert_s=pre_expert_s,
        gradient_bytes=float(home * model.expert_gradient_bytes) if step.backward else 0.0,
        backward_s=2 * pre_expert_s,
    )
    sizes = choose_expert_domains(work, cluster.topology()).domain_sizes
    return with_memory(Migration(sizes, codec), model, cluster, step)


def pays_from(
    candidate: Candidate, baseline: Candidate, model: ModelShape, cluster: Cluster, workload: Workload, step: Step
) -> int | None:
    """Finds the fewest tokens per rank, of powers of two, from which on `candidate` is faster.

    Routing is scaled in proportion, with the steps before it, and one layer is simulated.

    Args:
        candidate: the system that should pay.
        baseline: the system that it is compared with.
        model: the sizes of the layers.
        cluster: the machine.
        workload: of its counts the first layer is scaled.
        step: the passes of a step.

    Returns:
        The tokens; `None` if it is not faster at the most that is tried.
    """
    found: int | None = None
    routed = [(one, permute_to_homes(workload, one, cluster)[0].astype(np.float64)) for one in (candidate, baseline)]
    before = workload.first_layer.before if keeps_history(candidate.system, model, cluster) else None
    # From the most tokens down, as it may be slower in between: what counts is from where on it stays faster.
    for tokens in reversed(SWEPT_TOKENS):
        scaled = replace(model, layers=1, tokens=tokens, pre_expert_s=_scaled_s(model, cluster, tokens))
        # Rounding keeps the skew, up to a token of every entry.
        wanted = [np.rint(counts * (tokens / model.tokens)) for _, counts in routed]
        # On very many ranks the most tokens are more copies than planners count.
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


def _scaled_s(model: ModelShape, cluster: Cluster, tokens: int) -> float:
    return model.before_experts_s(cluster) * tokens / model.tokens
