"""Chains choose in ways that differ a little: the noise of the search of `exact` in jnp."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_moe_lb._varying import vary_like
from jax_moe_lb.planners.exact_chain import Way
from jax_moe_lb.types import iota

WIDTH = 64
"""The chains that are made side by side."""

LIKING, WELCOME, START = np.float32(0.15), np.float32(0.5), np.float32(0.1)
"""How far the noise goes: in `Way.liking`, in `Way.welcome`, and in `Way.start` as a fraction of the limit."""

URGENT, CLEARED = np.float32(4), np.float32(0.25)
"""`Way.urgent` without noise, and how far the noise goes in `Way.cleared` as a fraction of the ranks."""


def usual_way(tokens: Int[Array, "M L"]) -> Way:
    """Returns the way without noise: the hottest expert to the rank with most room.

    Args:
        tokens: `[M, L]` int32, the token copies of each expert, by home rank.
    """
    none = vary_like(jnp.zeros(tokens.shape[0], jnp.int32), tokens)
    ones = 1 + none.astype(jnp.float32)
    return Way(1 + 0 * tokens.reshape(-1).astype(jnp.float32), ones, ones[0] - 1, none, URGENT * ones[0], none[0])


def way_near(way: Way, limit: Int[Array, ""], seed: Int[Array, ""], number: Int[Array, ""]) -> Way:
    """Returns one of `WIDTH` ways that choose a little otherwise; number 0 is the way itself, but for `pressing`.

    Args:
        way: the way that they are near to.
        limit: about the limit of the chains; `Way.start` is counted in token copies.
        seed: a number; each gives other ways.
        number: which of them, from 0 to `WIDTH - 1`.
    """
    # Most are near and some are far: which helps differs between loads.
    reach = jnp.where(number == 0, 0, 1 / (1 << (number // 16 % 4)).astype(jnp.float32))
    # A rank that gives before it must is seldom of use, so that half of the ways leave `start` as it is.
    ahead = limit.astype(jnp.float32) * START * (number % 2).astype(jnp.float32)
    later = ahead * _noise(way.start.size, 4 * seed, number)
    urgent, cleared = reach * _noise(2, 4 * seed + 3, WIDTH + number)
    return Way(
        liking=way.liking * (1 + LIKING * reach * _noise(way.liking.size, 4 * seed + 1, number)),
        welcome=way.welcome * (1 + WELCOME * reach * _noise(way.welcome.size, 4 * seed + 2, number)),
        pressing=jnp.maximum(_noise(1, 4 * seed + 3, number)[0], 0),
        start=jnp.maximum(way.start + later.astype(jnp.int32), 0),
        urgent=way.urgent * jnp.exp2(2 * urgent),
        cleared=jnp.maximum(way.cleared + (CLEARED * way.start.size * cleared).astype(jnp.int32), 0),
    )


def _noise(size: int, seed: Int[Array, ""], number: Int[Array, ""]) -> Float[Array, "..."]:
    """Computes so many numbers from -1 to 1 that look random: a hash of their indices, the seed and the number.

    It is written out here because what `jax.random` draws depends on JAX's options.
    """
    bits = (number * size + iota(size)).astype(jnp.uint32) * np.uint32(0x9E3779B9)
    bits = bits + seed.astype(jnp.uint32) * np.uint32(0x85EBCA6B)
    for factor in (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(16))) * factor
    # 24 bits, which float32 holds exactly.
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-23) - 1
