"""`LatentAttention` makes keys and values of a narrow vector per token, which is what a cache holds."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.decoder.attention import norm
from models.decoder.config import DecoderConfig, Latent
from models.decoder.scores import Cache, attend, remember

LATENT_EPS = 1e-6
"""The norms of compressed vectors have this, whatever that of the others is."""


class LatentAttention(nnx.Module):
    """It is multi-head latent attention (DeepSeek-V2, section 2.1).

    deviates: keys and values of the whole cache are made anew in each step of decoding; the paper absorbs their
    weights into those of queries and outputs.

    Args:
        config: the sizes of the model, `latent` among them.
        latent: those of the compressed vectors.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: DecoderConfig, latent: Latent, *, rngs: nnx.Rngs) -> None:
        self.config, self.latent = config, latent
        width, num_heads, q_width = config.embed_dim, config.num_heads, latent.query_rank

        def linear(inner: int, outer: int, use_bias: bool = False) -> nnx.Linear:
            dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
            return nnx.Linear(inner, outer, use_bias=use_bias, rngs=rngs, **dtypes)

        self.q_down = None if q_width is None else linear(width, q_width, config.qkv_bias)
        self.q_norm = None if q_width is None else norm(q_width, LATENT_EPS, config, rngs)
        self.q_up = linear(q_width or width, num_heads * (latent.plain_dim + latent.rotated_dim))
        self.kv_down = linear(width, latent.kv_rank + latent.rotated_dim, config.qkv_bias)
        self.kv_norm = norm(latent.kv_rank, LATENT_EPS, config, rngs)
        self.kv_up = linear(latent.kv_rank, num_heads * (latent.plain_dim + latent.value_dim))
        self.out = linear(num_heads * latent.value_dim, width, config.out_bias)

    def __call__(self, x: Array, positions: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Mixes into each of the tokens `[B, T, H]` at `positions` what it sees; returns the cache with them."""
        q = self._queries(x, positions)
        small, turning = jnp.split(self.kv_down(x), [self.latent.kv_rank], -1)
        # The rotated part is one head, which all share; there is no norm on it.
        turned = self.config.rope(turning[:, :, None], positions)[:, :, 0]
        small = self.kv_norm(small).astype(x.dtype)
        if cache is not None:
            cache = small, turned = remember(cache, (small, turned), positions)
        k, v = self._keys_and_values(small, turned)
        q, k, v = checkpoint_name((q, k, v), "attention")
        y = attend(q, k, v, positions, scale=self.config.attention_scale, whole=cache is None)
        y = checkpoint_name(y, "attention")
        return self.out(y.reshape(*x.shape[:2], -1)), cache

    def _queries(self, x: Array, positions: Array) -> Array:
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x)).astype(x.dtype)
        heads = self.q_up(x).reshape(*x.shape[:2], self.config.num_heads, -1)
        plain, turning = jnp.split(heads, [self.latent.plain_dim], -1)
        return jnp.concatenate([plain, self.config.rope(turning, positions)], -1)

    def _keys_and_values(self, small: Array, turned: Array) -> tuple[Array, Array]:
        heads = self.kv_up(small.astype(self.config.compute_dtype))
        heads = heads.reshape(*small.shape[:2], self.config.num_heads, -1)
        plain, v = jnp.split(heads, [self.latent.plain_dim], -1)
        shared = jnp.broadcast_to(turned[:, :, None], (*plain.shape[:3], turned.shape[-1])).astype(plain.dtype)
        return jnp.concatenate([plain, shared], -1), v

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Makes a cache for so many tokens of so many sequences."""
        dims = (self.latent.kv_rank, self.latent.rotated_dim)
        small, turned = (jnp.zeros((batch_size, length, dim), self.config.compute_dtype) for dim in dims)
        return small, turned
