"""`floor_share` takes shares of whole numbers, equal in NumPy and in JAX, which has no 64-bit integers by default."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_moe_lb.types import AnyArray, namespace

SMALL = 2**21
"""Below this a quotient in float32 is off by less than 1."""


def floor_share(part: AnyArray, share: AnyArray, whole: AnyArray) -> AnyArray:
    """Computes `floor(part * share / whole)` of int32 with `0 <= part, share <= whole`; 0 where `whole` is 0.

    Use it wherever a planner divides tokens in proportion: the plan on a host must be the one in a jitted program.

    Examples:
        >>> import numpy as np
        >>> from jax_moe_lb._floor_share import floor_share
        >>> floor_share(np.array([7]), np.array([5]), np.array([10]))
        array([3], dtype=int32)
    """
    if namespace(part) is np:
        wide = part.astype(np.int64) * share // np.maximum(whole, 1)
        return wide.astype(np.int32)
    part, share, whole = jnp.broadcast_arrays(part, share, jnp.maximum(whole, 1))
    # The same integers on every machine: floating point only guesses, and integers correct it.
    return jax.lax.cond(whole.max() < SMALL, _small_share, _large_share, part, share, whole)


def _small_share(part: Array, share: Array, whole: Array) -> Array:
    # The guess is off by at most 1, so that the remainder fits 32 bits although the products do not.
    guess = (part.astype(jnp.float32) * share.astype(jnp.float32) / whole.astype(jnp.float32)).astype(jnp.int32)
    rest = part * share - guess * whole
    return guess + (rest >= whole).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


def _large_share(part: Array, share: Array, whole: Array) -> Array:
    # A guess, then another for what it misses, which is exact in 64 bits; the rest is below `whole`. The bound is the
    # largest float32 that int32 holds: beyond it the cast would be undefined.
    size = whole.astype(jnp.float32)
    guess = jnp.minimum(part.astype(jnp.float32) * share.astype(jnp.float32) / size, np.float32(2**31 - 128))
    guess = guess.astype(jnp.int32)
    high, low = _product(part, share)
    guess_high, guess_low = _product(guess, whole)
    high = (high - guess_high).astype(jnp.int32) - (low < guess_low).astype(jnp.int32)
    low = low - guess_low
    missed = jnp.round((high.astype(jnp.float32) * np.float32(2**32) + low.astype(jnp.float32)) / size)
    missed = missed.astype(jnp.int32)
    rest = (low - missed.astype(jnp.uint32) * whole.astype(jnp.uint32)).astype(jnp.int32)
    return guess + missed - (rest < 0).astype(jnp.int32)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """Computes the upper and lower 32 bits of `a * b`."""
    # By halves of 16 bits, whose products fit: unsigned, so that sums wrap round instead of overflowing.
    a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    cross = (a & mask) * (b & mask)
    upper = (a >> half) * (b & mask) + (cross >> half)
    lower = (a & mask) * (b >> half) + (upper & mask)
    return (a >> half) * (b >> half) + (upper >> half) + (lower >> half), a * b
