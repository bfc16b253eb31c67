"""HybridEP's stream model says how large expert domains should be, in bytes and seconds.

Inside an expert domain of `S` ranks experts are gathered, between expert domains tokens are exchanged. Level by level,
with `G` members, `D` bytes of token copies on each rank and `P` bytes of experts:

```
gather(S)   = P (S - 1) / bytes_per_s + latency_s                  0 if S = 1
exchange(S) = D (G - S) / (G bytes_per_s) + latency_s              0 if S = G
total(S)    = max(pre_expert, gather(S)) + 2 exchange(S)           hidden: what the gather shares with pre_expert
```

The work before the experts hides the gather, which needs no token; nothing hides an exchange. The compute of experts is
the same for every `S` and left out.
"""

import math
from dataclasses import dataclass

from jax_moe_lb.core.topology import Level, Topology


@dataclass(frozen=True)
class Work:
    """This is the work of one layer: what it moves, and under what it can hide that. Bytes are those of one rank.

    Fill it in for `choose_expert_domains`, from the sizes of the model and from `benchmark_seconds`.

    Args:
        token_bytes: bytes of the token copies that a rank sends if every expert is elsewhere: `T * K * H * itemsize`.
        expert_bytes: bytes of the rank's home experts as they travel, so after compression: see `Codec.encoded_bytes`.
        pre_expert_s: seconds of compute between the layer before and this one's experts, which hides a gather; usually
            what `benchmark_seconds` finds.
        gradient_bytes: bytes of the gradients of those experts as they travel home in the backward pass. 0, the
            default, is the paper's forward view; above 0 the backward pass counts as well.
        backward_s: seconds of compute in the backward pass that hide the gradients' way home; usually twice
            `pre_expert_s`.
        backward_exchanges: exchanges of token copies in the backward pass, usually 2. This package's executor makes 3,
            as it sends the copies again where others would keep them.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Work
        >>> tokens, per_token, width = 4096, 8, 2048
        >>> Work(token_bytes=2.0 * tokens * per_token * width, expert_bytes=50e6, pre_expert_s=2e-3).token_bytes
        134217728.0
    """

    token_bytes: float
    expert_bytes: float
    pre_expert_s: float
    gradient_bytes: float = 0.0
    backward_s: float = 0.0
    backward_exchanges: int = 2

    def __post_init__(self) -> None:
        for name in ("token_bytes", "expert_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Work.{name} is {getattr(self, name)}; expected a finite number of bytes above 0")
        for name, unit in (("pre_expert_s", "seconds"), ("gradient_bytes", "bytes"), ("backward_s", "seconds")):
            if not 0 <= getattr(self, name) < math.inf:
                value = getattr(self, name)
                raise ValueError(f"Work.{name} is {value}; expected a finite number of {unit}, at least 0")
        if self.backward_exchanges < 0:
            raise ValueError(f"Work.backward_exchanges is {self.backward_exchanges}; expected at least 0")


@dataclass(frozen=True)
class Latency:
    """A latency is what one level of one layer takes with expert domains of `domain_size`, for one rank.

    Args:
        domain_size: `S`, members of an expert domain at this level.
        gather_bytes: bytes of experts that a rank receives, once.
        exchange_bytes: bytes of token copies that a rank receives, each way.
        gather_s: seconds of the gather.
        exchange_s: seconds of one exchange, of which there are two.
        hidden_s: seconds of the gather that computing hides.
        total_s: seconds of pre-expert compute, of what it does not hide of the gather, and of the exchanges; with the
            same of the backward pass where gradients count.
    """

    domain_size: int
    gather_bytes: float
    exchange_bytes: float
    gather_s: float
    exchange_s: float
    hidden_s: float
    total_s: float


@dataclass(frozen=True)
class LevelChoice:
    """A level's choice lists every expert-domain size that it admits, ascending, and the fastest.

    Args:
        level: the level, with its size and rates.
        candidates: one latency per divisor of its size.
        best: the first of those with the least `total_s`.
        closed_form: the share of experts that the closed form reaches by exchanges, from 0 to 1.
    """

    level: Level
    candidates: tuple[Latency, ...]
    best: Latency
    closed_form: float


@dataclass(frozen=True)
class ExpertDomainChoice:
    """This choice has the expert-domain size of every level, with the reasons: `print` it to read them.

    Args:
        levels: one choice per level of the topology, outermost first.

    Examples:
        >>> from jax_moe_lb.sim import ExpertDomainChoice
        >>> ExpertDomainChoice(levels=()).domain_sizes
        ()
    """

    levels: tuple[LevelChoice, ...]

    @property
    def domain_sizes(self) -> tuple[int, ...]:
        """Lists the size of the expert domains at every level, outermost first."""
        return tuple(choice.best.domain_size for choice in self.levels)

    def __str__(self) -> str:
        """Prints a table for each level, the best line marked."""
        return "\n".join(line for choice in self.levels for line in _lines(choice))


def latency(work: Work, level: Level, domain_size: int, experts: int = 1) -> Latency:
    """Evaluates the model at one level.

    Args:
        work: the work of the layer.
        level: the level, with its size and rates.
        domain_size: `S`, a divisor of the level's size.
        experts: how often the home experts of a rank are forwarded: the product of the outer levels' domain sizes.

    Raises:
        ValueError: `S` is no divisor, or the level has no bandwidth.
    """
    size = level.size
    if domain_size < 1 or size % domain_size:
        raise ValueError(f"domain_size is {domain_size}; expected a divisor of the {size} members of {level.name!r}")
    gather_bytes = work.expert_bytes * experts * (domain_size - 1)
    exchange_bytes = work.token_bytes * (size - domain_size) / size
    gather_s, exchange_s = _transfer(level, gather_bytes), _transfer(level, exchange_bytes)
    home_s = _transfer(level, work.gradient_bytes * experts * (domain_size - 1))
    total = max(work.pre_expert_s, gather_s) + 2 * exchange_s
    # Without gradients this is the paper's model, which has no backward pass.
    if work.gradient_bytes:
        total += max(work.backward_s, home_s) + work.backward_exchanges * exchange_s
    hidden = min(work.pre_expert_s, gather_s)
    return Latency(domain_size, gather_bytes, exchange_bytes, gather_s, exchange_s, hidden, total)


def closed_form(work: Work, level: Level, experts: int = 1) -> float:
    """Computes the best share of other members' experts to reach by exchanges, `p = (G - S) / (G - 1)`.

    `S` is continuous here. The share is 0 if exchanging all tokens would take longer than gathering all experts,
    `2 D >= G P`. Else the gather is made just so long that computing hides it. Latencies and the backward pass are not
    part of it: compare with the paper by it, and choose by `choose_level`.

    Args:
        work: the work of the layer.
        level: the level, with its size and rates.
        experts: how often the home experts of a rank are forwarded: the product of the outer levels' domain sizes.

    Raises:
        ValueError: the level has no bandwidth.
    """
    held = work.expert_bytes * experts
    if level.size == 1 or 2 * work.token_bytes >= level.size * held:
        return 0.0
    hidden = _rate(level) * work.pre_expert_s / (held * (level.size - 1))
    return min(max(1 - hidden, 0.0), 1.0)


def choose_level(work: Work, level: Level, experts: int = 1) -> LevelChoice:
    """Evaluates every divisor of the level's size and picks the fastest, among equal ones the smallest.

    Args:
        work: the work of the layer.
        level: the level, with its size and rates.
        experts: how often the home experts of a rank are forwarded: the product of the outer levels' domain sizes.

    Raises:
        ValueError: the level has no bandwidth.
    """
    sizes = [size for size in range(1, level.size + 1) if level.size % size == 0]
    candidates = tuple(latency(work, level, size, experts) for size in sizes)
    # The sizes ascend and `min` takes the first of equals: the smallest expert domain needs the least memory.
    best = min(candidates, key=lambda candidate: candidate.total_s)
    return LevelChoice(level, candidates, best, closed_form(work, level, experts))


def choose_expert_domains(work: Work, topology: Topology) -> ExpertDomainChoice:
    """Chooses the expert-domain sizes of all levels, outermost first.

    Use it before training across slow links, and give the sizes to `hybrid_mesh`. A level that gathers has all ranks
    hold more experts, which the levels inside it then have to forward: there an expert costs as many times more.

    Args:
        work: the work of a layer.
        topology: the levels, with their rates.

    Returns:
        The choice; `domain_sizes` has the sizes, and `print` shows why.

    Raises:
        ValueError: a level of more than one member has no bandwidth.

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
        # Levels further in forward what this one gathered.
        experts *= chosen[-1].best.domain_size
    return ExpertDomainChoice(tuple(chosen))


def _transfer(level: Level, num_bytes: float) -> float:
    # Nothing that travels has no latency either, and needs no rate to be known.
    if not num_bytes:
        return 0.0
    return num_bytes / _rate(level) + (level.latency_s or 0.0)


def _rate(level: Level) -> float:
    # With an infinite rate every size would be equally fast, and nothing could be chosen.
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
        return "there is nothing to reach"
    if best.domain_size == 1:
        return "no gather: it would outlast what hides it by more than it saves"
    left = best.gather_s - best.hidden_s
    hides = "computing hides all of the gather" if left <= 0 else f"{left * 1e3:.3f} ms of the gather are not hidden"
    tokens = "no token crosses" if best.domain_size == choice.level.size else "the rest is exchanged"
    return f"{hides}, {tokens}"
