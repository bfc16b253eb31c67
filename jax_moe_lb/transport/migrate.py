"""Moving experts inside their expert domains, whole or encoded, before any token is known."""

from dataclasses import dataclass, field
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb._pytree import pytree
from jax_moe_lb.experts import Experts
from jax_moe_lb.hybrid import ExpertDomains
from jax_moe_lb.ops.gather_tiles import gather_tiles, sum_tiles
from jax_moe_lb.transport.codec import Codec, Encoded, average

Travelling = TypeVar("Travelling", Experts, Encoded)


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
class Migrate:
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
        >>> from jax_moe_lb import ExpertDomains, Experts, Migrate, Topology, hybrid_mesh
        >>> devices = jax.make_mesh((4,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
        >>> mesh = hybrid_mesh(devices, {"gpu": 2})  # two expert domains of two ranks
        >>> domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices, "gpu"))
        >>> experts = Experts(up=jnp.arange(4.0).reshape(4, 1, 1), down=jnp.zeros((4, 1, 1)))  # one on each rank
        >>> ranks = PartitionSpec(domains.expert_axes)
        >>> gathered = jax.shard_map(Migrate(domains), mesh=mesh, in_specs=ranks, out_specs=ranks)(experts)
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

    def _gathered(self, tree: Travelling) -> Travelling:
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
