"""Where the ranks of an expert-parallel group sit, and how fast they reach each other."""

import math
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

LEVEL_NAMES = ("dc", "node", "gpu")


@dataclass(frozen=True)
class Level:
    """One level of the machine, e.g. the nodes of a datacenter.

    Args:
        name: `"dc"`, `"node"` or `"gpu"`.
        size: members of this level inside one member of the next outer level.
        bytes_per_s: what one rank can send to a rank that differs at this level, in
            bytes per second and one direction; `None` if unknown.
        latency_s: one-way latency between such ranks in seconds; `None` if unknown.
    """

    name: str
    size: int
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        if self.name not in LEVEL_NAMES:
            raise ValueError(f"Level.name is {self.name!r}; expected one of {LEVEL_NAMES}")
        _require_positive(f"Level({self.name!r}).size", self.size)
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"Level({self.name!r}).bytes_per_s is {self.bytes_per_s}; expected > 0")
        if self.latency_s is not None and not self.latency_s >= 0:
            raise ValueError(f"Level({self.name!r}).latency_s is {self.latency_s}; expected >= 0")


@dataclass(frozen=True)
class Topology:
    """The expert-parallel group: levels, domains, rails, and its mesh axes.

    Hashable, so that it can be a static argument of `jax.jit`. Ranks are numbered
    row-major over `levels`, outermost first, as `jax.lax.axis_index` numbers them.

    Args:
        levels: outermost first; the product of their sizes is `R`.
        ranks_per_domain: `M`, the ranks among which expert weights may move; divides `R`.
        rails_per_node: `N`, network interfaces of a node: of `ranks_per_node` ranks.
        expert_axes: the mesh axes that make up the group, outermost first; empty for a
            topology that only plans.
        data_axes: the mesh axes over which tokens, but not experts, are split.
        flops_per_s: what one rank computes per second, in floating-point operations.
    """

    levels: tuple[Level, ...]
    ranks_per_domain: int
    rails_per_node: int = 1
    expert_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    flops_per_s: float | None = None

    def __post_init__(self) -> None:
        order = [LEVEL_NAMES.index(level.name) for level in self.levels]
        if not self.levels or order != sorted(set(order)):
            names = [level.name for level in self.levels]
            raise ValueError(f"Topology.levels are {names}; expected some of {LEVEL_NAMES}, in this order")
        _require_positive("Topology.ranks_per_domain", self.ranks_per_domain)
        _require_positive("Topology.rails_per_node", self.rails_per_node)
        if self.num_ranks % self.ranks_per_domain:
            raise ValueError(
                f"Topology.ranks_per_domain is {self.ranks_per_domain}; "
                f"expected a divisor of the {self.num_ranks} ranks"
            )
        if self.flops_per_s is not None and not self.flops_per_s > 0:
            raise ValueError(f"Topology.flops_per_s is {self.flops_per_s}; expected > 0")

    @property
    def num_ranks(self) -> int:
        """`R`."""
        return math.prod(level.size for level in self.levels)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share the rails: those inside the innermost level, or a domain where that is smaller.

        Expert weights may move further, over the rails, where `ranks_per_domain` says so.
        """
        return min(self.levels[-1].size, self.ranks_per_domain)

    @property
    def num_domains(self) -> int:
        """`R / M`."""
        return self.num_ranks // self.ranks_per_domain

    @classmethod
    def flat(cls, num_ranks: int, ranks_per_domain: int | None = None) -> "Topology":
        """One level of `num_ranks` ranks, off any mesh: what a planner needs to know."""
        _require_positive("num_ranks", num_ranks)
        return cls((Level("gpu", num_ranks),), num_ranks if ranks_per_domain is None else ranks_per_domain)

    @classmethod
    def from_mesh(
        cls,
        mesh: Mesh | AbstractMesh,
        expert_axis: str | tuple[str, ...] = "expert",
        *,
        ranks_per_domain: int | None = None,
        rails_per_node: int = 1,
        bytes_per_s: tuple[float, ...] | None = None,
        latency_s: tuple[float, ...] | None = None,
        flops_per_s: float | None = None,
    ) -> "Topology":
        """Reads the topology off a mesh.

        Args:
            mesh: its axes named in `expert_axis` form the group; all others carry data.
            expert_axis: one name, or up to three, outermost first: they become the
                innermost of the levels dc, node, gpu. A level without an axis has size 1.
            ranks_per_domain: `M`; the size of the innermost axis by default.
            rails_per_node: `N`.
            bytes_per_s: bandwidth per axis, in bytes per second, in the order of `expert_axis`.
            latency_s: one-way latency per axis, in seconds, likewise.
            flops_per_s: speed of one rank, in floating-point operations per second.

        Raises:
            ValueError: an axis that the mesh lacks, more than three axes, or a number of
                rates that differs from the number of axes.
        """
        axes = (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
        if not 1 <= len(set(axes)) == len(axes) <= len(LEVEL_NAMES):
            raise ValueError(f"expert_axis is {expert_axis!r}; expected one to three different mesh axes")
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(f"expert_axis names {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
        rates = _per_axis("bytes_per_s", bytes_per_s, axes)
        latencies = _per_axis("latency_s", latency_s, axes)
        names = LEVEL_NAMES[-len(axes) :]
        sizes = [mesh.shape[axis] for axis in axes]
        levels = tuple(map(Level, names, sizes, rates, latencies))
        return cls(
            levels=levels,
            ranks_per_domain=levels[-1].size if ranks_per_domain is None else ranks_per_domain,
            rails_per_node=rails_per_node,
            expert_axes=axes,
            data_axes=tuple(axis for axis in mesh.axis_names if axis not in axes),
            flops_per_s=flops_per_s,
        )


def _per_axis(name: str, values: tuple[float, ...] | None, axes: tuple[str, ...]) -> tuple[float | None, ...]:
    if values is None:
        return (None,) * len(axes)
    if len(values) != len(axes):
        raise ValueError(f"{name} has {len(values)} values; expected one per expert axis {axes}")
    return tuple(values)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")
