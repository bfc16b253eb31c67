"""`verdict` says which system is fastest here, and from how many tokens on it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int

from jax_moe_lb.checks import INT32_MAX
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.sim.model import ModelShape
from jax_moe_lb.sim.run import Report, mean_report, replay
from jax_moe_lb.sim.schedule import Step
from jax_moe_lb.sim.work import Migration
from jax_moe_lb.streams import Work, choose_expert_domains
from jax_moe_lb.systems import System
from jax_moe_lb.transport.codec import Codec

SWEPT_TOKENS = tuple(2**power for power in range(4, 18))
"""`pays_from` looks at so many tokens per rank."""

WORTH_IT = 0.01
"""Gains below this fraction of a step are no reason for a more complicated system."""

Trace = Int[np.ndarray, "steps layers R E"]


@dataclass(frozen=True)
class Candidate:
    """A candidate is a system to compare with others.

    Args:
        name: its name in the table.
        system: its strategies.
        migration: the expert domains in which it gathers experts; none by default.
    """

    name: str
    system: System
    migration: Migration = field(default_factory=Migration)


@dataclass(frozen=True)
class Outcome:
    """An outcome is a candidate with its mean step, or with the reason why it cannot run here.

    Args:
        candidate: what was simulated.
        report: its mean step; `None` if it cannot run.
        refused: the reason then, in words.
    """

    candidate: Candidate
    report: Report | None
    refused: str = ""


@dataclass(frozen=True)
class Verdict:
    """A verdict says what to do.

    Args:
        best: the fastest candidate.
        gain: what it saves, as a fraction of a step of the baseline.
        pays_from: tokens per rank from which on it is faster than the baseline; `None` if at none that was tried.
    """

    best: Candidate
    gain: float
    pays_from: int | None

    @property
    def leave_off(self) -> bool:
        """Tells whether the baseline will do."""
        return self.gain < WORTH_IT


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
    chosen = Migration(choose_expert_domains(work, cluster.topology()).domain_sizes, codec)
    # The other half is for parameters, optimizer and activations.
    kept_bytes = model.layers * chosen.gathered_bytes(model, cluster)
    again = cluster.memory_bytes is not None and kept_bytes > cluster.memory_bytes / 2
    return replace(chosen, gather_again=again)


def outcomes(
    candidates: Sequence[Candidate], model: ModelShape, cluster: Cluster, trace: Trace, step: Step
) -> Iterator[Outcome]:
    """Yields each candidate's mean step over the trace, in the order of the candidates.

    Args:
        candidates: the systems to compare.
        model: the sizes of the layers.
        cluster: the machine.
        trace: `[steps, layers, R, E]` int32, the counts of every step.
        step: the passes of a step.
    """
    for candidate in candidates:
        try:
            reports = replay(candidate.system, model, cluster, trace, migration=candidate.migration, step=step)
            yield _fitting(candidate, mean_report(list(reports)), cluster)
        except ValueError as error:
            yield Outcome(candidate, None, str(error))


def _fitting(candidate: Candidate, report: Report, cluster: Cluster) -> Outcome:
    needed, there = report.memory.total, cluster.memory_bytes
    if there is not None and needed > there:
        return Outcome(candidate, None, f"needs {needed / 1e9:.1f} GB of {there / 1e9:.1f} GB")
    return Outcome(candidate, report)


def verdict(
    found: Sequence[Outcome], baseline: Candidate, model: ModelShape, cluster: Cluster, trace: Trace, step: Step
) -> Verdict:
    """Finds the fastest of those that can run, and where it begins to pay.

    Args:
        found: the outcomes of all candidates.
        baseline: the candidate that others have to beat, usually plain expert parallelism.
        model: the sizes of the layers.
        cluster: the machine.
        trace: `[steps, layers, R, E]` int32, the counts of every step.
        step: the passes of a step.

    Raises:
        ValueError: the baseline is not among them, or cannot run.
    """
    times = {outcome.candidate.name: outcome.report.step_s for outcome in found if outcome.report is not None}
    if baseline.name not in times:
        raise ValueError(next((o.refused for o in found if o.candidate == baseline), "there is no baseline"))
    best = min((o.candidate for o in found if o.report is not None), key=lambda candidate: times[candidate.name])
    gain = 1 - times[best.name] / times[baseline.name]
    where = None if best == baseline else pays_from(best, baseline, model, cluster, trace, step)
    return Verdict(best, gain, where)


def pays_from(
    candidate: Candidate, baseline: Candidate, model: ModelShape, cluster: Cluster, trace: Trace, step: Step
) -> int | None:
    """Finds the fewest tokens per rank, of powers of two, from which on `candidate` is faster.

    Routing is scaled in proportion, and one layer of the first step is simulated.

    Args:
        candidate: the system that should pay.
        baseline: the system that it is compared with.
        model: the sizes of the layers.
        cluster: the machine.
        trace: `[steps, layers, R, E]` int32, the counts of every step.
        step: the passes of a step.

    Returns:
        The tokens; `None` if it is not faster at the most that is tried.
    """
    found, recorded = None, trace[:1, :1].astype(np.float64)
    # From the most tokens down, as it may be slower in between: what counts is from where on it stays faster.
    for tokens in reversed(SWEPT_TOKENS):
        scaled = replace(model, layers=1, tokens=tokens, pre_expert_s=_scaled_s(model, cluster, tokens))
        # Rounding keeps the skew, up to a token of every entry.
        wanted = np.rint(recorded * (tokens / model.tokens))
        # On very many ranks the most tokens are more copies than planners count.
        if wanted.sum() > INT32_MAX:
            continue
        counts = wanted.astype(np.int32)
        times = [
            next(replay(one.system, scaled, cluster, counts, migration=one.migration, step=step)).step_s
            for one in (candidate, baseline)
        ]
        if times[0] >= times[1]:
            break
        found = tokens
    return found


def _scaled_s(model: ModelShape, cluster: Cluster, tokens: int) -> float:
    return model.before_experts_s(cluster) * tokens / model.tokens
