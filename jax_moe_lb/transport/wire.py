"""Rows in one byte per number while they travel: scaled to fp8 or int8, block by block."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt32

from jax_moe_lb.types import DType

SCALE_BYTES = 4
"""A block's scale is a float32."""

PER_WORD = 4
"""Numbers in a float32 as which exchanges move them; to them it is bits, and they compute with none."""


@dataclass(frozen=True)
class Wire:
    """Says in which low precision rows travel to their experts and back, forward; gradients travel as they are.

    Give it to a dispatch (`Direct(wire=Wire())`) or a system (`exact().with_wire(Wire())`) where exchanges take long
    and the layer bears the rounding: rows have half of the bytes of bfloat16, and 3 % for scales. Every block of a row
    has a scale, by which its largest number becomes the largest that there is. The backward pass rounds tokens in the
    same way again, and takes their gradients for those of the tokens themselves (straight through). Products stay in
    the layer's dtype.

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
        >>> from jax_moe_lb import Wire
        >>> wire, rows = Wire(block=4), jnp.array([[1.0, 2.0, 3.0, 448.0]])
        >>> words = wire.encode(rows)
        >>> words.shape, wire.decode(words, rows.dtype).tolist()
        ((1, 2), [[1.0, 2.0, 3.0, 448.0]])
        >>> Wire().row_bytes(7168), 7168 * 2  # beside bfloat16
        (7392, 14336)
    """

    dtype: Any = jnp.float8_e4m3fn
    block: int = 128

    def __post_init__(self) -> None:
        if jnp.dtype(self.dtype) not in (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)):
            raise ValueError(f"Wire.dtype is {jnp.dtype(self.dtype)}; expected float8_e4m3fn or int8")
        # One form of it, however it was given: equal wires must be equal, as they are static arguments of programs.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.block < PER_WORD or self.block % PER_WORD:
            raise ValueError(f"Wire.block is {self.block}; expected a multiple of {PER_WORD}")

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
            raise ValueError(f"Wire.block is {self.block}; expected a divisor of the width, {width}")
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


def packed(wire: Wire | None, rows: Float[Array, "N H"]) -> Float[Array, "N W"]:
    """Returns rows as they travel: as they are without a wire."""
    return rows if wire is None else wire.encode(rows)


def unpacked(wire: Wire | None, words: Float[Array, "N W"], like: Float[Array, "_ H"]) -> Float[Array, "N H"]:
    """Returns rows as they arrived, in the dtype of `like`."""
    return words if wire is None else wire.decode(words, like.dtype)
