"""Experts and rows in fewer bytes while they travel.

`Codec` sends the largest entries of the difference between an expert and a base that the receiver has. HybridEP's
parameter-efficient migration uses the mean of all experts as the base. An expert resembles its own earlier weights more
closely, so the base may also be the last decoded weights, with error feedback as in EF21 (arXiv 2106.05203).

`QuantizedTransfer` sends rows as fp8 or int8 with one scale per block.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32

from jax_moe_lb.collectives.permutes import near_neighbours
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import DType, pytree, wide_dtype
from jax_moe_lb.kernels.experts import Experts


@pytree
class Encoded:
    """The kept entries of the weights of `G` experts: what travels.

    Args:
        values: for each kind of weights, `[G, k]`, the entries in the dtype of the weights.
        indices: for each kind of weights, `[G, k]`, where they stand in the flattened weights of their expert, as
            16-bit integers where those suffice.
    """

    values: tuple[Array, ...]
    indices: tuple[Array, ...]


class CodecBase(Enum):
    """What an expert is encoded as the difference to: choose it as `Codec(base=...)`.

    `SHARED`, the paper's and the default, needs no memory beyond one expert. `REMEMBERED` loses far less of a model in
    training, and keeps a copy of every expert of the expert domain. `ZERO` is for comparison.

    Examples:
        >>> from jax_moe_lb.transport import Codec, CodecBase
        >>> Codec(ratio=50.0, base=CodecBase.REMEMBERED).remembers
        True
    """

    ZERO = "zero"
    """Nothing: the largest entries of the expert itself."""
    SHARED = "shared"
    """The mean of all experts, which every rank computes: an all-reduce (the paper's shared expert)."""
    REMEMBERED = "remembered"
    """What the ranks of the domain decoded the last time, and kept: what one step leaves out, the next ones send."""


@dataclass(frozen=True)
class Codec:
    """Says how much of an expert travels in `GatherExpertDomain`.

    Use a ratio above 1 where the links between the ranks of an expert domain are slow. What it leaves out changes the
    outputs, and how much a model minds has to be tried: the paper trains small ones with 50.

    Args:
        ratio: the bytes of an expert over the bytes that stand for it, indices included. 1, the default, is the expert
            as it is; 50 is the paper's largest. An index costs as much as half a float32 value, or all of it, so just
            above 1 already only two thirds or half of the entries are kept.
        base: what entries are the difference to.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import Experts
        >>> from jax_moe_lb.transport import Codec, CodecBase
        >>> experts = Experts(up=jnp.array([[[1.0, -9.0], [0.5, 4.0]]]), down=jnp.array([[[2.0, 0.0], [0.0, 1.0]]]))
        >>> codec = Codec(ratio=2.0, base=CodecBase.ZERO)
        >>> codec.encoded_bytes(experts), experts.nbytes
        (12, 32)
        >>> encoded = codec.encode(experts, base=None)
        >>> print(codec.decode(encoded, base=None, like=experts).up)
        [[[ 0. -9.]
          [ 0.  0.]]]
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
        """Returns `k`, how many entries of a matrix fit into its bytes over the ratio; at least 1.

        Args:
            num_entries: how many entries the matrix has.
            itemsize: the bytes of one entry.
        """
        if not self.compresses:
            return num_entries
        per_entry = itemsize + _index_dtype(num_entries).itemsize
        return max(1, math.floor(num_entries * itemsize / (self.ratio * per_entry)))

    def encoded_bytes(self, experts: Experts) -> int:
        """Returns the bytes of these experts while they travel, values and indices; the shared expert is not counted.

        Args:
            experts: weights or their shapes and dtypes, `[G, ...]` each.
        """
        return sum(self._leaf_bytes(leaf) for leaf in jax.tree.leaves(experts))

    def _leaf_bytes(self, leaf: Array) -> int:
        num_entries, itemsize = math.prod(leaf.shape[1:]), leaf.dtype.itemsize
        extra = _index_dtype(num_entries).itemsize if self.compresses else 0
        return leaf.shape[0] * self.num_kept(num_entries, itemsize) * (itemsize + extra)

    def encode(self, experts: Experts, base: Experts | None) -> Encoded:
        """Keeps the largest entries of the difference to the base, by magnitude.

        Args:
            experts: `G` experts, weights of `[G, ...]` each.
            base: one expert for all of them, or one for each; `None` stands for zeros. Receivers must have the same.
        """
        # A difference of bfloat16 numbers that are near each other would be mostly rounding.
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
        """Returns the experts that `encoded` stands for.

        Args:
            encoded: what `encode` returned, from any number of ranks, one after the other.
            base: what `encode` was given: one expert for all of them, or one for each.
            like: experts of this kind, in the dtype of the result; their number does not matter.
        """
        leaves, tree = jax.tree.flatten(like)
        bases = [None] * len(leaves) if base is None else jax.tree.leaves(base)
        parts = zip(encoded.values, encoded.indices, bases, leaves, strict=True)
        return jax.tree.unflatten(tree, [_fill(*part) for part in parts])


def _fill(values: Array, indices: Array, base: Array | None, like: Array) -> Array:
    """Adds entries to the base, or to zeros, in one scatter."""
    num_experts, shape = values.shape[0], like.shape[1:]
    num_entries = math.prod(shape)
    dtype = like.dtype if base is None else wide_dtype(like)
    start = jnp.zeros((1, num_entries), dtype) if base is None else base.reshape(-1, num_entries).astype(dtype)
    expert = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[:, None], indices.shape)
    flat = jnp.broadcast_to(start, (num_experts, num_entries))
    # The zero gives the base the manual axes of the values.
    flat = vary_like(flat, values)
    # Told that no index comes twice, XLA need not add one after the other.
    filled = flat.at[expert, indices.astype(jnp.int32)].add(values.astype(dtype), unique_indices=True)
    return filled.reshape(num_experts, *shape).astype(like.dtype)


def average(experts: Experts, axes: tuple[str, ...]) -> Experts:
    """Returns the mean of the experts of all ranks over `axes`, one expert, equal on all of them: an all-reduce.

    Any expert that is equal on all ranks and near the others will do. So take the weights before an optimizer step: the
    all-reduce then runs beside the backward pass, and is done when the step is.

    Args:
        experts: the `G` experts of this rank.
        axes: the mesh axes of all ranks that have experts.
    """
    # Between processes the sum goes round the ranks, and in another order would cross slow links more often.
    axes = near_neighbours(axes)

    def mean(leaf: Float[Array, "G *X"]) -> Array:
        total = jax.lax.psum(leaf.astype(wide_dtype(leaf)).sum(0), axes)
        return (total / (leaf.shape[0] * jax.lax.axis_size(axes))).astype(leaf.dtype)

    return jax.tree.map(mean, experts)


def _index_dtype(num_entries: int) -> np.dtype:
    # An index that travels in 16 bits leaves room for more entries; experts of more than 65536 need 32.
    return np.dtype(np.uint16 if num_entries <= 1 << 16 else np.int32)


SCALE_BYTES = 4
"""A block's scale is a float32."""

PER_WORD = 4
"""Numbers in a float32 as which exchanges move them; to them it is bits, and they compute with none."""


@dataclass(frozen=True)
class QuantizedTransfer:
    """Says in which low precision rows travel to their experts and back, forward; gradients travel as they are.

    Give it to a dispatch (`Direct(wire=QuantizedTransfer())`) or a system (`exact().with_wire(QuantizedTransfer())`)
    where exchanges take long and the layer bears the rounding: rows have half of the bytes of bfloat16, and 3 % for
    scales. Every block of a row has a scale, by which its largest number becomes the largest that there is. The
    backward pass rounds tokens in the same way again, and takes their gradients for those of the tokens themselves
    (straight through). Products stay in the layer's dtype.

    Source: fp8 dispatch with blocks of 128 is DeepSeek-V3's (arXiv 2412.19437, section 3.3); deviates: outputs travel
    in it, too.

    Args:
        dtype: `jnp.float8_e4m3fn`, the default, which keeps small numbers beside large ones, or `jnp.int8`, which is
            closer where numbers of a block are alike.
        block: the numbers that share a scale; 128 is usual. It divides the width, and 4 divides it.

    Raises:
        ValueError: an option is out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.transport import QuantizedTransfer
        >>> wire, rows = QuantizedTransfer(block=4), jnp.array([[1.0, 2.0, 3.0, 448.0]])
        >>> words = wire.encode(rows)
        >>> words.shape, wire.decode(words, rows.dtype).tolist()
        ((1, 2), [[1.0, 2.0, 3.0, 448.0]])
        >>> QuantizedTransfer().row_bytes(7168), 7168 * 2  # beside bfloat16
        (7392, 14336)
    """

    dtype: Any = jnp.float8_e4m3fn
    block: int = 128

    def __post_init__(self) -> None:
        if jnp.dtype(self.dtype) not in (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)):
            raise ValueError(f"QuantizedTransfer.dtype is {jnp.dtype(self.dtype)}; expected float8_e4m3fn or int8")
        # One form of it, however it was given: equal wires must be equal, as they are static arguments of programs.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.block < PER_WORD or self.block % PER_WORD:
            raise ValueError(f"QuantizedTransfer.block is {self.block}; expected a multiple of {PER_WORD}")

    def row_bytes(self, width: int) -> int:
        """Counts the bytes of a row as it travels.

        Args:
            width: `H`.
        """
        return width + SCALE_BYTES * math.ceil(width / self.block)

    def encode(self, rows: Float[Array, "N H"]) -> Float[Array, "N W"]:
        """Returns what travels of rows, as float32 whose values mean nothing.

        Args:
            rows: `[N, H]`; a block with a number that is not finite arrives as NaN.

        Raises:
            ValueError: the block does not divide `H`.
        """
        num_rows, width = rows.shape
        if width % self.block:
            raise ValueError(f"QuantizedTransfer.block is {self.block}; expected a divisor of the width, {width}")
        blocks = rows.reshape(num_rows, -1, self.block).astype(jnp.float32)
        largest = jnp.abs(blocks).max(-1, keepdims=True)
        scales = jnp.where(largest == 0, 1, largest / self._most)
        scaled = blocks / scales
        numbers = jnp.round(scaled) if self.dtype == jnp.int8 else scaled
        words = _words(numbers.astype(self.dtype).reshape(num_rows, width))
        return jnp.concatenate([jax.lax.bitcast_convert_type(words, jnp.float32), scales[..., 0]], 1)

    def decode(self, words: Float[Array, "N W"], dtype: DType) -> Float[Array, "N H"]:
        """Returns the rows that `encode` was given, rounded.

        Args:
            words: `[N, W]`.
            dtype: that of the rows.
        """
        num_scales = words.shape[1] * PER_WORD // (self.block + PER_WORD)
        numbers = _numbers(jax.lax.bitcast_convert_type(words[:, :-num_scales], jnp.uint32), self.dtype)
        blocks = numbers.reshape(words.shape[0], num_scales, self.block).astype(jnp.float32)
        return (blocks * words[:, -num_scales:, None]).reshape(words.shape[0], -1).astype(dtype)

    @property
    def _most(self) -> float:
        return float(jnp.iinfo(self.dtype).max if self.dtype == jnp.int8 else jnp.finfo(self.dtype).max)


def _words(numbers: Shaped[Array, "N H"]) -> UInt32[Array, "N V"]:
    """Puts four numbers of a byte into each word: one of each quarter of a row.

    They are shifted there. Four neighbours would be an array whose last dimension is 4, and that takes the room of 128
    on TPUs.
    """
    quarters = jnp.split(jax.lax.bitcast_convert_type(numbers, jnp.uint8).astype(jnp.uint32), PER_WORD, 1)
    first, *others = (quarter << jnp.uint32(8 * at) for at, quarter in enumerate(quarters))
    return sum(others, start=first)


def _numbers(words: UInt32[Array, "N V"], dtype: DType) -> Shaped[Array, "N H"]:
    """Returns what `_words` was given."""
    quarters = [(words >> jnp.uint32(8 * at)).astype(jnp.uint8) for at in range(PER_WORD)]
    return jax.lax.bitcast_convert_type(jnp.concatenate(quarters, 1), dtype)


def packed(wire: QuantizedTransfer | None, rows: Float[Array, "N H"]) -> Float[Array, "N W"]:
    """Returns rows as they travel: as they are without a wire."""
    return rows if wire is None else wire.encode(rows)


def unpacked(
    wire: QuantizedTransfer | None, words: Float[Array, "N W"], like: Float[Array, "_ H"]
) -> Float[Array, "N H"]:
    """Returns rows as they arrived, in the dtype of `like`."""
    return words if wire is None else wire.decode(words, like.dtype)
