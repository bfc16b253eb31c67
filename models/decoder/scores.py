"""`attend` computes attention with what `models.attention` has not: caches, sliding windows, sinks, other scales."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from models.attention import QUERY_BLOCK

Cache = tuple[Array, Array]
"""What a layer keeps of the tokens before, `[B, S, ...]`: keys and values, or what they are made of."""

EVERYTHING = 2**30
"""A window that no sequence is longer than."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    *,
    scale: float,
    window: Array | None = None,
    sinks: Array | None = None,
    whole: bool = False,
) -> Array:
    """Computes the attention of each query to the keys up to its position, in float32.

    Of long sequences it holds the scores of `QUERY_BLOCK` queries at a time, also in the backward pass.

    Args:
        q: queries `[B, T, N, C]`.
        k: keys `[B, S, G, C]`; `G` divides `N`, and key `s` is at position `s`.
        v: values `[B, S, G, V]`.
        positions: int32 `[B, T]`, those of the queries.
        scale: the factor on the scores.
        window: int32, how many keys back a query sees, itself counted; `None`: all.
        sinks: `[N]`, a score of each head that takes its share of the softmax and brings no value.
        whole: whether query `t` is at position `t`, as in training: then no block reads keys that none of it sees.

    Returns:
        `[B, T, N, V]`, in the dtype of `q`.
    """
    if q.shape[1] <= QUERY_BLOCK:
        return _of_block(q, k, v, positions, window, sinks, scale=scale, start=0, stop=q.shape[1], keys=k.shape[1])
    parts = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q.shape[1])
        block = partial(_of_block, scale=scale, start=start, stop=stop, keys=stop if whole else k.shape[1])
        # Whole arrays go in, of which each block takes its part: slices would be kept for the backward pass.
        parts.append(jax.checkpoint(block)(q, k, v, positions, window, sinks))
    return jnp.concatenate(parts, 1)


def _of_block(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    window: Array | None,
    sinks: Array | None,
    *,
    scale: float,
    start: int,
    stop: int,
    keys: int,
) -> Array:
    q, k, v, positions = q[:, start:stop], k[:, :keys], v[:, :keys], positions[:, start:stop]
    num_groups = k.shape[2]
    # Heads of a group lie side by side: [B, T, G, N / G, C].
    grouped = q.reshape(*q.shape[:2], num_groups, -1, q.shape[-1]).astype(jnp.float32)
    scores = jnp.einsum("btgnc,bsgc->bgnts", grouped, k.astype(jnp.float32)) * scale
    places = jnp.arange(keys, dtype=positions.dtype)[None, None]
    seen = places <= positions[:, :, None]
    if window is not None:
        seen &= places > positions[:, :, None] - window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_groups, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], -1)
    shares = jax.nn.softmax(scores, -1)[..., :keys]
    y = jnp.einsum("bgnts,bsgv->btgnv", shares, v.astype(jnp.float32))
    return y.reshape(*q.shape[:3], -1).astype(q.dtype)


def remember(cache: Cache, new: Cache, positions: Array) -> Cache:
    """Puts what is new `[B, T, ...]` at its positions `[B, T]` of a cache `[B, S, ...]`."""
    lines = jnp.arange(positions.shape[0])[:, None]

    def put(old: Array, new: Array) -> Array:
        return old.at[lines, positions].set(new.astype(old.dtype))

    return put(cache[0], new[0]), put(cache[1], new[1])
