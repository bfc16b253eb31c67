"""A cluster is the machine that is simulated: levels of links, and how fast a rank computes and copies."""

import math
from dataclasses import dataclass, field

from jax_moe_lb.sim.communication import Communication
from jax_moe_lb.sim.gemm import AnalyticGemm, Gemm
from jax_moe_lb.topology import LEVEL_NAMES, Level, Topology

MOST_JITTER = 1.0
"""Beyond, a rank takes e times as long as usual every other time, which is no jitter."""


@dataclass(frozen=True)
class Links:
    """Links describe one level: its members, and the links that each of them has to the others.

    A member is all that is inside it: of level `node` a node with all its GPUs. Its ranks share its links. With
    as many links as ranks each rank has one of its own (rails); with one link all ranks share it (the line of a
    datacenter).

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: members inside one member of the next outer level.
        bytes_per_s: what one link carries each way, in bytes per second: 50e9 for an interface of 400 Gbit/s, 360e9 for
            what an H100 reaches over NVLink.
        links: the links of one member; usually 8 for a node, one per GPU, and 1 for a GPU or a datacenter.
        latency_s: the time of one way, in seconds: usually 3e-6 inside a node, 10e-6 between nodes, milliseconds
            between datacenters.

    Raises:
        ValueError: the name is unknown, or a number is out of range.

    Examples:
        Sixteen nodes, each with eight interfaces of 400 Gbit/s:

        >>> from jax_moe_lb.sim import Links
        >>> Links("node", 16, bytes_per_s=50e9, links=8, latency_s=10e-6).links
        8
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
    """A cluster is an expert-parallel group of ranks, numbered row-major over the levels.

    Describe your machine with it for `simulate` and `replay`; `sim/presets` has some, and `jax-moe-lb calibrate` writes
    that of the machine it runs on.

    Args:
        levels: the links of every level, outermost first.
        gemm: says how long experts take.
        flops_per_s: the rate of everything before the experts, on one rank, in floating-point operations per second;
            usually a half to two thirds of the experts' peak.
        copy_bytes_per_s: what a rank's copy engines move each way, in bytes per second; `None` takes as much as its
            links.
        planner_s: the seconds from counts to plan of a planner that reads the counts; usually 60e-6 to 100e-6.
        domain_level: the outermost level inside a domain, in which expert weights may move; `None` takes the innermost.
        memory_bytes: the memory of one rank, in bytes; `None` if unknown, and then nothing is refused for it.
        hbm_bytes_per_s: what a rank reads from and writes to its memory, together: 3.35e12 by the datasheet of an H100.
            `None` takes permutations and sums of rows to cost nothing; see `sim/hbm.py`.
        communication: how the library that moves bytes does so; what XLA does, by default.
        jitter: the standard deviation of the logarithm of what a rank takes for a task, drawn for every rank and task
            with a mean of 1: 0.02 is a machine whose ranks differ by 2 %. Exchanges wait for the slowest.
        jitter_seed: the seed of these draws.

    Raises:
        ValueError: the levels are out of order, or a number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> cluster = Cluster((Links("node", 16, 50e9, links=8), Links("gpu", 8, 360e9)))
        >>> cluster.num_ranks, cluster.ranks_per_domain, cluster.topology().rails_per_node
        (128, 8, 8)
    """

    levels: tuple[Links, ...]
    gemm: Gemm = field(default_factory=AnalyticGemm)
    flops_per_s: float = 400e12
    copy_bytes_per_s: float | None = None
    planner_s: float = 0.0
    domain_level: str | None = None
    memory_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    communication: Communication = field(default_factory=Communication)
    jitter: float = 0.0
    jitter_seed: int = 0

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or names != [name for name in LEVEL_NAMES if name in names]:
            raise ValueError(f"Cluster.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        if self.domain_level is not None and self.domain_level not in names:
            raise ValueError(f"Cluster.domain_level is {self.domain_level!r}; expected one of {names}")
        for name in ("flops_per_s", "copy_bytes_per_s", "memory_bytes", "hbm_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"Cluster.{name} is {value}; expected a finite number above 0")
        if not 0 <= self.planner_s < math.inf:
            raise ValueError(f"Cluster.planner_s is {self.planner_s}; expected at least 0")
        if not 0 <= self.jitter <= MOST_JITTER or self.jitter_seed < 0:
            told = f"Cluster.jitter is {self.jitter}, of seed {self.jitter_seed}"
            raise ValueError(f"{told}; expected 0 to {MOST_JITTER}, of a seed of at least 0")
        for level, inner in zip(self.levels, self.inner, strict=True):
            # A rank uses one link, and all links are shared by equally many.
            if inner % level.links:
                raise ValueError(
                    f"Links({level.name!r}).links is {level.links}; "
                    f"expected a divisor of the {inner} ranks that share them"
                )

    @property
    def num_ranks(self) -> int:
        """Counts the ranks of the group, `R`."""
        return math.prod(level.size for level in self.levels)

    @property
    def inner(self) -> tuple[int, ...]:
        """Counts the ranks inside one member of every level, outermost first."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    @property
    def ranks_per_domain(self) -> int:
        """Counts the ranks of a domain, `M`."""
        return math.prod(level.size for level in self.levels[self._first_inside :])

    @property
    def _first_inside(self) -> int:
        names = [level.name for level in self.levels]
        return len(names) - 1 if self.domain_level is None else names.index(self.domain_level)

    def topology(self, sizes: tuple[int, ...] | None = None) -> Topology:
        """Makes the topology that balancers see.

        Args:
            sizes: the sizes of the levels, where a group has fewer ranks than the machine; `None` takes all.
        """
        sizes = tuple(level.size for level in self.levels) if sizes is None else sizes
        levels = tuple(
            # A rank gets its share of the links, as if all ranks of a member sent at once.
            Level(level.name, size, level.bytes_per_s * level.links / inner, level.latency_s)
            for level, size, inner in zip(self.levels, sizes, self.inner, strict=True)
        )
        domain = math.prod(sizes[self._first_inside :])
        # A group of fewer ranks has fewer of a node's rails.
        rails = math.gcd(self.levels[-2].links, sizes[-1], domain) if len(sizes) > 1 else 1
        return Topology(levels, domain, rails, flops_per_s=self.gemm.peak_flops_per_s)
