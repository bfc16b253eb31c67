"""Expert domains of HybridEP as mesh axes, and the gather of experts inside them.

Every level's axis is split in two: `dc` of size 8 with expert domains of 4 becomes `dc_domain` of size 2 and
`dc_offset` of size 4. Members of an expert domain differ in their offset, and only experts travel between them. Members
of equal offset form an expert-parallel group, and only tokens travel inside it. HybridEP is therefore plain expert
parallelism of a smaller degree, several times side by side, with experts gathered over the offset axes. The gather, of
whole or encoded experts, does not depend on tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jax_moe_lb.collectives.permutes import gather_tiles, sum_tiles
from jax_moe_lb.core.topology import Level, Topology
from jax_moe_lb.core.types import pytree
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.transport.compression import Codec, Encoded, average

DOMAIN, OFFSET = "_domain", "_offset"
"""The two halves of a split axis are called so, after its name."""


def hybrid_mesh(mesh: Mesh, domain_sizes: Mapping[str, int]) -> Mesh:
    """Splits axes of a mesh into expert domain and offset, with the same devices in the same order.

    Use it before `ExpertDomains.from_mesh`, for a layer with `GatherExpertDomain`. Consecutive members of an axis make
    up an expert domain.

    Args:
        mesh: the mesh of the devices; none of its axes ends in `_domain` or `_offset`.
        domain_sizes: ranks of an expert domain on every axis to split, by its name; usually what
            `choose_expert_domains` finds. 1 is plain expert parallelism.

    Raises:
        ValueError: the mesh lacks an axis, a size does not divide it, or a name is taken.

    Examples:
        >>> import jax
        >>> from jax_moe_lb.transport import hybrid_mesh
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

    Make them with `from_mesh` and give them to `GatherExpertDomain`; give `between` to the layer as its topology. Ranks
    are numbered by expert domain, outermost level first, then by offset, innermost level first. So an expert domain is
    a block of ranks and holds a block of experts, in the order in which gathers leave them that go from the outermost
    level inwards. `jax.lax.axis_index` numbers ranks like that over `expert_axes`. The value is hashable.

    Args:
        between: the group that exchanges tokens: ranks of equal offset. The offset axes are data axes to it.
        offset_axes: the axes that experts are gathered over, innermost level first.
        domain_size: the ranks of an expert domain, the product of the sizes of these axes.

    Examples:
        >>> import jax
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.transport import ExpertDomains, hybrid_mesh
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


TravellingWeights = TypeVar("TravellingWeights", Experts, Encoded)


@pytree
class Packed:
    """A rank's home experts, ready to travel.

    Args:
        encoded: what was kept of these experts.
        mean: the shared expert, `None` where the codec has no use for one.
    """

    encoded: Encoded
    mean: Experts | None


@dataclass(frozen=True)
class GatherExpertDomain:
    """Brings every rank the experts of all ranks of its expert domain, level by level.

    Use it where links are slow, as between datacenters, and a rank sends more bytes of tokens than of experts: on a
    mesh of `hybrid_mesh`, with a layer over `domains.between`. It needs no token, so it may run long before the layer:
    see `scan_prefetched`.

    Experts travel from the outermost level inwards, so that a rank receives its offset's experts alone over the slowest
    links. An expert domain of several levels gathers over each level's axis, never across two at once. The gradients'
    way home is the gather's transpose, a reduce-scatter over the same axes, also where the experts were encoded:
    gradients are those of the decoded experts, as if nothing were left out (straight through).

    With a codec whose base is remembered there is a state, what all ranks of the expert domain know of its experts:
    begin with `known`, call `update`. Else call it.

    Args:
        domains: the expert domains of the mesh.
        codec: how much of an expert travels; all of it by default.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from jax_moe_lb import Experts, Topology
        >>> from jax_moe_lb.transport import ExpertDomains, GatherExpertDomain, hybrid_mesh
        >>> devices = jax.make_mesh((4,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
        >>> mesh = hybrid_mesh(devices, {"gpu": 2})  # two expert domains of two ranks
        >>> domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices, "gpu"))
        >>> experts = Experts(up=jnp.arange(4.0).reshape(4, 1, 1), down=jnp.zeros((4, 1, 1)))  # one on each rank
        >>> ranks = PartitionSpec(domains.expert_axes)
        >>> gathered = jax.shard_map(GatherExpertDomain(domains), mesh=mesh, in_specs=ranks, out_specs=ranks)(experts)
        >>> print(gathered.up.ravel())  # what ranks 0 to 3 hold, one after the other
        [0. 1. 0. 1. 2. 3. 2. 3.]
    """

    domains: ExpertDomains
    codec: Codec = field(default_factory=Codec)

    def average(self, experts: Experts) -> Experts | None:
        """Returns the mean of all experts; `None` if the codec has no use for it. See `codec.average`."""
        return average(jax.lax.stop_gradient(experts), self.domains.expert_axes) if self.codec.shares else None

    def pack(self, experts: Experts, mean: Experts | None = None) -> Packed | None:
        """Encodes the home experts; this is best done right after the optimizer step.

        Args:
            experts: the `L` home experts of this rank.
            mean: an earlier `average`, of the weights before the step for example. `None`, the default, takes that of
                `experts`.

        Returns:
            What travels; `None` if the experts do as they are.

        Raises:
            ValueError: the codec's base is remembered.
        """
        if self.codec.remembers:
            raise ValueError("codec.base is CodecBase.REMEMBERED; expected another, as it needs a state: call update")
        if not self.codec.compresses:
            return None
        # Gradients skip the codec: autodiff through a choice of entries would drop those of the entries that stayed.
        experts = jax.lax.stop_gradient(experts)
        if mean is None:
            mean = self.average(experts)
        return Packed(self.codec.encode(experts, mean), mean)

    def __call__(self, experts: Experts, packed: Packed | None = None) -> Experts:
        """Returns the experts of the expert domain, its first rank's first.

        Args:
            experts: the `L` home experts of this rank, which stay as they are. It is differentiable in them.
            packed: what `pack` returned; `None`, the default, packs here.

        Returns:
            `L * M` experts. To the topology `domains.between` they are the home experts of this rank.

        Raises:
            ValueError: the codec's base is remembered.
        """
        packed = self.pack(experts) if packed is None else packed
        if packed is None:
            return self._gathered(experts)
        return self._placed(experts, self.codec.decode(self._gathered(packed.encoded), packed.mean, experts))

    def known(self, experts: Experts) -> Experts:
        """Gathers what `update` begins with: the expert domain's experts, `[L * M, ...]`, whole this once."""
        return jax.lax.stop_gradient(self._gathered(experts))

    def update(self, experts: Experts, known: Experts) -> tuple[Experts, Experts]:
        """Returns the experts of the expert domain, of which only what changed most has travelled.

        Args:
            experts: the `L` home experts of this rank, which stay as they are. It is differentiable in them.
            known: what all ranks of the expert domain have of its experts: what `known` or the last call returned. A
                wider dtype than that of `experts` does. If it is off, calls to come correct it.

        Returns:
            `L * M` experts as `__call__` does, and what is known now.

        Raises:
            ValueError: the codec's base is not remembered, or `known` is of another number of experts.
        """
        num_home = experts.up.shape[0]
        if not self.codec.remembers:
            raise ValueError(f"codec is {self.codec}; expected a ratio above 1 and CodecBase.REMEMBERED, for update")
        if known.up.shape[0] != num_home * self.domains.domain_size:
            raise ValueError(
                f"known has {known.up.shape[0]} experts; expected the domain's {num_home * self.domains.domain_size}"
            )
        # What is known is a state and not a function of this step.
        known, now = jax.lax.stop_gradient((known, experts))
        first = jax.lax.axis_index(self.domains.offset_axes) * num_home
        mine = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, num_home), known)
        known = self.codec.decode(self._gathered(self.codec.encode(now, mine)), known, known)
        held = jax.tree.map(lambda k, w: k.astype(w.dtype), known, experts)
        return self._placed(experts, held), known

    def _gathered(self, tree: TravellingWeights) -> TravellingWeights:
        return jax.tree.map(lambda leaf: _gather(leaf, self.domains.offset_axes), tree)

    def _placed(self, experts: Experts, decoded: Experts) -> Experts:
        axes = self.domains.offset_axes
        return jax.tree.map(lambda home, others: _place_home(home, others, axes), experts, decoded)


def _gather(leaf: Array, axes: tuple[str, ...]) -> Array:
    """Blocks of all ranks along `axes`, in the order of `axis_index`; the last axis is gathered first."""
    for axis in reversed(axes):
        leaf = leaf if jax.lax.axis_size(axis) == 1 else gather_tiles(leaf, axis)
    return leaf


def _reduce_scatter(leaf: Array, axes: tuple[str, ...]) -> Array:
    """The transpose of `_gather`."""
    for axis in axes:
        leaf = leaf if jax.lax.axis_size(axis) == 1 else sum_tiles(leaf, axis)
    return leaf


def _place_home(home: Array, others: Array, axes: tuple[str, ...]) -> Array:
    """The decoded experts with this rank's own, exact, in their place; gradients go to the homes of all."""

    @jax.custom_vjp
    def place(home: Array, others: Array) -> Array:
        first = jax.lax.axis_index(axes) * home.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(others, home, first, 0)

    def backward(residuals: None, upstream: Array) -> tuple[Array, Array]:
        del residuals
        # Straight through: every rank used the experts as decoded, and each home gets the sum of what all ranks have
        # for it. The decoded ones get nothing, as that would count this rank's own share twice.
        return _reduce_scatter(upstream, axes), jnp.zeros_like(upstream)

    place.defvjp(lambda home, others: (place(home, others), None), backward)
    return place(home, jax.lax.stop_gradient(others))
