"""Experts in fewer bytes: a base that the receiver has, and the largest entries of the difference to it.

HybridEP's parameter-efficient migration takes the mean of all experts for the base: where experts resemble each other,
few entries of the difference carry most of it. From one step of training to the next an expert resembles itself far
more; so the base may also be what the receiver last had of it: error feedback, as EF21 (arXiv 2106.05203) has it for
gradients.
"""

import math
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_moe_lb._pytree import pytree
from jax_moe_lb._varying import vary_like
from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.one_way import near_neighbours
from jax_moe_lb.types import wide_dtype


@pytree
class Encoded:
    """The kept entries of the weights of `G` experts: what travels.

    Args:
        values: for each kind of weights, `[G, k]`.
        indices: where they stand in the flattened weights of their expert, `[G, k]`, as 16-bit integers where those
            suffice.
    """

    values: tuple[Array, ...]
    indices: tuple[Array, ...]


class CodecBase(Enum):
    """What an expert is encoded as the difference to."""

    ZERO = "zero"
    """Nothing: the largest entries of the expert itself."""
    SHARED = "shared"
    """The mean of all experts, which every rank computes: an all-reduce (the paper's shared expert)."""
    REMEMBERED = "remembered"
    """What the ranks of the domain decoded the last time, and kept: what one step leaves out, the next ones send."""


@dataclass(frozen=True)
class Codec:
    """How much of an expert travels.

    Args:
        ratio: bytes of an expert over the bytes that stand for it, indices included; 1: the expert as it is.
            An index costs as much as half a float32 value, or all of it, so just above 1 already only two thirds or
            half of the entries are kept.
        base: what entries are the difference to.
    """

    ratio: float = 1.0
    base: CodecBase = CodecBase.SHARED

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < math.inf:
            raise ValueError(f"Codec.ratio is {self.ratio}; expected a finite number, at least 1")

    @property
    def compresses(self) -> bool:
        """Whether anything is left out."""
        return self.ratio > 1

    @property
    def shares(self) -> bool:
        """Whether ranks need the mean of all experts."""
        return self.compresses and self.base is CodecBase.SHARED

    @property
    def remembers(self) -> bool:
        """Whether ranks keep what they decoded, for the next time."""
        return self.compresses and self.base is CodecBase.REMEMBERED

    def num_kept(self, num_entries: int, itemsize: int) -> int:
        """`k`: entries of a matrix of so many entries that fit into its bytes over the ratio; at least 1."""
        if not self.compresses:
            return num_entries
        per_entry = itemsize + _index_dtype(num_entries).itemsize
        return max(1, math.floor(num_entries * itemsize / (self.ratio * per_entry)))

    def encoded_bytes(self, experts: Experts) -> int:
        """Bytes of these experts while they travel, values and indices; the shared expert is not counted."""
        return sum(self._leaf_bytes(leaf) for leaf in jax.tree.leaves(experts))

    def _leaf_bytes(self, leaf: Array) -> int:
        num_entries, itemsize = math.prod(leaf.shape[1:]), leaf.dtype.itemsize
        extra = _index_dtype(num_entries).itemsize if self.compresses else 0
        return leaf.shape[0] * self.num_kept(num_entries, itemsize) * (itemsize + extra)

    def encode(self, experts: Experts, base: Experts | None) -> Encoded:
        """Keeps the largest entries.

        Args:
            experts: `G` of them.
            base: one expert for all of them, or one for each; `None`: zeros. Receivers must have the same.
        """
        residual = jax.tree.map(lambda w: w.astype(wide_dtype(w)), experts)
        if base is not None:
            residual = jax.tree.map(lambda r, b: r - b.reshape(-1, *r.shape[1:]).astype(r.dtype), residual, base)
        pairs = [self._largest(r, w) for r, w in zip(jax.tree.leaves(residual), jax.tree.leaves(experts), strict=True)]
        return Encoded(tuple(values for values, _ in pairs), tuple(indices for _, indices in pairs))

    def _largest(self, residual: Array, like: Array) -> tuple[Array, Array]:
        flat = residual.reshape(residual.shape[0], -1)
        num_entries = flat.shape[1]
        indices = jax.lax.top_k(jnp.abs(flat), self.num_kept(num_entries, like.dtype.itemsize))[1]
        values = jnp.take_along_axis(flat, indices, axis=1).astype(like.dtype)
        return values, indices.astype(_index_dtype(num_entries))

    def decode(self, encoded: Encoded, base: Experts | None, like: Experts) -> Experts:
        """The experts that `encoded` stands for.

        Args:
            encoded: of `encode`.
            base: that of `encode`.
            like: experts of this kind, in the dtype of the result; their number does not matter.
        """
        leaves, tree = jax.tree.flatten(like)
        bases = [None] * len(leaves) if base is None else jax.tree.leaves(base)
        parts = zip(encoded.values, encoded.indices, bases, leaves, strict=True)
        return jax.tree.unflatten(tree, [_fill(*part) for part in parts])


def _fill(values: Array, indices: Array, base: Array | None, like: Array) -> Array:
    """Entries added to the base, or to zeros: one scatter."""
    num_experts, shape = values.shape[0], like.shape[1:]
    num_entries = math.prod(shape)
    dtype = like.dtype if base is None else wide_dtype(like)
    start = jnp.zeros((1, num_entries), dtype) if base is None else base.reshape(-1, num_entries).astype(dtype)
    expert = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[:, None], indices.shape)
    flat = jnp.broadcast_to(start, (num_experts, num_entries))
    # The zero gives the base the manual axes of the values.
    flat = vary_like(flat, values)
    filled = flat.at[expert, indices.astype(jnp.int32)].add(values.astype(dtype), unique_indices=True)
    return filled.reshape(num_experts, *shape).astype(like.dtype)


def average(experts: Experts, axes: tuple[str, ...]) -> Experts:
    """The mean of the experts of all ranks over `axes`, one expert, equal on all of them: an all-reduce.

    Any expert that is equal on all ranks and near the others will do. So take the weights before an optimizer step:
    the all-reduce then runs beside the backward pass, and is done when the step is.
    """
    axes = near_neighbours(axes)

    def mean(leaf: Float[Array, "G *X"]) -> Array:
        total = jax.lax.psum(leaf.astype(wide_dtype(leaf)).sum(0), axes)
        return (total / (leaf.shape[0] * jax.lax.axis_size(axes))).astype(leaf.dtype)

    return jax.tree.map(mean, experts)


def _index_dtype(num_entries: int) -> np.dtype:
    return np.dtype(np.uint16 if num_entries <= 1 << 16 else np.int32)
