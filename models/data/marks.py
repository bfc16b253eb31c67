"""Marks on the tokens of a batch: starts of documents, context that is read but not predicted, and padding.

One int32 array holds tokens and marks. A token `t` of the context is stored as `t + CONTEXT`, one of the padding as
`t + PADDING`, and the first token of a document as its complement, which is negative. None of them is predicted.
"""

import jax
import jax.numpy as jnp
import numpy as np

CONTEXT = 2**29  # added to tokens of the context; above any vocabulary
PADDING = 2**30  # added to tokens of the padding


def marked(
    tokens: np.ndarray, starts: np.ndarray, context: np.ndarray, padding: np.ndarray | None = None
) -> np.ndarray:
    """Return int32 tokens with marks."""
    stored = tokens.astype(np.int32) + np.where(context, np.int32(CONTEXT), np.int32(0))
    if padding is not None:
        stored = np.where(padding, tokens.astype(np.int32) + np.int32(PADDING), stored)
    return np.where(starts, ~stored, stored)


def words(tokens: jax.Array) -> jax.Array:
    """Return the tokens without marks, int32."""
    return jnp.where(tokens < 0, ~tokens, tokens) & (CONTEXT - 1)


def are_predicted(tokens: jax.Array) -> jax.Array:
    """Return which tokens are predicted from those before: all but the context and the starts of documents."""
    return (tokens >= 0) & (tokens < CONTEXT)


def predicted(tokens: jax.Array, ahead: int = 0) -> list[jax.Array]:
    """Return which positions predict the next token, and which the `k`-th after it: bool `[B, T]` each."""
    following = tokens[:, 1:]
    found, inside = [], jnp.ones(following.shape, bool)
    for k in range(ahead + 1):
        inside &= (following >= 0) & (jnp.arange(following.shape[1]) < following.shape[1] - k)[None]
        found.append(inside & are_predicted(following))
        following = jnp.roll(following, -1, 1)
    return found


def num_predicted(tokens: jax.Array, ahead: int = 0) -> jax.Array:
    """Return the number of positions of each array of `predicted`, at least 1, float32 `[ahead + 1]`."""
    counts = [jnp.maximum(each.sum(dtype=jnp.int32), 1).astype(jnp.float32) for each in predicted(tokens, ahead)]
    return jnp.stack(counts)


def segments(tokens: jax.Array) -> jax.Array:
    """Number the documents in each row of `[B, T]`, int32, ascending, and -1 for the padding at its end."""
    is_padding = jnp.where(tokens < 0, ~tokens, tokens) >= PADDING
    return jnp.where(is_padding, -1, jnp.cumsum(tokens < 0, 1, dtype=jnp.int32))


def positions_in(segments: jax.Array) -> jax.Array:
    """Return the position of each token in its document, for segments `[B, T]`: int32, from 0."""
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return places - jax.lax.cummax(jnp.where(begins, places, 0), 1)
