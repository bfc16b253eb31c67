"""Expert-parallel groups dividing the experts of a model, and changes with which a step fits into memory."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax_moe_lb.advise.choice import Choice
from jax_moe_lb.advise.evaluate import Evaluator
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.memory import optimizer_bytes
from jax_moe_lb.sim.model import ModelShape, Peers, Step

MOST_STAGES = 64
"""Maximum number of pipeline stages, and of groups sharing an optimizer state, tried by `remedies`."""

LEAST_TOKENS = 256
"""Minimum tokens per rank tried by `remedies`."""


@dataclass(frozen=True)
class Remedy:
    """Change of cluster or settings with which plain expert parallelism fits into memory."""

    what: str  # the change, as text
    judge: Evaluator  # evaluator of the changed step


def fits_in_memory(judge: Evaluator, choice: Choice) -> bool:
    """Return whether a choice fits into a rank's memory; True if the memory is unknown."""
    there = judge.cluster.memory_bytes
    return there is None or judge.memory(choice).total <= there


def needs(judge: Evaluator, choice: Choice) -> str:
    """Describe required and available memory of a choice, by part."""
    memory, there = judge.memory(choice), judge.cluster.memory_bytes or 0.0
    return f"needs {memory.total / 1e9:.1f} GB of {there / 1e9:.1f}: {memory.words}"


def groups_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the machine, then groups of half of it, a quarter and so on, bounded by nodes and datacenters."""
    yield cluster
    for at, level in enumerate(cluster.levels[:-1]):
        size = level.size
        while size % 2 == 0 and size > 1:
            size //= 2
            outer = tuple(replace(one, size=1) for one in cluster.levels[:at])
            yield replace(cluster, levels=(*outer, replace(level, size=size), *cluster.levels[at + 1 :]))
        if size > 1:
            # An odd number of members cannot be halved, so continue with a single member.
            outer = tuple(replace(one, size=1) for one in cluster.levels[: at + 1])
            yield replace(cluster, levels=(*outer, *cluster.levels[at + 1 :]))


def expert_group(model: ModelShape, cluster: Cluster, step: Step) -> tuple[Cluster, Step]:
    """Return the largest group of ranks dividing the experts, and the step with the other groups beside it."""
    # Groups with the same experts sum their gradients; see `Parallel.data`. A machine without such a group is returned
    # unchanged, and the simulator then rejects the model.
    for group in itertools.chain(groups_of(cluster), _inside_of_nodes(cluster)):
        if model.experts % group.num_ranks == 0:
            number = cluster.num_ranks // group.num_ranks
            if number == 1 or step.parallel.data.size > 1:
                return group, step
            # The outermost level with several groups is the slowest link between them.
            pairs = zip(cluster.levels, group.levels, cluster.inner, strict=True)
            level, inner = next((level, inner) for level, own, inner in pairs if level.size > own.size)
            data = Peers(number, level.bytes_per_s * level.links / inner, level.latency_s)
            return group, replace(step, parallel=replace(step.parallel, data=data))
    return cluster, step


def _inside_of_nodes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield groups of half the ranks of one member of the last level but one, a quarter and so on."""
    *outer, innermost = cluster.levels
    size = innermost.size
    while size % 2 == 0:
        size //= 2
        # Fewer ranks share fewer links of their node.
        alone = (replace(one, size=1, links=math.gcd(one.links, size)) for one in outer)
        yield replace(cluster, levels=(*alone, replace(innermost, size=size)))


def remedies(judge: Evaluator) -> list[Remedy]:
    """Return the smallest changes with which plain expert parallelism fits: cluster, stages, optimizer and tokens."""
    # Each kind of change is tried alone, in this order. Insufficient kinds are missing.
    kinds: tuple[Callable[[Evaluator], Iterator[Remedy]], ...] = (_clusters, _stages, _optimizers, _tokens)
    found = (next((one for one in kind(judge) if fits_in_memory(one.judge, Choice())), None) for kind in kinds)
    return [one for one in found if one is not None]


def _clusters(judge: Evaluator) -> Iterator[Remedy]:
    """Yield clusters with more members of the outermost level, up to one expert per rank."""
    # A cluster of one level is a node or a rack, whose size is given.
    outermost, *inside = judge.cluster.levels
    if not inside:
        return
    for size in range(outermost.size + 1, outermost.size * (judge.model.experts // judge.cluster.num_ranks) + 1):
        larger = replace(judge.cluster, levels=(replace(outermost, size=size), *inside))
        if judge.model.experts % larger.num_ranks == 0:
            text = f"{size} members of level {outermost.name} in place of {outermost.size} ({larger.num_ranks} ranks)"
            yield Remedy(text, replace(judge, cluster=larger))


def _stages(judge: Evaluator) -> Iterator[Remedy]:
    parallel, level = judge.step.parallel, judge.cluster.levels[0]
    if parallel.pipeline.size > 1:
        return
    rate = level.bytes_per_s * level.links / judge.cluster.inner[0]
    for stages in range(2, min(MOST_STAGES, judge.model.layers) + 1):
        # Four microbatches per stage keep the pipeline bubble below a quarter.
        peers, number = Peers(stages, rate, level.latency_s), max(parallel.microbatches, 4 * stages)
        step = replace(judge.step, parallel=replace(parallel, pipeline=peers, microbatches=number))
        model = replace(judge.model, layers=math.ceil(judge.model.layers / stages))
        text = (
            f"{stages} pipeline stages, each such a cluster ({stages * judge.cluster.num_ranks} ranks): step: "
            f"{{parallel: {{pipeline: {{size: {stages}, rate: {rate / 1e9:g} GB/s}}, microbatches: {number}}}}}"
        )
        yield Remedy(text, replace(judge, model=model, step=step))


def _optimizers(judge: Evaluator) -> Iterator[Remedy]:
    """Yield optimizer states sharded over data-parallel groups of such clusters."""
    whole, groups = optimizer_bytes(judge.model, judge.step), 2
    while judge.step.backward and groups <= MOST_STAGES:
        step = replace(judge.step, optimizer_bytes=whole / groups)
        text = f"an optimizer state sharded over {groups} groups: step: {{optimizer_bytes: {whole / groups:g}}}"
        yield Remedy(text, replace(judge, step=step))
        groups *= 2


def _tokens(judge: Evaluator) -> Iterator[Remedy]:
    tokens = judge.model.tokens // 2
    while tokens >= LEAST_TOKENS:
        smaller = replace(judge, model=judge.model.with_tokens(tokens))
        yield Remedy(f"{tokens} tokens per rank: --tokens {tokens}, without --trace", smaller)
        tokens //= 2
