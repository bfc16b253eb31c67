"""A simulated cluster: levels of links, rates of compute and copies, and algorithms of collectives.

`Communication` has the algorithms of the communication library. `AnalyticGemm` and `MeasuredGemm` give the seconds of a
rank for the rows of its slots.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from jaxtyping import Float, Num

from jax_moe_lb.core.topology import LEVEL_NAMES, Level, Topology

MOST_BYTES = 8.0
"""A number of a token has at most so many bytes: those of float64."""


class Collective(StrEnum):
    """It is how an all-gather, a reduce-scatter or an all-reduce goes; `network.py` counts its bytes and hops.

    Examples:
        >>> from jax_moe_lb.sim import Collective
        >>> [str(one) for one in Collective]
        ['ring', 'tree', 'hierarchical', 'direct']
    """

    RING = "ring"
    """One ring of all ranks in their order, as NCCL and Gloo have for what XLA compiles to an all-gather."""

    TREE = "tree"
    """As many hops as the logarithm of each level's size: two binary trees, or doubling."""

    HIERARCHICAL = "hierarchical"
    """A ring of each level, one level after the other, with its shard alone across the outer ones."""

    DIRECT = "direct"
    """Each rank to every other at once, as DeepEP tells counts."""


@dataclass(frozen=True)
class Communication:
    """Describes what moves the bytes of a cluster; the default is what XLA's collectives do on GPUs.

    Give it to a `Cluster` where another library moves them.

    Args:
        collectives: the algorithm of all-gathers, reduce-scatters and all-reduces: of counts, gathered experts and
            their gradients, and the shared expert of a codec.
        by_pairs: whether an exchange of tokens pays a latency for every pair of ranks, one after the other, as in
            MPI's pairwise exchange; else all messages are under way at once.
        by_level: whether tokens go level by level, as DeepEP sends them: to their offset in another node, and from
            there inside it; else straight to their rank.
        once_per_member: whether a token with several experts in one member of a level, a node or a rank, is sent there
            once, and what its experts put out is summed before it returns. Only where it goes level by level.
        dispatch_bytes: the bytes of a number of a token on its way to experts, or of its gradient; `None`: the model's.
            1.03 is fp8 with a scale in float32 for every 128.
        combine_bytes: likewise of what returns; 2 where only the dispatch is in fp8.
        shares_links: whether exchanges that overlap share the links; else one waits for the other, as XLA's collectives
            do on their one stream.

    Raises:
        ValueError: a number is out of range, or tokens that go straight are to be sent once.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Collective, Communication, Links
        >>> told_directly = Communication(collectives=Collective.DIRECT)
        >>> Cluster((Links("gpu", 8, 360e9),), communication=told_directly).communication.by_pairs
        False
    """

    collectives: Collective = Collective.RING
    by_pairs: bool = False
    by_level: bool = False
    once_per_member: bool = False
    dispatch_bytes: float | None = None
    combine_bytes: float | None = None
    shares_links: bool = False

    def __post_init__(self) -> None:
        if self.once_per_member and not self.by_level:
            raise ValueError("once_per_member is True; expected by_level as well, as copies are made where it arrives")
        for name in ("dispatch_bytes", "combine_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_BYTES:
                raise ValueError(f"{name} is {value}; expected more than 0 and at most {MOST_BYTES}, or None")


RowsPerSlot = Num[np.ndarray, "R S"]
Seconds = Float[np.ndarray, "R"]


@dataclass(frozen=True)
class AnalyticGemm:
    """This model is stated, not measured: an expert of `n` rows takes as long as `n + half_rows` rows at the peak.

    Use it where nobody has measured the machine. At `half_rows` rows it runs at half the peak, as weights must be read
    however few rows there are. The defaults are an assumption for an H100: 600 TFLOP/s reached in bfloat16, and the 295
    rows at which 989 TFLOP/s and 3.35 TB/s balance.

    Args:
        peak_flops_per_s: the rate of large products, in floating-point operations per second.
        half_rows: the rows of one expert at half the peak; usually the peak over the memory's rate, in operations per
            byte.
        launch_s: the seconds that a grouped FFN takes whatever its rows, usually 10e-6.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import AnalyticGemm
        >>> gemm = AnalyticGemm(peak_flops_per_s=1e12, half_rows=100.0, launch_s=0.0)
        >>> gemm.seconds(np.array([[100, 0], [300, 100]]), row_flops=1e9).tolist()
        [0.2, 0.6]
    """

    peak_flops_per_s: float = 600e12
    half_rows: float = 295.0
    launch_s: float = 10e-6

    def __post_init__(self) -> None:
        if not 0 < self.peak_flops_per_s < math.inf:
            raise ValueError(f"peak_flops_per_s is {self.peak_flops_per_s}; expected a finite rate above 0")
        for name, value in (("half_rows", self.half_rows), ("launch_s", self.launch_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number, at least 0")

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Computes the seconds of each rank.

        Args:
            rows: `[R, S]`, the rows of each slot.
            row_flops: the floating-point operations of a row.
            launches: how many grouped FFNs the rows are cut into, usually the rounds.
        """
        padded = np.where(rows > 0, rows + self.half_rows, 0.0).sum(1)
        return padded * row_flops / self.peak_flops_per_s + np.where(padded > 0, launches * self.launch_s, 0.0)


@dataclass(frozen=True)
class MeasuredGemm:
    """This model is a curve: the rate at which experts of so many rows run, as `jax-moe-lb calibrate` measures it.

    Use it wherever the machine can be measured. Between points the time is interpolated linearly. Below the first it is
    that of the first, as the weights are read whatever the rows. Beyond the last the rate is that of the last. Experts
    of another shape are taken to run at the same rate; how far that holds nobody has measured.

    Args:
        rows: the points of the curve, rows of one expert, ascending.
        flops_per_s: the rate at each point, in floating-point operations per second.
        launch_s: the seconds that a grouped FFN takes whatever its rows; usually 0, as the curve has them in it.

    Raises:
        ValueError: the points do not ascend, or a number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import MeasuredGemm
        >>> gemm = MeasuredGemm(rows=(10.0, 100.0), flops_per_s=(1e11, 5e11))
        >>> gemm.seconds(np.array([[100], [200]]), row_flops=1e9).tolist()
        [0.2, 0.4]
    """

    rows: tuple[float, ...]
    flops_per_s: tuple[float, ...]
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.flops_per_s):
            raise ValueError(f"rows has {len(self.rows)} points, flops_per_s {len(self.flops_per_s)}; expected as many")
        if min(self.rows) <= 0 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows is {self.rows}; expected ascending numbers above 0")
        if not 0 < min(self.flops_per_s) <= max(self.flops_per_s) < math.inf:
            raise ValueError(f"flops_per_s is {self.flops_per_s}; expected finite rates above 0")
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"launch_s is {self.launch_s}; expected a finite number, at least 0")

    @property
    def peak_flops_per_s(self) -> float:
        """Finds the highest rate of the curve, in floating-point operations per second."""
        return max(self.flops_per_s)

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Computes the seconds of each rank.

        Args:
            rows: `[R, S]`, the rows of each slot.
            row_flops: the floating-point operations of a row.
            launches: how many grouped FFNs the rows are cut into, usually the rounds.
        """
        points, rates = np.array(self.rows), np.array(self.flops_per_s)
        # Times are interpolated, not rates: in seconds of one floating-point operation per row.
        known = points / rates
        beyond = np.maximum(rows - points[-1], 0.0) / rates[-1]
        one = np.where(rows > 0, np.interp(rows, points, known) + beyond, 0.0).sum(1)
        return one * row_flops + np.where(one > 0, launches * self.launch_s, 0.0)


Gemm = AnalyticGemm | MeasuredGemm

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
            `None` takes permutations and sums of rows to cost nothing; see `sim/memory.py`.
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
