"""`advise` searches for the fastest choices, and says how sure it is and from how many tokens per rank on they pay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.sim.choice import Candidate, Choice, with_memory
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.judge import Judge, at_homes
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.run import keeps_history, remembered, simulate
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.search import Found, Outcome, search
from jax_moe_lb.sim.sizes import Size, other_sizes
from jax_moe_lb.sim.space import Space
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.sim.workloads import Workload
from jax_moe_lb.streams import Work, choose_expert_domains
from jax_moe_lb.transport.codec import Codec

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

    found: Found
    compressed: tuple[Outcome, ...]
    pays_from: int | None
    sizes: tuple[Size, ...] = ()

    @property
    def best(self) -> Outcome:
        """Returns the fastest outcome; of those that are equal the simplest."""
        return self.found.outcomes[0]

    @property
    def plain(self) -> Outcome:
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
    def alike(self) -> tuple[Outcome, ...]:
        """Returns the others that these workloads cannot tell from the best: the range of the ratios includes 1."""
        return tuple(one for one in self.found.outcomes[1:] if one.is_like(self.best))


def advise(
    judge: Judge, space: Space, shapes: Sequence[Workload], workloads: Sequence[Workload], ratio: float | None = None
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
        >>> from jax_moe_lb.sim.workloads import drawn_workloads
        >>> model = ModelShape(layers=2, hidden=256, inner=512, experts=8, per_token=2, tokens=4096)
        >>> cluster = Cluster((Links("gpu", 4, 50e9),))
        >>> workloads = drawn_workloads(model, 4, 2.0, 1, [LoadShape.RANKS], draws=1, seed=0)
        >>> answer = advise(Judge(model, cluster, Step()), Space(cluster, 2), workloads, workloads)
        >>> answer.best.median_s < answer.plain.median_s, answer.leave_off
        (True, False)
    """
    found, compressed = search(space, judge, shapes, workloads), list[Outcome]()
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
    routed = [(one, at_homes(workload, one, cluster)[0].astype(np.float64)) for one in (candidate, baseline)]
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
