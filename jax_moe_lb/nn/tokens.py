"""Layout of the tokens of all ranks: dimensions of `x` split by mesh axes, and padding.

Routing does not depend on the order of tokens. Each rank therefore flattens its own block of `x`, and shards of
sequences (context parallelism) stay on the rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from jax_moe_lb.core.checks import check_integer
from jax_moe_lb.core.types import Axes, as_int32, iota
from jax_moe_lb.routing.routers import NO_EXPERT

Split = tuple[Axes, ...]
"""Mesh axes per dimension."""


def axis_names(axes: tuple[str, ...] | str | None) -> Axes:
    """Return an entry of a `PartitionSpec` as a tuple of axes."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def place(tree: PyTree, sharding: jax.sharding.Sharding, mesh: Mesh) -> PyTree:
    """Reshard a tree on a mesh with Explicit axes; on Auto axes, leave the sharding to the compiler."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)


def reshaped(array: Array, shape: tuple[int, ...], sharding: NamedSharding, mesh: Mesh) -> Array:
    """Reshape an array, and on a mesh with Explicit axes reshard it in the same operation."""
    # A plain reshape is not defined for every sharding of Explicit axes.
    if AxisType.Explicit not in mesh.axis_types:
        return array.reshape(shape)
    return jax.lax.reshape(array, shape, out_sharding=sharding)


@dataclass(frozen=True)
class TokenLayout:
    """Leading dimensions of the tokens in a `jax.shard_map` over all ranks."""

    shape: tuple[int, ...]  # leading dimensions of `x`
    sizes: tuple[int, ...]  # dimensions with the same number of tokens in the same order
    padding: tuple[int, ...]  # number of zeros appended to each of `sizes`
    split: Split  # mesh axes of each of `sizes`, after the padding
    mesh: Mesh  # mesh of the layer

    @property
    def is_padded(self) -> bool:
        """Whether ranks get padding tokens."""
        return any(self.padding)

    @property
    def spec(self) -> PartitionSpec:
        """Sharding of `sizes`."""
        return PartitionSpec(*(axes or None for axes in self.split))

    def enter(self, array: Array | None, fill: int = 0) -> Array | None:
        """Return an array of all tokens with the dimensions of this layout."""
        if array is None:
            return None
        rest = array.shape[len(self.shape) :]
        sizes = (*self.sizes, *rest)
        if not self.is_padded:
            return reshaped(array, sizes, NamedSharding(self.mesh, self.spec), self.mesh)
        array = self._unpadded(reshaped(array, sizes, NamedSharding(self.mesh, self._even(False)), self.mesh))
        widths = ((0, number) for number in (*self.padding, *[0] * len(rest)))
        return jnp.pad(array, tuple(widths), constant_values=fill)

    def leave(self, y: Array, sharding: NamedSharding) -> Array:
        """Remove the padding, and restore the shape and sharding of `x`."""
        if self.is_padded:
            y = place(y, NamedSharding(self.mesh, self._even(False)), self.mesh)
            y = self._unpadded(y[tuple(slice(size) for size in self.sizes)])
        return reshaped(y, (*self.shape, *y.shape[len(self.sizes) :]), sharding, self.mesh)

    def of_tokens(self, x: Array) -> NamedSharding:
        """Return the sharding of an array `[..., K]`, as of the tokens `x`, `[..., H]`."""
        sharding = jax.typeof(x).sharding
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(self.shape)]))

    def flatten(self, block: Array) -> Array:
        """Merge the dimensions of a rank's block: `[..., *]` to `[T, *]`."""
        return block.reshape(-1, *block.shape[len(self.sizes) :])

    def unflatten(self, y: Array) -> Array:
        """Return the inverse of `flatten`."""
        return y.reshape(*self._local, *y.shape[1:])

    def positions(self) -> Int[Array, "T"]:
        """Return the index in the flattened `x` of each token of this rank; call it inside `jax.shard_map`."""
        # Positions of padding tokens are arbitrary.
        index = jnp.zeros(1, jnp.int32)
        for size, local, axes in zip(self.sizes, self._local, self.split, strict=True):
            first = jax.lax.axis_index(axes) * local if axes else 0
            index = (index[:, None] * size + (iota(local) + first)[None]).reshape(-1)
        return index

    @property
    def _local(self) -> tuple[int, ...]:
        parts = zip(self.sizes, self.padding, self.split, strict=True)
        return tuple((size + more) // _ways(axes, self.mesh) for size, more, axes in parts)

    def _even(self, is_auto: bool) -> PartitionSpec:
        """Return the sharding before padding."""
        # Explicit axes do not shard a padded dimension.

        def even(size: int, more: int, axes: Axes) -> Axes:
            while more and (not is_auto or size % _ways(axes, self.mesh)) and axes:
                axes = axes[:-1]
            return axes

        parts = zip(self.sizes, self.padding, self.split, strict=True)
        return PartitionSpec(*(even(*part) or None for part in parts))

    def _unpadded(self, array: Array) -> Array:
        """Constrain Auto axes to shard the rows evenly."""
        # Without the constraint, XLA also shards these rows unevenly outside the layer, and pads them on each device.
        # If the rows come from `embedding[token_ids]`, XLA (jaxlib 0.10.2 and 0.12.0) adds the gradients of the padding
        # to row 0 of the embedding's gradient. These gradients are arbitrary, and NaN after a division by a sum of
        # zeros.
        if AxisType.Explicit in self.mesh.axis_types:
            return array
        # Inside a shard_map over other axes, the constraint needs the mesh with these axes Manual.
        around = jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(around if around.manual_axes else self.mesh, self._even(True))
        return jax.lax.with_sharding_constraint(array, sharding)


class GivenTokens(NamedTuple):
    """Properties of the tokens of all ranks, arguments of a call of `nn.MoE`; see there for the fields."""

    mask: Array | None
    token_ids: Array | None
    segments: Array | None
    num_segments: int | None
    experts: Array | None
    weights: Array | None

    def enter(self, layout: TokenLayout, *, needs_segments: bool) -> tuple[dict[str, Array | None], int | None]:
        """Return the arrays in the layout by the field of `TokenInfo`, and the number of all segments."""
        for name, other in (("segments", "num_segments"), ("num_segments", "segments"), ("weights", "experts")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"{other} is None; expected a value with {name}")
        if self.num_segments is not None:
            check_integer("num_segments", self.num_segments)
        # Pass a mask only for padding: masking costs memory passes over all tokens.
        mask = jnp.ones(layout.shape, bool) if layout.is_padded and self.mask is None else self.mask
        segments, number = self._numbered(layout.shape) if needs_segments else (None, None)
        info = {
            "mask": layout.enter(mask),
            # Routers hash ids, so upper bits may be lost.
            "ids": None if self.token_ids is None else layout.enter(self.token_ids.astype(jnp.int32)),
            "segments": layout.enter(segments, fill=-1),
            "experts": None if self.experts is None else layout.enter(as_int32(self.experts), fill=NO_EXPERT),
            "weights": layout.enter(self.weights),
        }
        return info, number

    def _numbered(self, shape: tuple[int, ...]) -> tuple[Array | None, int | None]:
        """Number the segments of all sequences; without dimensions for these, only given segments."""
        if self.segments is None and len(shape) < 2:
            return None, None
        rows, per_row = math.prod(shape[:-1]), self.num_segments or 1
        first = (iota(rows) * per_row).reshape(*shape[:-1], 1)
        if self.segments is None:
            return jnp.broadcast_to(first, shape), rows
        # A narrow dtype cannot hold `per_row`, and comparisons would wrap it around.
        segments = as_int32(self.segments)
        return jnp.where((segments >= 0) & (segments < per_row), first + segments, -1), rows * per_row


def token_layout(shape: tuple[int, ...], mesh: Mesh, axes: Axes, known: Sequence[Axes] = ()) -> TokenLayout:
    """Return the layout of `x` over the ranks of a layer, which moves no tokens between ranks if possible."""
    # Each axis splits the first dimension of divisible size: whole sequences if there are enough, and otherwise parts
    # of them. Other axes split the padded rest.
    split, left = _assigned(shape, mesh, axes, known)
    num_tokens, parts = math.prod(shape), [_ways(part, mesh) for part in split]
    blocks = [size // part for size, part in zip(shape, parts, strict=True)]
    last = max((dim for dim, part in enumerate(parts) if part > 1), default=-1)
    merged = sum(split, ())
    if math.prod(blocks[:last]) == 1 or last < 0:
        # The blocks are adjacent in the flattened tokens.
        sizes: tuple[int, ...] = (num_tokens,)
        split = (merged + left,)
        if left and last >= 0:
            sizes, split = (math.prod(parts), num_tokens // math.prod(parts)), (merged, left)
    else:
        sizes = shape
        if left:
            sizes, split = (*shape[:-1], parts[-1], blocks[-1]), (*split, left)
    padding = tuple(-size % _ways(part, mesh) for size, part in zip(sizes, split, strict=True))
    return TokenLayout(shape, sizes, padding, split, mesh)


def _assigned(shape: tuple[int, ...], mesh: Mesh, axes: Axes, known: Sequence[Axes]) -> tuple[Split, Axes]:
    """Return the axes per dimension, and the others."""
    split: list[Axes] = [()] * len(shape)
    left: Axes = ()
    places = {axis: (dim,) for dim, part in enumerate(known) for axis in part if axis in axes}
    # Known axes first, each in the order in which it splits its dimension.
    for axis in (*places, *(axis for axis in axes if axis not in places)):
        for dim in (*places.get(axis, ()), *range(len(shape))):
            if shape[dim] % (_ways(split[dim], mesh) * mesh.shape[axis]) == 0:
                split[dim] += (axis,)
                break
        else:
            left += (axis,)
    return tuple(split), left


def _ways(axes: Axes, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)
