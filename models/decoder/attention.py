"""`GroupedAttention` is causal attention in which several query heads share keys and values."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from models.attention import causal_attention
from models.decoder.config import DecoderConfig
from models.decoder.scores import EVERYTHING, Cache, attend, remember


class Window(nnx.Variable):
    """This variable holds how many keys back a layer sees: equal layers then differ in a number alone."""


class GroupedAttention(nnx.Module):
    """It has rotary positions and, where the config says so, norms of heads, biases, sinks and sliding windows.

    Args:
        config: the sizes of the model.
        layer: the number of the layer, which says how far it sees.
        mesh: the devices that it is computed on, which have kernels or not.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: DecoderConfig, layer: int, *, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.config, self.mesh = config, mesh
        width, dims, dtypes = config.embed_dim, config.head_dim, {"rngs": rngs} | _dtypes(config)

        def head_norm() -> nnx.RMSNorm | None:
            if not config.qk_norm:
                return None
            return norm(dims, config.norm_eps, config, rngs)

        self.q = nnx.Linear(width, config.num_heads * dims, use_bias=config.qkv_bias, **dtypes)
        self.k = nnx.Linear(width, config.num_kv_heads * dims, use_bias=config.qkv_bias, **dtypes)
        self.v = nnx.Linear(width, config.num_kv_heads * dims, use_bias=config.qkv_bias, **dtypes)
        self.out = nnx.Linear(config.num_heads * dims, width, use_bias=config.out_bias, **dtypes)
        self.q_norm, self.k_norm = head_norm(), head_norm()
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), config.param_dtype)) if config.sinks else None
        is_local = any(config.windows)
        self.window = Window(jnp.int32(config.window(layer) or EVERYTHING)) if is_local else None

    def __call__(self, x: Array, positions: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        """Mixes into each of the tokens `[B, T, H]` at `positions` what it sees; returns the cache with them."""
        q, k, v = (linear(x).reshape(*x.shape[:2], -1, self.config.head_dim) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).astype(x.dtype), self.k_norm(k).astype(x.dtype)
        q, k = self.config.rope(q, positions), self.config.rope(k, positions)
        q, k, v = checkpoint_name((q, k, v), "attention")
        if cache is not None:
            cache = k, v = remember(cache, (k, v), positions)
        y = checkpoint_name(self._attended(q, k, v, positions, cache is None), "attention")
        return self.out(y.reshape(*x.shape[:2], -1)), cache

    def _attended(self, q: Array, k: Array, v: Array, positions: Array, whole: bool) -> Array:
        scale = self.config.attention_scale
        if whole and self.window is None and self.sinks is None and scale == q.shape[-1] ** -0.5:
            return causal_attention(q, k, v, self.mesh)
        window = None if self.window is None else self.window[...]
        sinks = None if self.sinks is None else self.sinks[...]
        return attend(q, k, v, positions, scale=scale, window=window, sinks=sinks, whole=whole)

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Makes a cache for so many tokens of so many sequences."""
        config = self.config
        shape = (batch_size, length, config.num_kv_heads, config.head_dim)
        return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


def norm(width: int, eps: float, config: DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Makes a norm, which computes in float32 whatever the parameters are."""
    return nnx.RMSNorm(width, epsilon=eps, dtype=jnp.float32, param_dtype=config.param_dtype, rngs=rngs)


def _dtypes(config: DecoderConfig) -> dict:
    return {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}
