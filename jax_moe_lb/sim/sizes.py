"""`other_sizes` looks at what a search takes as given: how many ranks share the experts, and how many tokens each has.

Fewer ranks share the experts where the machine is several expert-parallel groups side by side. Tokens then stay nearer,
and the load of a rank is more even; each rank holds more experts, whose gradients are summed over the groups. All
groups route alike, so one is simulated, with the counts of its own ranks. Times are those of one layer for each token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.sim.choice import Choice
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.judge import Judge
from jax_moe_lb.sim.search import is_room, needs
from jax_moe_lb.sim.workloads import Workload

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


def other_sizes(judge: Judge, choices: Sequence[Choice], workloads: Sequence[Workload]) -> list[Size]:
    """Looks at other degrees of expert parallelism and microbatches, the fastest of what fits first.

    Args:
        judge: the model, the machine and the step as they are; its own size is among those that come back.
        choices: what to try, the best first. Expert domains are left out: they fit one machine.
        workloads: one of each shape. They have counts.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links, ModelShape, Step
        >>> from jax_moe_lb.sim.loads import LoadShape
        >>> from jax_moe_lb.sim.workloads import drawn_workloads
        >>> model = ModelShape(layers=2, hidden=256, inner=512, experts=8, per_token=2, tokens=1024)
        >>> judge = Judge(model, Cluster((Links("node", 2, 1e9), Links("gpu", 2, 50e9))), Step())
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


def _size(judge: Judge, cluster: Cluster, tokens: int, tried: Sequence[Choice], workloads: Sequence[Workload]) -> Size:
    model = judge.model
    before_s = None if model.pre_expert_s is None else model.pre_expert_s * tokens / model.tokens
    here = Judge(replace(model, tokens=tokens, pre_expert_s=before_s), cluster, judge.step)
    loads = [_resized(workload, cluster.num_ranks, tokens / model.tokens) for workload in workloads]
    fitting = [choice for choice in tried if is_room(here, choice)]
    times_s = {c: float(np.median([here.glance(c, load) for load in loads])) for c in fitting or tried}
    best = min(times_s, key=lambda choice: times_s[choice])
    token_s = (times_s[best] + sum_s(judge, cluster)) / tokens
    refused = None if fitting else needs(here, best)
    return Size(cluster.num_ranks, tokens, best, token_s, here.memory(best).total, refused)


def sum_s(judge: Judge, group: Cluster) -> float:
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
