"""Expert domains are mesh axes.

Every level's axis is split in two: `dc` of size 8 with expert domains of 4 becomes `dc_domain` of size 2 and
`dc_offset` of size 4. Members of an expert domain differ in their offset, and only experts travel between them; members
of equal offset form an expert-parallel group of their own, and only tokens travel inside it. So HybridEP is plain
expert parallelism of a smaller degree, several times side by side, with the experts gathered over the offset axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from jax_moe_lb.topology import Level, Topology

DOMAIN, OFFSET = "_domain", "_offset"
"""The two halves of a split axis are called so, after its name."""


def hybrid_mesh(mesh: Mesh, domain_sizes: Mapping[str, int]) -> Mesh:
    """Splits axes of a mesh into expert domain and offset, with the same devices in the same order.

    Use it before `ExpertDomains.from_mesh`, for a layer with `Migrate`. Consecutive members of an axis make up an
    expert domain.

    Args:
        mesh: the mesh of the devices; none of its axes ends in `_domain` or `_offset`.
        domain_sizes: ranks of an expert domain on every axis to split, by its name; usually what
            `choose_expert_domains` finds. 1 is plain expert parallelism.

    Raises:
        ValueError: the mesh lacks an axis, a size does not divide it, or a name is taken.

    Examples:
        >>> import jax
        >>> from jax_moe_lb import hybrid_mesh
        >>> mesh = jax.make_mesh((2, 4), ("dc", "gpu"))
        >>> dict(hybrid_mesh(mesh, {"dc": 2, "gpu": 1}).shape)
        {'dc_domain': 1, 'dc_offset': 2, 'gpu_domain': 4, 'gpu_offset': 1}
    """
    for axis in domain_sizes:
        if axis not in mesh.axis_names:
            raise ValueError(f"domain_sizes names {axis!r}; expected an axis of the mesh, one of {mesh.axis_names}")
    parts = [_parts(axis, mesh.shape[axis], domain_sizes) for axis in mesh.axis_names]
    names = tuple(name for part in parts for name in part)
    sizes = [size for part in parts for size in part.values()]
    types = tuple(kind for part, kind in zip(parts, mesh.axis_types, strict=True) for _ in part)
    if len(set(names)) < len(names):
        raise ValueError(f"the split mesh has axes {names}; expected different names")
    # Row-major, so that neighbours on an axis share an expert domain.
    return Mesh(np.asarray(mesh.devices).reshape(sizes), names, axis_types=types)


def _parts(axis: str, size: int, domain_sizes: Mapping[str, int]) -> dict[str, int]:
    if axis not in domain_sizes:
        return {axis: size}
    domain_size = domain_sizes[axis]
    if domain_size < 1 or size % domain_size:
        raise ValueError(f"domain_sizes[{axis!r}] is {domain_size}; expected a divisor of the axis' size {size}")
    return {axis + DOMAIN: size // domain_size, axis + OFFSET: domain_size}


@dataclass(frozen=True)
class ExpertDomains:
    """These expert domains say how experts and tokens lie on a mesh of `hybrid_mesh`.

    Make them with `from_mesh` and give them to `Migrate`; give `between` to the layer as its topology. Ranks are
    numbered by expert domain, outermost level first, then by offset, innermost level first. So an expert domain is a
    block of ranks and holds a block of experts, in the order in which gathers leave them that go from the outermost
    level inwards. `jax.lax.axis_index` numbers ranks like that over `expert_axes`. The value is hashable.

    Args:
        between: the group that exchanges tokens: ranks of equal offset. The offset axes are data axes to it.
        offset_axes: the axes that experts are gathered over, innermost level first.
        domain_size: the ranks of an expert domain, the product of the sizes of these axes.

    Examples:
        >>> import jax
        >>> from jax_moe_lb import ExpertDomains, Topology, hybrid_mesh
        >>> mesh = jax.make_mesh((2, 4), ("dc", "gpu"))
        >>> topology = Topology.from_mesh(mesh, ("dc", "gpu"))
        >>> domains = ExpertDomains.from_mesh(hybrid_mesh(mesh, {"dc": 2, "gpu": 1}), topology)
        >>> domains.domain_size, domains.between.num_ranks, domains.expert_axes
        (2, 4, ('dc_domain', 'gpu_domain', 'gpu_offset', 'dc_offset'))
    """

    between: Topology
    offset_axes: tuple[str, ...]
    domain_size: int

    @classmethod
    def from_mesh(cls, mesh: Mesh, topology: Topology) -> "ExpertDomains":
        """Reads them off a split mesh.

        Args:
            mesh: a mesh of `hybrid_mesh`.
            topology: the topology of the mesh before it was split, whose rates the levels keep.

        Raises:
            ValueError: an expert axis of the topology is not split in the mesh, or its parts have other sizes.
        """
        if not topology.expert_axes:
            raise ValueError("topology has no expert_axes; expected one made by Topology.from_mesh")
        for axis, level in zip(topology.expert_axes, topology.levels, strict=True):
            found = {name: mesh.shape.get(name, 0) for name in (axis + DOMAIN, axis + OFFSET)}
            if math.prod(found.values()) != level.size:
                raise ValueError(
                    f"the mesh splits {axis!r} into {found}; expected parts of the topology's {level.size} members"
                )
        domain_axes = tuple(axis + DOMAIN for axis in topology.expert_axes)
        # Innermost first: gathers from the outermost level inwards leave the experts in this order.
        offset_axes = tuple(axis + OFFSET for axis in reversed(topology.expert_axes))
        levels = tuple(
            replace(level, size=mesh.shape[axis]) for axis, level in zip(domain_axes, topology.levels, strict=True)
        )
        between = replace(
            topology,
            levels=levels,
            ranks_per_domain=_inside(topology, levels),
            expert_axes=domain_axes,
            data_axes=topology.data_axes + offset_axes,
            # These ranks are others.
            ranks_per_process=None,
            processes=(),
        )
        return cls(between, offset_axes, math.prod(mesh.shape[axis] for axis in offset_axes))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Names the axes that experts are sharded over, expert domains first: put them into a `PartitionSpec`."""
        return self.between.expert_axes + self.offset_axes

    @property
    def whole(self) -> Topology:
        """Makes all ranks one group, whose domains are the expert domains: to plan for it, as `HybridEP` does."""
        # Two levels are enough, as planners ask only who shares a domain.
        levels = (Level("node", self.between.num_ranks), Level("gpu", self.domain_size))
        data_axes = tuple(axis for axis in self.between.data_axes if axis not in self.offset_axes)
        return Topology(levels, self.domain_size, expert_axes=self.expert_axes, data_axes=data_axes)


def _inside(topology: Topology, levels: tuple[Level, ...]) -> int:
    """Counts the ranks of one offset inside a domain of the hardware."""
    left, inside = topology.ranks_per_domain, 1
    for level, split in zip(reversed(topology.levels), reversed(levels), strict=True):
        # A domain that ends inside this level has of its parts as many as fit; one that does not has all.
        inside *= math.gcd(left, split.size) if left % level.size else split.size
        left = 1 if left % level.size else left // level.size
        if left == 1:
            break
    return inside
