"""Experts and rows in fewer bytes while they travel.

`Codec` sends the largest entries of the difference between an expert and a base known to the receiver. HybridEP's
parameter-efficient migration uses the mean of all experts as the base. An expert is closer to its own earlier weights.
So the base can also be the last decoded weights, with error feedback as in EF21 (arXiv 2106.05203).

`QuantizedTransfer` sends rows as fp8 or int8 with one scale per block.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32

from jax_moe_lb.collectives.permutes import near_neighbours
from jax_moe_lb.core.checks import Least, checked_dtype, checked_fields
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.types import DType, pytree, wide_dtype


@pytree
class Encoded:
    """Selected entries of the weights of `G` experts, for the transfer."""

    values: tuple[Array, ...]  # for each weight array, `[G, k]`, selected entries in the dtype of the weights
    # For each weight array, `[G, k]`, positions in the flattened weights of the expert; uint16 up to 65,536 entries,
    # otherwise int32
    indices: tuple[Array, ...]

    @property
    def words(self) -> UInt32[Array, "G W"]:
        """All values and indices of an expert side by side, so that one exchange carries them."""
        return jnp.concatenate([_as_uint32(leaf) for leaf in jax.tree.leaves(self)], 1)

    def from_words(self, words: UInt32[Array, "*B W"]) -> "Encoded":
        """Return the entries in words made by `words` of other experts of the same shapes and dtypes."""
        leaves, tree = jax.tree.flatten(self)
        ends = np.cumsum([_as_uint32(leaf).shape[1] for leaf in leaves])[:-1]
        parts = zip(jnp.split(words, ends, 1), leaves, strict=True)
        return jax.tree.unflatten(tree, [_from_uint32(part, leaf) for part, leaf in parts])


def _as_uint32(array: Shaped[Array, "G k"]) -> UInt32[Array, "G V"]:
    """Return the bits of an array in 32-bit words; of 16-bit numbers, the second half is in the upper bits."""
    if array.dtype.itemsize == 2:
        halves = jax.lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32)
        lower, upper = jnp.split(jnp.pad(halves, ((0, 0), (0, array.shape[1] % 2))), 2, 1)
        return lower | upper << jnp.uint32(16)
    # Numbers of 64 bits become two words each.
    return jax.lax.bitcast_convert_type(array, jnp.uint32).reshape(array.shape[0], -1)


def _from_uint32(words: UInt32[Array, "G V"], like: Shaped[Array, "_ k"]) -> Shaped[Array, "G k"]:
    """Return the array of `_as_uint32`, with the columns and dtype of `like`."""
    if like.dtype.itemsize == 2:
        halves = jnp.concatenate([words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)], 1)[:, : like.shape[1]]
        return jax.lax.bitcast_convert_type(halves.astype(jnp.uint16), like.dtype)
    per_number = like.dtype.itemsize // 4
    shape = (words.shape[0], like.shape[1], *[per_number] * (per_number > 1))
    return jax.lax.bitcast_convert_type(words.reshape(shape), like.dtype)


class CodecBase(Enum):
    """Base of the differences sent by a `Codec`.

    `REMEMBERED` (default) changes a model in training least, but stores a copy of every expert of the expert domain.
    `SHARED`, as in the paper, takes the memory of one expert and no state. `ZERO` is for comparison.

    Examples:
        >>> from jax_moe_lb.transport import Codec, CodecBase
        >>> Codec(ratio=50.0).remembers, Codec(ratio=50.0, base=CodecBase.SHARED).remembers
        (True, False)
    """

    ZERO = "zero"
    """Zeros: send the largest entries of the expert itself."""
    SHARED = "shared"
    """Mean of all experts by an all-reduce, equal on all ranks: the shared expert of the paper."""
    REMEMBERED = "remembered"
    """Last decoded weights, stored by the ranks of the domain: later steps send the entries left out by this one."""


GRADIENT_RATIO = 5.0
"""Ratio of gradients beside encoded experts: the largest measured one within 0.5 % of the loss with whole gradients, in
the mean of three seeds (`docs/results/hybridep.md`)."""


@dataclass(frozen=True)
@checked_fields
class Codec:
    """Compression of experts in `GatherExpertDomain`.

    Use a ratio above 1 for slow links between the ranks of an expert domain. The compression is lossy and changes the
    outputs. The effect on a model must be measured: the paper trains small models with 50.

    Args:
        ratio: bytes of an expert over its encoded bytes, including indices. 1.0 (default) does not compress; the
            paper's maximum is 50. An index takes 2 or 4 bytes per entry: for float32, a ratio just above 1 keeps only
            two thirds or half of the entries.
        base: base of the differences; `CodecBase.REMEMBERED` by default. The paper has `CodecBase.SHARED`.
        gradient_ratio: the same for the gradients of gathered experts on the way home, which carry the largest
            entries and an error feedback. `None` (default) is 5.0 if `ratio` is above 1, and otherwise 1.0, which does
            not compress them. Above 1, `GatherExpertDomain` requires a residual.

    Raises:
        ValueError: `ratio` or `gradient_ratio` is below 1 or not finite.

    Reference:
        HybridEP, arXiv 2510.19470, parameter-efficient migration.

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

    ratio: Annotated[float, Least(1.0)] = 1.0
    base: CodecBase = CodecBase.REMEMBERED
    gradient_ratio: Annotated[float, Least(1.0)] | None = None

    @property
    def compresses(self) -> bool:
        """Whether the codec drops entries."""
        return self.ratio > 1

    @property
    def shares(self) -> bool:
        """Whether ranks compute the mean of all experts."""
        return self.compresses and self.base is CodecBase.SHARED

    @property
    def remembers(self) -> bool:
        """Whether ranks store the decoded weights for the next call."""
        return self.compresses and self.base is CodecBase.REMEMBERED

    @property
    def of_gradients(self) -> "Codec":
        """Codec of the gradients: `gradient_ratio` as ratio, and zeros as base."""
        default = GRADIENT_RATIO if self.compresses else 1.0
        return Codec(default if self.gradient_ratio is None else self.gradient_ratio, CodecBase.ZERO, 1.0)

    def num_kept(self, num_entries: int, itemsize: int) -> int:
        """Return `k`, the number of entries sent for a matrix, at least 1.

        Args:
            num_entries: entries of the matrix.
            itemsize: bytes of one entry.
        """
        if not self.compresses:
            return num_entries
        per_entry = itemsize + _index_dtype(num_entries).itemsize
        return max(1, math.floor(num_entries * itemsize / (self.ratio * per_entry)))

    def encoded_bytes(self, experts: Experts) -> int:
        """Return the encoded bytes of experts, values and indices, without the shared expert.

        Args:
            experts: weights, or the shapes and dtypes, `[G, ...]` each.
        """
        return sum(self._leaf_bytes(leaf) for leaf in jax.tree.leaves(experts))

    def _leaf_bytes(self, leaf: Array) -> int:
        num_entries, itemsize = math.prod(leaf.shape[1:]), leaf.dtype.itemsize
        extra = _index_dtype(num_entries).itemsize if self.compresses else 0
        return leaf.shape[0] * self.num_kept(num_entries, itemsize) * (itemsize + extra)

    def encode(self, experts: Experts, base: Experts | None) -> Encoded:
        """Select the largest entries by magnitude of the difference to the base.

        Args:
            experts: `G` experts, weights of `[G, ...]` each.
            base: one expert for all of them, or one for each, equal at the receivers; `None` for zeros.
        """
        # In float32: the difference of two close bfloat16 numbers would be mostly rounding error.
        residual = jax.tree.map(lambda w: w.astype(wide_dtype(w)), experts)
        if base is not None:
            residual = jax.tree.map(lambda r, b: r - b.reshape(-1, *r.shape[1:]).astype(r.dtype), residual, base)
        return self.select(residual, experts)

    def select(self, differences: Experts, like: Experts) -> Encoded:
        """Select the largest entries by magnitude.

        Args:
            differences: `[G, ...]` per weight array, float32 or wider.
            like: experts with the dtypes of the selected values.
        """
        pairs = [self._largest(d, w) for d, w in zip(jax.tree.leaves(differences), jax.tree.leaves(like), strict=True)]
        return Encoded(tuple(values for values, _ in pairs), tuple(indices for _, indices in pairs))

    def _largest(self, residual: Array, like: Array) -> tuple[Array, Array]:
        flat = residual.reshape(residual.shape[0], -1)
        num_entries = flat.shape[1]
        indices = jax.lax.top_k(jnp.abs(flat), self.num_kept(num_entries, like.dtype.itemsize))[1]
        values = jnp.take_along_axis(flat, indices, axis=1).astype(like.dtype)
        return values, indices.astype(_index_dtype(num_entries))

    def decode(self, encoded: Encoded, base: Experts | None, like: Experts) -> Experts:
        """Return the decoded experts.

        Args:
            encoded: return values of `encode` from any number of ranks, concatenated.
            base: the base passed to `encode`: one expert for all, or one for each; `None` for zeros.
            like: experts of the same shapes, in the dtype of the result; their number is ignored.
        """
        leaves, tree = jax.tree.flatten(like)
        bases = [None] * len(leaves) if base is None else jax.tree.leaves(base)
        parts = zip(encoded.values, encoded.indices, bases, leaves, strict=True)
        return jax.tree.unflatten(tree, [_fill(*part) for part in parts])


def _fill(values: Array, indices: Array, base: Array | None, like: Array) -> Array:
    """Add entries to the base, or to zeros, in one scatter."""
    num_experts, shape = values.shape[0], like.shape[1:]
    num_entries = math.prod(shape)
    dtype = like.dtype if base is None else wide_dtype(like)
    start = jnp.zeros((1, num_entries), dtype) if base is None else base.reshape(-1, num_entries).astype(dtype)
    expert = jnp.broadcast_to(jnp.arange(num_experts, dtype=jnp.int32)[:, None], indices.shape)
    flat = jnp.broadcast_to(start, (num_experts, num_entries))
    # Adding a zero gives the base the varying axes of the values.
    flat = vary_like(flat, values)
    # With `unique_indices`, XLA need not serialize the additions.
    filled = flat.at[expert, indices.astype(jnp.int32)].add(values.astype(dtype), unique_indices=True)
    return filled.reshape(num_experts, *shape).astype(like.dtype)


def average(experts: Experts, axes: tuple[str, ...]) -> Experts:
    """Return the mean of the experts of all ranks over `axes`, equal on all of them, by an all-reduce."""
    # Any base works if it is equal on all ranks and close to the experts. So use the weights before an optimizer step:
    # the all-reduce then overlaps with the backward pass.
    # Between processes the sum is a ring over the ranks; another order of axes would cross slow links more often.
    axes = near_neighbours(axes)

    def mean(leaf: Float[Array, "G *X"]) -> Array:
        total = jax.lax.psum(leaf.astype(wide_dtype(leaf)).sum(0), axes)
        return (total / (leaf.shape[0] * jax.lax.axis_size(axes))).astype(leaf.dtype)

    return jax.tree.map(mean, experts)


def _index_dtype(num_entries: int) -> np.dtype:
    # 16-bit indices leave bytes for more entries; experts with more than 65,536 entries need 32 bits.
    return np.dtype(np.uint16 if num_entries <= 1 << 16 else np.int32)


TRANSFER_DTYPES = (jnp.float8_e4m3fn, jnp.int8)
"""Dtypes of quantized rows."""

SCALE_BYTES = 4
"""Bytes of the float32 scale of a block."""

PER_WORD = 4
"""Quantized numbers per float32 word; exchanges move these words without arithmetic."""


@dataclass(frozen=True)
@checked_fields
class QuantizedTransfer:
    """Quantization of rows during forward transfers, to experts and back; gradients are not quantized.

    Pass it to a dispatch (`Direct(transfer=QuantizedTransfer())`) or a system
    (`exact().replace(transfer=QuantizedTransfer())`). Use it for slow exchanges if the model tolerates the rounding.
    Rows take half of the bytes of bfloat16, plus 3 % for scales. The scale of a block maps its largest number to the
    maximum of the dtype. The backward pass rounds tokens in the same way and uses straight-through gradients. Products
    use the dtype of the layer.

    Args:
        dtype: `jnp.float8_e4m3fn` (default), which represents small numbers beside large ones, or `jnp.int8`, which is
            more accurate for blocks of similar magnitudes.
        block: numbers per scale; 128 by default. It must be a multiple of 4 and divide the width.

    Raises:
        ValueError: an option is out of range.

    Reference:
        DeepSeek-V3, arXiv 2412.19437, section 3.3: fp8 dispatch with blocks of 128. Unlike there, outputs are
        quantized, too.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.transport import QuantizedTransfer
        >>> transfer, rows = QuantizedTransfer(block=4), jnp.array([[1.0, 2.0, 3.0, 448.0]])
        >>> words = transfer.encode(rows)
        >>> words.shape, transfer.decode(words, rows.dtype).tolist()
        ((1, 2), [[1.0, 2.0, 3.0, 448.0]])
        >>> QuantizedTransfer().row_bytes(7168), 7168 * 2  # beside bfloat16
        (7392, 14336)
    """

    dtype: DType = jnp.float8_e4m3fn
    block: int = 128

    def __post_init__(self) -> None:
        # A frozen dataclass rejects ordinary assignment.
        object.__setattr__(self, "dtype", checked_dtype("QuantizedTransfer.dtype", self.dtype, TRANSFER_DTYPES))
        if self.block < PER_WORD or self.block % PER_WORD:
            raise ValueError(f"QuantizedTransfer.block is {self.block}; expected a multiple of {PER_WORD}")

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row in transfer.

        Args:
            width: `H`, numbers of a row.
        """
        return width + SCALE_BYTES * math.ceil(width / self.block)

    def encode(self, rows: Float[Array, "N H"]) -> Float[Array, "N W"]:
        """Quantize rows into float32 words, which contain bits and no numbers.

        Args:
            rows: `[N, H]`; blocks with non-finite numbers decode to NaN.

        Returns:
            `[N, W]` words and scales.

        Raises:
            ValueError: the block does not divide `H`.
        """
        num_rows, width = rows.shape
        if width % self.block:
            raise ValueError(f"QuantizedTransfer.block is {self.block}; expected a divisor of the width, {width}")
        blocks = rows.reshape(num_rows, width // self.block, self.block).astype(jnp.float32)
        largest = jnp.abs(blocks).max(-1, keepdims=True)
        # Multiply by reciprocals: XLA replaces divisions in some programs only, and another last bit can round a number
        # to another neighbor. A smaller scale could be 0.
        scales = jnp.maximum(largest * jnp.float32(1 / self._most), jnp.finfo(jnp.float32).tiny)
        scaled = blocks * (1 / scales)
        numbers = jnp.round(scaled) if self.dtype == jnp.int8 else scaled
        words = _words(numbers.astype(self.dtype).reshape(num_rows, width))
        return jnp.concatenate([jax.lax.bitcast_convert_type(words, jnp.float32), scales[..., 0]], 1)

    def decode(self, words: Float[Array, "N W"], dtype: DType) -> Float[Array, "N H"]:
        """Return the rows passed to `encode`, rounded.

        Args:
            words: `[N, W]`, return value of `encode`.
            dtype: dtype of the rows.
        """
        num_scales = words.shape[1] * PER_WORD // (self.block + PER_WORD)
        numbers = _numbers(jax.lax.bitcast_convert_type(words[:, :-num_scales], jnp.uint32), self.dtype)
        blocks = numbers.reshape(words.shape[0], num_scales, self.block).astype(jnp.float32)
        rows = blocks * words[:, -num_scales:, None]
        return rows.reshape(words.shape[0], num_scales * self.block).astype(dtype)

    @property
    def _most(self) -> float:
        return float(jnp.iinfo(self.dtype).max if self.dtype == jnp.int8 else jnp.finfo(self.dtype).max)


def _words(numbers: Shaped[Array, "N H"]) -> UInt32[Array, "N V"]:
    """Pack four 1-byte numbers into each word, one from each quarter of a row."""
    # It uses shifts: an array of four neighbours per word would have a last dimension of 4, padded to 128 on TPUs.
    quarters = jnp.split(jax.lax.bitcast_convert_type(numbers, jnp.uint8).astype(jnp.uint32), PER_WORD, 1)
    first, *others = (quarter << jnp.uint32(8 * at) for at, quarter in enumerate(quarters))
    return sum(others, start=first)


def _numbers(words: UInt32[Array, "N V"], dtype: DType) -> Shaped[Array, "N H"]:
    """Return the numbers packed by `_words`."""
    quarters = [(words >> jnp.uint32(8 * at)).astype(jnp.uint8) for at in range(PER_WORD)]
    return jax.lax.bitcast_convert_type(jnp.concatenate(quarters, 1), dtype)


def packed(transfer: QuantizedTransfer | None, rows: Float[Array, "N H"]) -> Float[Array, "N W"]:
    """Return rows in transfer format, unchanged without quantization."""
    return rows if transfer is None else transfer.encode(rows)


def unpacked(
    transfer: QuantizedTransfer | None, words: Float[Array, "N W"], like: Float[Array, "_ H"]
) -> Float[Array, "N H"]:
    """Return received rows, in the dtype of `like`."""
    return words if transfer is None else transfer.decode(words, like.dtype)
