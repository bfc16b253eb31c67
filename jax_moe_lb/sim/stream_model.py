"""HybridEP's stream model of expert-domain sizes, in bytes and seconds.

Experts are gathered inside an expert domain of `S` ranks, and tokens are exchanged between expert domains. At each
level with `G` members, `D` bytes of token copies per rank and `P` bytes of experts per rank:

```
gather(S)   = P (S - 1) / bytes_per_s + latency_s                  0 if S = 1
exchange(S) = D (G - S) / (G bytes_per_s) + latency_s              0 if S = G
total(S)    = max(pre_expert, gather(S)) + 2 exchange(S)           hidden: overlap of gather and pre_expert
```

The gather needs no tokens, so it overlaps with the compute before the experts; exchanges are always exposed. The
compute of experts does not depend on `S` and is left out.
"""

import math
from dataclasses import dataclass

from jax_moe_lb.core.checks import Natural, NonNegative, Positive, checked_fields
from jax_moe_lb.core.topology import Level, Topology


@dataclass(frozen=True)
@checked_fields
class Work:
    """Bytes moved by one layer on one rank, and compute that overlaps with them.

    Build it for `choose_expert_domains`, from the sizes of the model and from `benchmark_seconds`.

    Args:
        token_bytes: Bytes of the token copies of a rank if every expert is on another rank: `T * K * H * itemsize`.
        expert_bytes: Bytes of the rank's home experts in transfer, after compression; see `Codec.encoded_bytes`.
        pre_expert_s: Seconds of compute between the previous layer and the experts of this one, which overlap with a
            gather. Usually measured by `benchmark_seconds`.
        gradient_bytes: Bytes of these experts' gradients on the way home in the backward pass. At 0 (default), as in
            the paper, only the forward pass counts.
        backward_s: Seconds of compute in the backward pass that overlap with the gradients' way home, usually twice
            `pre_expert_s`; 0 by default.
        backward_exchanges: Exchanges of token copies in the backward pass, 2 by default. This package's executor makes
            3, as it sends the copies again instead of keeping them as residuals.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Work
        >>> tokens, per_token, width = 4096, 8, 2048
        >>> Work(token_bytes=2.0 * tokens * per_token * width, expert_bytes=50e6, pre_expert_s=2e-3).token_bytes
        134217728.0
    """

    token_bytes: Positive
    expert_bytes: Positive
    pre_expert_s: NonNegative
    gradient_bytes: NonNegative = 0.0
    backward_s: NonNegative = 0.0
    backward_exchanges: Natural = 2


@dataclass(frozen=True)
class Latency:
    """Bytes and times of one level of one layer on one rank, for one expert-domain size."""

    domain_size: int  # members `S` of an expert domain at this level
    gather_bytes: float  # bytes of experts received by a rank in the gather
    exchange_bytes: float  # bytes of token copies received by a rank per exchange
    gather_s: float  # seconds of the gather
    exchange_s: float  # seconds of one exchange; the forward pass has two
    hidden_s: float  # seconds of the gather overlapped with compute
    # Seconds of pre-expert compute, of the exposed part of the gather, and of the exchanges. If `Work.gradient_bytes`
    # is above 0, plus the same of the backward pass.
    total_s: float


@dataclass(frozen=True)
class LevelChoice:
    """All expert-domain sizes of one level in ascending order, and the fastest."""

    level: Level  # level with its size and rates
    candidates: tuple[Latency, ...]  # one entry per divisor of the level's size
    best: Latency  # first candidate with the minimum `total_s`


@dataclass(frozen=True)
class ExpertDomainChoice:
    """Expert-domain sizes of all levels with their modeled times; `print` shows them as tables.

    Args:
        levels: One choice per level of the topology, outermost first.

    Examples:
        >>> from jax_moe_lb.sim import ExpertDomainChoice
        >>> ExpertDomainChoice(levels=()).domain_sizes
        ()
    """

    levels: tuple[LevelChoice, ...]

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Expert-domain size per level, outermost first."""
        return tuple(choice.best.domain_size for choice in self.levels)

    def __str__(self) -> str:
        """Format one table per level, with the best line marked."""
        return "\n".join(line for choice in self.levels for line in _lines(choice))


def latency(work: Work, level: Level, domain_size: int, experts: int = 1) -> Latency:
    """Evaluate the model at one level."""
    gather_bytes = work.expert_bytes * experts * (domain_size - 1)
    exchange_bytes = work.token_bytes * (level.size - domain_size) / level.size
    gather_s, exchange_s = _transfer(level, gather_bytes), _transfer(level, exchange_bytes)
    home_s = _transfer(level, work.gradient_bytes * experts * (domain_size - 1))
    total = max(work.pre_expert_s, gather_s) + 2 * exchange_s
    # Without gradients this is the paper's model, which has no backward pass.
    if work.gradient_bytes:
        total += max(work.backward_s, home_s) + work.backward_exchanges * exchange_s
    hidden = min(work.pre_expert_s, gather_s)
    return Latency(domain_size, gather_bytes, exchange_bytes, gather_s, exchange_s, hidden, total)


def choose_level(work: Work, level: Level, experts: int = 1) -> LevelChoice:
    """Evaluate every divisor of the level's size and choose the fastest; ties go to the smallest."""
    sizes = [size for size in range(1, level.size + 1) if level.size % size == 0]
    candidates = tuple(latency(work, level, size, experts) for size in sizes)
    # The sizes ascend and `min` takes the first of equals: the smallest expert domain needs the least memory.
    best = min(candidates, key=lambda candidate: candidate.total_s)
    return LevelChoice(level, candidates, best)


def choose_expert_domains(work: Work, topology: Topology) -> ExpertDomainChoice:
    """Choose the expert-domain sizes of all levels, outermost first.

    Use it before training across slow links, and pass the sizes to `hybrid_mesh`. If an outer level gathers, all ranks
    hold more experts, and the levels inside forward all of them. The cost of an expert grows there by the same factor.

    Args:
        work: Work of a layer.
        topology: Levels with their rates.

    Returns:
        The choice; `domain_sizes` has the sizes, and `print` shows the modeled times.

    Raises:
        ValueError: A level of more than one member has no bandwidth.

    Examples:
        Between two datacenters, and inside them, 20 MB of experts cost less than 134 MB of token copies:

        >>> from jax_moe_lb import Topology

        >>> from jax_moe_lb.core import Level

        >>> from jax_moe_lb.sim import Work, choose_expert_domains
        >>> levels = (Level("dc", 2, 1.25e9, 5e-3), Level("gpu", 4, 360e9, 3e-6))
        >>> work = Work(token_bytes=134e6, expert_bytes=20e6, pre_expert_s=2e-3)
        >>> choose_expert_domains(work, Topology(levels, ranks_per_domain=4)).domain_sizes
        (2, 4)
    """
    chosen: list[LevelChoice] = []
    experts = 1
    for level in topology.levels:
        chosen.append(choose_level(work, level, experts))
        # Inner levels forward the experts gathered here.
        experts *= chosen[-1].best.domain_size
    return ExpertDomainChoice(tuple(chosen))


def _transfer(level: Level, num_bytes: float) -> float:
    # Without bytes there is no message, hence no latency, and the rate may be unknown.
    if not num_bytes:
        return 0.0
    return num_bytes / _rate(level) + (level.latency_s or 0.0)


def _rate(level: Level) -> float:
    # With an infinite rate, all sizes would be equally fast.
    if level.bytes_per_s is None or not math.isfinite(level.bytes_per_s):
        raise ValueError(
            f"Level({level.name!r}).bytes_per_s is {level.bytes_per_s}; expected a finite rate, in bytes per second"
        )
    return level.bytes_per_s


def _lines(choice: LevelChoice) -> list[str]:
    best, name = choice.best, choice.level.name
    rows = [_line(candidate, candidate is best) for candidate in choice.candidates]
    return [
        f"{name}: domains of {best.domain_size} of {choice.level.size}; {_reason(choice)}",
        "    S  experts in MB  tokens in MB  gather ms  hidden ms  2 exchanges ms  total ms",
        *rows,
    ]


def _line(at: Latency, best: bool) -> str:
    sizes = f"{at.domain_size:>5}  {at.gather_bytes / 1e6:>13.3f}  {at.exchange_bytes / 1e6:>12.3f}"
    times = f"{at.gather_s * 1e3:>9.3f}  {at.hidden_s * 1e3:>9.3f}  {2 * at.exchange_s * 1e3:>14.3f}"
    return f"{sizes}  {times}  {at.total_s * 1e3:>8.3f}{'  <-' if best else ''}"


def _reason(choice: LevelChoice) -> str:
    best = choice.best
    if choice.level.size == 1:
        return "one member, so no exchange"
    if best.domain_size == 1:
        return "no gather: its exposed time would exceed the saved exchanges"
    left = best.gather_s - best.hidden_s
    hides = "compute hides the whole gather" if left <= 0 else f"{left * 1e3:.3f} ms of the gather are exposed"
    tokens = "no tokens are exchanged" if best.domain_size == choice.level.size else "other tokens are exchanged"
    return f"{hides}, {tokens}"
