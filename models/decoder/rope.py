"""Rotary position embedding, with linear, llama3, YaRN and LongRoPE scaling for long contexts."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_moe_lb.core.checks import shown

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding."""

    dim: int  # rotated channels per head, the first ones; even
    base: float = 10_000.0  # base of the frequencies, which fall from 1 to `1 / base`
    kind: str = "default"  # scaling for contexts longer than in pretraining, one of `KINDS`
    factor: float = 1.0  # ratio of the context length to the pretraining length
    original_positions: int = 0  # context length of pretraining, in tokens
    # Llama3's `low_freq_factor`: rotations per pretraining context below which a frequency is divided by `factor`
    low_frequency: float = 1.0
    high_frequency: float = 4.0  # llama3's `high_freq_factor`: rotations above which a frequency is unchanged
    beta_fast: float = 32.0  # yaRN's rotations above which a frequency is unchanged
    beta_slow: float = 1.0  # yaRN's rotations below which a frequency is divided by `factor`
    truncate: bool = True  # if True, round YaRN's interpolation bounds to whole channels
    attention_factor: float = 1.0  # factor on rotated queries and keys
    # If True, rotate adjacent channels as pairs; otherwise pair channel `i` with `i + dim / 2`
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim is {self.dim}; expected an even number of rotated channels")
        if self.kind not in KINDS:
            raise ValueError(f"rope_type is {shown(self.kind)}; expected one of {', '.join(KINDS)}")

    def frequencies(self) -> np.ndarray:
        """Return the angle per position of each pair, in radians, float32 `[dim / 2]`."""
        plain = self.base ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain)
        return plain.astype(np.float32)

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_positions * plain / (2 * math.pi)
        # Equal bounds, as in Llama 4, are a step.
        between = max(self.high_frequency - self.low_frequency, 1e-9)
        share = np.clip((turns - self.low_frequency) / between, 0, 1)
        return (1 - share) * plain / self.factor + share * plain

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        def channel(turns: float) -> float:
            """Return the fractional channel with `turns` rotations per pretraining context."""
            return self.dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        divided = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        return plain / self.factor * divided + plain * (1 - divided)

    def __call__(self, x: Array, positions: Array, mask: Array | None = None) -> Array:
        """Rotate the first `dim` channels of `x`, `[B, T, N, C]`, by int32 positions `[B, T]`."""
        # Padding, for which `mask` is False, does not make a sequence longer.
        # For interleaved pairs, the output has the first channel of all pairs, then the second. Queries and keys are
        # permuted alike, so scores do not change.
        # bfloat16 cannot represent integers between 256 and 258, so angles are float32.
        frequencies, factor = self._of_sequences(positions, mask)
        angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[:, None, None]
        sin, cos = jnp.sin(angles) * factor, jnp.cos(angles) * factor
        wide = x[..., : self.dim].astype(jnp.float32)
        half = self.dim // 2
        left, right = (wide[..., ::2], wide[..., 1::2]) if self.interleaved else (wide[..., :half], wide[..., half:])
        turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)
        return jnp.concatenate([turned, x[..., self.dim :]], -1) if self.dim < x.shape[-1] else turned

    def _of_sequences(self, positions: Array, mask: Array | None) -> tuple[Array, Array | float]:
        """Return the frequencies `[1 or B, dim / 2]` and the factor on queries and keys, a scalar or `[B, 1, 1, 1]`."""
        del positions, mask
        return jnp.asarray(self.frequencies())[None], self.attention_factor


@dataclass(frozen=True)
class LongRope(Rope):
    """Rotary position embedding with two sets of frequencies, for short and for long sequences."""

    # A sequence is long if it has more than `original_positions` positions.
    # Source: LongRoPE, arXiv 2402.13753, as in Phi-3.5-MoE. `transformers` 5.24 applies the short divisors to long
    # sequences, unlike the authors' code.

    short_factors: tuple[float, ...] = ()  # divisors of the frequencies of short sequences, `dim / 2` numbers
    long_factors: tuple[float, ...] = ()  # divisors of the frequencies of long sequences
    short_scale: float = 1.0  # factor on the rotated queries and keys of short sequences
    long_scale: float = 1.0  # factor on those of long sequences

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if len(factors) != self.dim // 2 or min(factors) <= 0:
                raise ValueError(f"{name} has {len(factors)} numbers; expected {self.dim // 2} positive ones")

    def _of_sequences(self, positions: Array, mask: Array | None) -> tuple[Array, Array | float]:
        is_long = (positions if mask is None else jnp.where(mask, positions, 0)).max(1) >= self.original_positions
        short, long = (
            self.frequencies() / np.asarray(factors, np.float32) for factors in (self.short_factors, self.long_factors)
        )
        scale = jnp.where(is_long, jnp.float32(self.long_scale), jnp.float32(self.short_scale))
        return jnp.where(is_long[:, None], long[None], short[None]), scale[:, None, None, None]


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on attention for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
