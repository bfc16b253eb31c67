"""Simulated cluster: levels of links, rates of compute and copies, and collective algorithms.

`Communication` holds the algorithms of the communication library. `AnalyticGemm` and `MeasuredGemm` compute the seconds
of a rank from the rows of the slots.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Annotated

import numpy as np
from jaxtyping import Float, Num

from jax_moe_lb.core.checks import Count, Least, Natural, NonNegative, Positive, checked_fields, shown
from jax_moe_lb.core.topology import LEVEL_NAMES, Level, Topology

MOST_BYTES = 8.0
"""Maximum bytes per element of a token, as in float64."""


class Collective(StrEnum):
    """Algorithm of all-gathers, reduce-scatters and all-reduces; `network.py` counts its bytes and hops.

    Examples:
        >>> from jax_moe_lb.sim import Collective
        >>> [str(one) for one in Collective]
        ['ring', 'tree', 'hierarchical', 'direct']
    """

    RING = "ring"
    """One ring of all ranks in order, as in NCCL and Gloo for all-gathers compiled by XLA."""

    TREE = "tree"
    """Two binary trees, or recursive doubling: the number of hops is logarithmic in the size of each level."""

    HIERARCHICAL = "hierarchical"
    """A ring per level, one level after the other; only a rank's shard crosses the outer levels."""

    DIRECT = "direct"
    """Direct messages from every rank to all others at once, as in DeepEP's exchange of counts."""


@dataclass(frozen=True)
@checked_fields
class Communication:
    """Algorithms and formats of the communication library of a cluster; XLA's collectives on GPUs by default.

    Pass it to a `Cluster` that uses another library. The dispatch of a system decides the rows and hops of tokens: for
    DeepEP, which forwards tokens inside nodes, take `Forward`.

    Args:
        collectives: Algorithm of all-gathers, reduce-scatters and all-reduces; `RING` by default. It applies to counts,
            gathered experts and the gradients, and the shared expert of a codec.
        by_pairs: If True, an exchange of tokens pays one latency per pair of ranks in sequence, as in MPI's pairwise
            exchange. If False (default), all messages overlap.
        dispatch_bytes: Bytes per element of rows sent to experts: tokens, and gradients of outputs. None (default) is
            the model's `itemsize`; 1.03 is fp8 with one float32 scale per 128 elements.
        combine_bytes: Bytes per element of rows returning from experts: outputs, and gradients of tokens. None
            (default) is the model's `itemsize`; use 2 if only the dispatch uses fp8.
        shares_links: If True, overlapping exchanges share the links. If False (default), exchanges run in sequence, as
            XLA's collectives do on their single stream.
        padded: If True, exchanges are those of this library between processes on CPUs: padded permutes in sequence, and
            a ring on which all home experts pass every rank; see `sim/padded.py`. `simulate_uniform` ignores the
            padding. False by default.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Collective, Communication, Links
        >>> told_directly = Communication(collectives=Collective.DIRECT)
        >>> Cluster((Links("gpu", 8, 360e9),), communication=told_directly).communication.by_pairs
        False
    """

    collectives: Collective = Collective.RING
    by_pairs: bool = False
    dispatch_bytes: float | None = None
    combine_bytes: float | None = None
    shares_links: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("dispatch_bytes", "combine_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST_BYTES:
                raise ValueError(f"{name} is {value}; expected more than 0 and at most {MOST_BYTES}, or None")


RowsPerSlot = Num[np.ndarray, "R S"]
Seconds = Float[np.ndarray, "R"]


@dataclass(frozen=True)
@checked_fields
class AnalyticGemm:
    """Analytic model of a grouped FFN: an expert of `n` rows takes as long as `n + half_rows` rows at the peak rate.

    Use it for machines without measurements. An expert of `half_rows` rows runs at half the peak, because its weights
    are read regardless of the number of rows. The defaults are an assumption: 600 TFLOP/s reached in bfloat16, and the
    295 rows at which 989 TFLOP/s and 3.35 TB/s balance. For an H100, take the measured curve of its preset.

    Args:
        peak_flops_per_s: Rate of large products, in floating-point operations per second; 600e12 by default.
        half_rows: Rows of one expert at half the peak rate; 295 by default. Usually the ratio of the peak to the memory
            bandwidth, in operations per byte.
        launch_s: Launch overhead of one grouped FFN, in seconds; 10e-6 by default.

    Raises:
        ValueError: A number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import AnalyticGemm
        >>> gemm = AnalyticGemm(peak_flops_per_s=1e12, half_rows=100.0, launch_s=0.0)
        >>> gemm.seconds(np.array([[100, 0], [300, 100]]), row_flops=1e9).tolist()
        [0.2, 0.6]
    """

    peak_flops_per_s: Positive = 600e12
    half_rows: NonNegative = 295.0
    launch_s: NonNegative = 10e-6

    @property
    def slot_rows(self) -> float:
        """Time of a slot beyond the rows, in rows at the peak rate."""
        return self.half_rows

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Compute the seconds per rank.

        Args:
            rows: `[R, S]`, rows per slot.
            row_flops: Floating-point operations per row.
            launches: Number of grouped FFNs per rank, usually the number of rounds; 1 by default.

        Returns:
            `[R]` seconds; 0 for ranks without rows.
        """
        padded = np.where(rows > 0, rows + self.half_rows, 0.0).sum(1)
        return padded * row_flops / self.peak_flops_per_s + np.where(padded > 0, launches * self.launch_s, 0.0)


@dataclass(frozen=True)
@checked_fields
class MeasuredGemm:
    """Measured rate of a grouped FFN as a function of the rows per expert, as written by `jax-moe-lb calibrate`.

    Use it for every machine that can be measured. Between points, the time is interpolated linearly. Below the first
    point, the time is constant, as the weights are read regardless of the rows. Above the last point, the rate is
    constant. Experts of other shapes are assumed to run at the same rate; this assumption has not been measured.

    Args:
        rows: Points of the curve, in rows of one expert, in ascending order.
        flops_per_s: Rate at each point, in floating-point operations per second.
        launch_s: Launch overhead of one grouped FFN, in seconds; 0 by default, as measured rates include it.

    Raises:
        ValueError: The points do not ascend, the lengths differ, or a number is out of range.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb.sim import MeasuredGemm
        >>> gemm = MeasuredGemm(rows=(10.0, 100.0), flops_per_s=(1e11, 5e11))
        >>> gemm.seconds(np.array([[100], [200]]), row_flops=1e9).tolist()
        [0.2, 0.4]
    """

    rows: tuple[float, ...]
    flops_per_s: tuple[float, ...]
    launch_s: NonNegative = 0.0

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.flops_per_s):
            raise ValueError(
                f"rows has {len(self.rows)} points, flops_per_s {len(self.flops_per_s)}; expected as many, at least one"
            )
        if min(self.rows) <= 0 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows is {self.rows}; expected ascending numbers above 0")
        if not 0 < min(self.flops_per_s) <= max(self.flops_per_s) < math.inf:
            raise ValueError(f"flops_per_s is {self.flops_per_s}; expected finite rates above 0")

    @property
    def peak_flops_per_s(self) -> float:
        """Highest rate of the curve, in floating-point operations per second."""
        return max(self.flops_per_s)

    @property
    def slot_rows(self) -> float:
        """Time of a slot of the fewest rows beyond these rows, in rows at the peak rate."""
        return self.rows[0] * (self.peak_flops_per_s / self.flops_per_s[0] - 1)

    def seconds(self, rows: RowsPerSlot, row_flops: float, launches: int = 1) -> Seconds:
        """Compute the seconds per rank.

        Args:
            rows: `[R, S]`, rows per slot.
            row_flops: Floating-point operations per row.
            launches: Number of grouped FFNs per rank, usually the number of rounds; 1 by default.

        Returns:
            `[R]` seconds; 0 for ranks without rows.
        """
        points, rates = np.array(self.rows), np.array(self.flops_per_s)
        # Interpolate times instead of rates, in seconds per floating-point operation of a row.
        known = points / rates
        beyond = np.maximum(rows - points[-1], 0.0) / rates[-1]
        one = np.where(rows > 0, np.interp(rows, points, known) + beyond, 0.0).sum(1)
        return one * row_flops + np.where(one > 0, launches * self.launch_s, 0.0)


Gemm = AnalyticGemm | MeasuredGemm

MOST_JITTER = 1.0
"""Maximum standard deviation. At 1, one standard deviation is already a factor of e."""


@dataclass(frozen=True)
@checked_fields
class Links:
    """Links of one level: its members, and the links from each member to the others.

    A member contains all inner levels: a member of level `node` is a node with all its GPUs. Its ranks share its links.
    If a member has as many links as ranks, each rank has its own link (rails). If it has one link, all its ranks share
    it (the uplink of a datacenter).

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: Number of members inside one member of the next outer level.
        bytes_per_s: Rate of one link in each direction, in bytes per second: 50e9 for an interface of 400 Gbit/s, 360e9
            reached by an H100 over NVLink.
        links: Number of links per member; 1 by default. Usually 8 for a node (one per GPU), and 1 for a GPU or a
            datacenter.
        latency_s: One-way latency, in seconds; 0 by default. Usually 3e-6 inside a node, 10e-6 between nodes, and
            milliseconds between datacenters.

    Raises:
        ValueError: The name is unknown, or a number is out of range.

    Examples:
        Sixteen nodes, each with eight interfaces of 400 Gbit/s:

        >>> from jax_moe_lb.sim import Links
        >>> Links("node", 16, bytes_per_s=50e9, links=8, latency_s=10e-6).links
        8
    """

    name: str
    size: Count
    bytes_per_s: Positive
    links: Count = 1
    latency_s: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.name not in LEVEL_NAMES:
            raise ValueError(f"Links.name is {shown(self.name)}; expected one of {', '.join(LEVEL_NAMES)}")


@dataclass(frozen=True)
@checked_fields
class Cluster:
    """Simulated machine: one expert-parallel group of ranks, numbered row-major over the levels.

    Pass it to `simulate` and `replay`. `sim/presets` has some machines, and `jax-moe-lb calibrate` writes the
    description of the local machine.

    Args:
        levels: Links per level, outermost first.
        gemm: Cost model of expert FFNs; `AnalyticGemm()` by default.
        flops_per_s: Compute rate of one rank outside the experts, in floating-point operations per second; 400e12 by
            default. Usually a half to two thirds of the experts' peak.
        copy_bytes_per_s: Rate of a rank's copy engines in each direction, in bytes per second. None (default) is the
            rate of the links.
        planner_s: Seconds from counts to plan, for every planner that reads the counts; 0 by default. None is the time
            of each planner by `sim/planner_times.yaml`, and `host_wait_s` if GPUs plan on the host.
        host_wait_s: Seconds in which a device copies a few numbers to its host and waits for it; 20e-6 by default. A
            layer that decides against planning waits as long.
        domain_level: Outermost level inside a domain, in which plans may move expert weights. None (default) is the
            innermost level.
        memory_bytes: Memory of one rank, in bytes. None (default) disables the check of its capacity.
        hbm_bytes_per_s: Memory bandwidth of a rank, reads and writes together, in bytes per second: 3.35e12 in the
            datasheet of an H100. None (default) makes permutations and sums of rows free; see `sim/hbm.py`.
        round_s: Seconds of sorts, addresses and other small operations in one round of a layer, a third of them
            forward and the rest backward; 0 by default.
        joins_weights: If True, home experts and replicas are copied into one array for the products, as on CPUs and
            TPUs. If False (default), kernels of NVIDIA GPUs read both in place; see `sim/hbm.py`.
        communication: Algorithms and formats of the communication library; XLA's by default.
        backward_factor: Time of the experts' backward pass over that of the forward pass, with rematerialized hidden
            activations; 3 by default, the ratio of the floating-point operations.
        jitter: Standard deviation of the logarithm of a task's duration; 0 by default. Each rank and task samples a
            factor with mean 1. At 0.02, ranks differ by 2 %. Exchanges wait for the slowest rank.
        jitter_seed: Random seed of these factors; 0 by default.

    Raises:
        ValueError: The levels are out of order, or a number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import Cluster, Links
        >>> cluster = Cluster((Links("node", 16, 50e9, links=8), Links("gpu", 8, 360e9)))
        >>> cluster.num_ranks, cluster.ranks_per_domain, cluster.topology().rails_per_node
        (128, 8, 8)
    """

    levels: tuple[Links, ...]
    gemm: Gemm = field(default_factory=AnalyticGemm)
    flops_per_s: Positive = 400e12
    copy_bytes_per_s: Positive | None = None
    planner_s: NonNegative | None = 0.0
    host_wait_s: NonNegative = 20e-6
    domain_level: str | None = None
    memory_bytes: Positive | None = None
    hbm_bytes_per_s: Positive | None = None
    round_s: NonNegative = 0.0
    joins_weights: bool = False
    communication: Communication = field(default_factory=Communication)
    backward_factor: Annotated[float, Least(1.0)] = 3.0
    jitter: float = 0.0
    jitter_seed: Natural = 0

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names or names != [name for name in LEVEL_NAMES if name in names]:
            raise ValueError(f"Cluster.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        if self.domain_level is not None and self.domain_level not in names:
            raise ValueError(f"Cluster.domain_level is {shown(self.domain_level)}; expected one of {names}")
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ValueError(f"Cluster.jitter is {self.jitter}; expected 0 to {MOST_JITTER}")
        for level, inner in zip(self.levels, self.inner, strict=True):
            # Each rank uses one link, and every link serves equally many ranks.
            if inner % level.links:
                raise ValueError(
                    f"Links({level.name!r}).links is {level.links}; "
                    f"expected a divisor of the {inner} ranks that share them"
                )

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks of the group, `R`."""
        return math.prod(level.size for level in self.levels)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Number of ranks inside one member per level, outermost first."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))

    @property
    def ranks_per_domain(self) -> int:
        """Number of ranks of a domain, `M`."""
        return math.prod(level.size for level in self.levels[self.first_inside :])

    @property
    def first_inside(self) -> int:
        """Index of the outermost level inside a domain."""
        names = [level.name for level in self.levels]
        return len(names) - 1 if self.domain_level is None else names.index(self.domain_level)

    def topology(self, sizes: tuple[int, ...] | None = None) -> Topology:
        """Build the topology used by balancers.

        Args:
            sizes: Sizes of the levels, for a group of fewer ranks than the machine. None (default) is the whole
                machine.

        Returns:
            Topology with each rank's share of the links, domains and rails.
        """
        return _topology(self, tuple(level.size for level in self.levels) if sizes is None else sizes)


@lru_cache(maxsize=256)
def _topology(cluster: Cluster, sizes: tuple[int, ...]) -> Topology:
    """Build the topology of a group, once for all layers and choices of a search."""
    levels = tuple(
        # Give each rank its share of the links, as if all ranks of a member sent at once.
        Level(level.name, size, level.bytes_per_s * level.links / inner, level.latency_s)
        for level, size, inner in zip(cluster.levels, sizes, cluster.inner, strict=True)
    )
    domain = math.prod(sizes[cluster.first_inside :])
    # A group of fewer ranks has fewer rails of a node.
    rails = math.gcd(cluster.levels[-2].links, sizes[-1], domain) if len(sizes) > 1 else 1
    return Topology(levels, domain, rails, flops_per_s=cluster.gemm.peak_flops_per_s)
