"""The machine that is simulated: levels of links, and how fast a rank computes and copies."""

import math
from dataclasses import dataclass, field

from jax_moe_lb.sim.gemm import AnalyticGemm, Gemm
from jax_moe_lb.topology import LEVEL_NAMES, Level, Topology


@dataclass(frozen=True)
class Links:
    """One level: its members, and the links that each of them has to the others.

    A member is all that is inside it: of level `node` a node with all its GPUs. Its ranks share its links. With
    as many links as ranks each rank has one of its own (rails); with one link all ranks share it (the line of a
    datacenter).

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: members inside one member of the next outer level.
        bytes_per_s: of one link, each way, in bytes per second.
        links: of one member.
        latency_s: one way, in seconds.
    """

    name: str
    size: int
    bytes_per_s: float
    links: int = 1
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in LEVEL_NAMES:
            raise ValueError(f"Links.name is {self.name!r}; expected one of {', '.join(LEVEL_NAMES)}")
        for name, value in (("size", self.size), ("links", self.links)):
            if value < 1:
                raise ValueError(f"Links({self.name!r}).{name} is {value}; expected at least 1")
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(f"Links({self.name!r}).bytes_per_s is {self.bytes_per_s}; expected a finite rate above 0")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"Links({self.name!r}).latency_s is {self.latency_s}; expected at least 0")


@dataclass(frozen=True)
class Cluster:
    """An expert-parallel group of ranks, numbered row-major over the levels.

    Args:
        levels: outermost first.
        gemm: how long experts take.
        flops_per_s: of everything before the experts, on one rank, in floating-point operations per second.
        copy_bytes_per_s: what a rank's copy engines move each way; `None`: as much as its links.
        planner_s: seconds of a planner that reads the counts, from counts to plan.
        domain_level: the outermost level inside a domain, in which expert weights may move; the innermost by default.
        memory_bytes: of one rank; `None`: not known.
    """

    levels: tuple[Links, ...]
    gemm: Gemm = field(default_factory=AnalyticGemm)
    flops_per_s: float = 400e12
    copy_bytes_per_s: float | None = None
    planner_s: float = 0.0
    domain_level: str | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or names != [name for name in LEVEL_NAMES if name in names]:
            raise ValueError(f"Cluster.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        if self.domain_level is not None and self.domain_level not in names:
            raise ValueError(f"Cluster.domain_level is {self.domain_level!r}; expected one of {names}")
        for name in ("flops_per_s", "copy_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Cluster.{name} is {value}; expected a finite number above 0")
        if not 0 <= self.planner_s < math.inf:
            raise ValueError(f"Cluster.planner_s is {self.planner_s}; expected at least 0")
        for level, inner in zip(self.levels, self.inner, strict=True):
            if inner % level.links:
                raise ValueError(
                    f"Links({level.name!r}).links is {level.links}; "
                    f"expected a divisor of the {inner} ranks that share them"
                )

    @property
    def num_ranks(self) -> int:
        """`R`."""
        return math.prod(level.size for level in self.levels)

    @property
    def inner(self) -> tuple[int, ...]:
        """Ranks inside one member of every level."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    @property
    def ranks_per_domain(self) -> int:
        """`M`."""
        return math.prod(level.size for level in self.levels[self._first_inside :])

    @property
    def _first_inside(self) -> int:
        names = [level.name for level in self.levels]
        return len(names) - 1 if self.domain_level is None else names.index(self.domain_level)

    def topology(self, sizes: tuple[int, ...] | None = None) -> Topology:
        """What balancers see.

        Args:
            sizes: of the levels, where a group has fewer ranks than the machine; `None`: all.
        """
        sizes = tuple(level.size for level in self.levels) if sizes is None else sizes
        levels = tuple(
            Level(level.name, size, level.bytes_per_s * level.links / inner, level.latency_s)
            for level, size, inner in zip(self.levels, sizes, self.inner, strict=True)
        )
        domain = math.prod(sizes[self._first_inside :])
        # A group of fewer ranks has fewer of a node's rails.
        rails = math.gcd(self.levels[-2].links, sizes[-1], domain) if len(sizes) > 1 else 1
        return Topology(levels, domain, rails, flops_per_s=self.gemm.peak_flops_per_s)
