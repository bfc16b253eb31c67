"""Moving experts inside their domains, whole or encoded, before any token is known."""

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
        encoded: of these experts.
        mean: the shared expert, `None` without one.
    """

    encoded: Encoded
    mean: Experts | None


@dataclass(frozen=True)
class Migrate:
    """Every rank gets the experts of all ranks of its domain, level by level.

    From the outermost level inwards, so that a rank receives its offset's experts alone over the slowest links. A
    domain of several levels gathers over each level's axis, never across two at once.

    It needs no token, so it may run long before the layer: see `prefetch.py`. The gradients' way home is the
    gather's transpose, a reduce-scatter over the same axes, also where the experts were encoded: gradients are
    those of the decoded experts, as if nothing were left out (straight through).

    With a codec whose base is remembered there is a state, what all ranks of the domain know of its experts: begin with
    `known`, call `update`. Else call it.

    Args:
        domains: of the mesh.
        codec: what travels.
    """

    domains: ExpertDomains
    codec: Codec = field(default_factory=Codec)

    def average(self, experts: Experts) -> Experts | None:
        """The shared expert of these home experts; `None` if the codec has no use for one. See `codec.average`."""
        return average(jax.lax.stop_gradient(experts), self.domains.expert_axes) if self.codec.shares else None

    def pack(self, experts: Experts, mean: Experts | None = None) -> Packed | None:
        """Encodes the home experts; best right after the optimizer step.

        Args:
            experts: the `L` home experts of this rank.
            mean: an earlier `average`, of the weights before the step for example; `None`: that of `experts`.

        Returns:
            What travels; `None` if the experts do as they are.

        Raises:
            ValueError: the codec's base is remembered.
        """
        if self.codec.remembers:
            raise ValueError("codec.base is CodecBase.REMEMBERED; expected another, as it needs a state: call update")
        if not self.codec.compresses:
            return None
        experts = jax.lax.stop_gradient(experts)
        if mean is None:
            mean = self.average(experts)
        return Packed(self.codec.encode(experts, mean), mean)

    def __call__(self, experts: Experts, packed: Packed | None = None) -> Experts:
        """The experts of the domain, its first rank's first.

        Args:
            experts: the `L` home experts of this rank, which stay as they are. Differentiable.
            packed: of `pack`; `None`: done here.

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
        """What `update` begins with: the domain's experts, which travel whole this once, `[L * M, ...]`."""
        return jax.lax.stop_gradient(self._gathered(experts))

    def update(self, experts: Experts, known: Experts) -> tuple[Experts, Experts]:
        """The experts of the domain, of which only what changed most has travelled.

        Args:
            experts: the `L` home experts of this rank, which stay as they are. Differentiable.
            known: what all ranks of the domain have of its experts: of `known`, or of the last call. A wider dtype than
                that of `experts` does. If it is off, calls to come correct it.

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
        return _reduce_scatter(upstream, axes), jnp.zeros_like(upstream)

    place.defvjp(lambda home, others: (place(home, others), None), backward)
    return place(home, jax.lax.stop_gradient(others))
