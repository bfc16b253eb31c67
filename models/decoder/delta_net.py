"""Gated delta networks: linear attention with a matrix per head, updated by the gated delta rule.

Source: Gated Delta Networks, arXiv 2412.06464, section 3, in the form of Qwen3-Next. A head with state `S`, `[K, V]`,
reads token `t` with decay `a` in (0, 1), rate `b` in (0, 1), and query and key of unit length:

    S = a S;  S = S + b k (v - S' k)';  y = S' q / sqrt(K)

A chunk of tokens is one triangular system and products of matrices, and `jax.lax.scan` passes the state from chunk to
chunk. The backward pass stores the state before each chunk and rematerializes the chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.decoder.attention import Cache, Linear, linear_options, norm
from models.decoder.config import DecoderConfig, DeltaNet

CHUNK = 64  # tokens per chunk; more tokens need fewer states and larger matrices
UNIT_EPS = 1e-6  # added to the squared length of queries and keys
MOST_DECAY = 16.0  # largest initial rate of decay


class DeltaInputs(NamedTuple):
    """Arguments of the gated delta rule; each key head serves `N / G` heads of values."""

    q: Array  # queries `[B, T, G, K]`
    k: Array  # keys `[B, T, G, K]`
    v: Array  # values `[B, T, N, V]`
    log_decay: Array  # logarithms of the decay, float32 `[B, T, N]`
    rate: Array  # rates of the update, float32 `[B, T, N]`
    segments: Array  # sequences in a row, int32 `[B, T]`; each starts with an empty state


def delta_rule(given: DeltaInputs, state: Array, chunk: int = CHUNK) -> tuple[Array, Array]:
    """Return the outputs, float32 `[B, T, N, V]`, and the next state, float32 `[B, N, K, V]`."""
    # A state continues the segment of the first token. The next state is that of the last token, if it has segment 0.
    batch, length, heads, width = given.v.shape
    size = min(chunk, length)

    def in_chunks(array: Array) -> Array:
        # Padding has rate 0 and decay 1.
        whole = jnp.pad(array, [(0, 0), (0, -length % size), *[(0, 0)] * (array.ndim - 2)])
        return whole.reshape(batch, -1, size, *array.shape[2:]).swapaxes(0, 1)

    chunks = DeltaInputs(*map(in_chunks, given))
    body = jax.checkpoint(_chunk, prevent_cse=False)
    (state, _), y = jax.lax.scan(body, (state, given.segments[:, 0]), chunks)
    return y.swapaxes(0, 1).reshape(batch, -1, heads, width)[:, :length], state


def _chunk(carry: tuple[Array, Array], given: DeltaInputs) -> tuple[tuple[Array, Array], Array]:
    (state, last), segments = carry, given.segments
    repeats = given.v.shape[2] // given.k.shape[2]
    q, k = (_by_head(jnp.repeat(_unit(part), repeats, 2)) for part in (given.q, given.k))
    q, v = q * q.shape[-1] ** -0.5, _by_head(given.v.astype(jnp.float32))
    rate, sums = _by_head(given.rate)[..., None], jnp.cumsum(_by_head(given.log_decay), -1)
    # Decays from the state to each token, from each token to the end, and from token `j` to token `i`.
    before = _decay(sums, (segments == last[:, None])[:, None])[..., None]
    after = _decay(sums[..., -1:] - sums, (segments == segments[:, -1:])[:, None])[..., None]
    together = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
    between = _decay(sums[..., :, None] - sums[..., None, :], together)
    # Row `i` of the system subtracts the values that the rows before it wrote.
    system = rate * jnp.matmul(k, k.mT) * between
    missing = rate * (v - before * jnp.matmul(k, state))
    solve = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True, unit_diagonal=True)
    written = missing if k.shape[2] == 1 else solve(system, missing)
    y = before * jnp.matmul(q, state) + jnp.matmul(jnp.matmul(q, k.mT) * between, written)
    state = before[:, :, -1:] * state + jnp.matmul((after * k).mT, written)
    return (state, segments[:, -1]), _by_head(y)


def _unit(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + UNIT_EPS)


def _by_head(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _decay(logarithms: Array, are_seen: Array) -> Array:
    # Mask before the exponential, which may overflow for tokens that are not seen.
    return jnp.exp(jnp.where(are_seen, logarithms, -jnp.inf))


class GatedDeltaNet(nnx.Module):
    """Gated delta network with a causal convolution of queries, keys and values, and a gated norm of outputs."""

    # Its cache has the last inputs of the convolution, `[B, W - 1, channels]`, and the state, float32 `[B, N, K, V]`.

    def __init__(self, config: DecoderConfig, sizes: DeltaNet, *, rngs: nnx.Rngs) -> None:
        self.sizes, self.compute_dtype = sizes, config.compute_dtype
        heads, dtype = sizes.num_heads, config.param_dtype

        def linear(inner: int, outer: int) -> Linear:
            return Linear(inner, outer, use_bias=False, rngs=rngs, **linear_options(config))

        if sizes.is_joined:
            self.qkvz = linear(config.embed_dim, sizes.channels + heads * sizes.value_dim)
            self.ba = linear(config.embed_dim, 2 * heads)
        else:
            self.qkv = linear(config.embed_dim, sizes.channels)
            self.z = linear(config.embed_dim, heads * sizes.value_dim)
            self.b, self.a = linear(config.embed_dim, heads), linear(config.embed_dim, heads)
        filters = nnx.initializers.lecun_normal()(rngs.params(), (sizes.kernel_size, sizes.channels), dtype)
        decays = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, MOST_DECAY)
        self.conv, self.a_log = nnx.Param(filters), nnx.Param(jnp.log(decays).astype(dtype))
        self.a_bias = nnx.Param(jnp.ones((heads,), dtype))
        self.norm = norm(sizes.value_dim, config.norm_eps, config, rngs)
        self.out = linear(heads * sizes.value_dim, config.embed_dim)

    def __call__(
        self, x: Array, positions: Array, cache: Cache | None, segments: Array | None = None, mask: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """Apply the network to tokens `[B, T, H]`; return outputs and the updated cache."""
        # Masked tokens, after the others of a sequence, change neither state nor convolution.
        del positions
        if mask is None:
            mask = jnp.ones(x.shape[:2], bool)
        if segments is None:
            segments = jnp.zeros(x.shape[:2], jnp.int32)
        recent, state = self.empty_cache(x.shape[0], 0) if cache is None else cache
        qkv, z, b, a = self._projected(jnp.where(mask[..., None], x, 0))
        qkv = checkpoint_name(qkv, "attention")
        whole = jnp.concatenate([recent, qkv], 1)
        q, k, v = jnp.split(self._convolved(whole, segments).astype(x.dtype), self.sizes.ends, -1)
        q, k, v = (
            part.reshape(*x.shape[:2], -1, width) for part, width in zip((q, k, v), self.sizes.dims, strict=True)
        )
        rate, log_decay = jnp.where(mask[None, ..., None], jnp.stack(self._rates(b, a)), 0)
        y, state = delta_rule(DeltaInputs(q, k, v, log_decay, rate, segments), state)
        y = self.norm(y) * jax.nn.silu(z.astype(jnp.float32)).reshape(y.shape)
        if cache is not None:
            last = mask.sum(1, dtype=jnp.int32)[:, None] + jnp.arange(recent.shape[1])[None]
            cache = jnp.take_along_axis(whole, last[..., None], 1), state
        return self.out(y.astype(x.dtype).reshape(*x.shape[:2], -1)), cache

    def _projected(self, x: Array) -> list[Array]:
        """Return the inputs of the convolution, gates, rates and decays, `[B, T, channels]` each."""
        sizes = self.sizes
        if not sizes.is_joined:
            return [self.qkv(x), self.z(x), self.b(x), self.a(x)]
        each = sizes.num_heads // sizes.num_key_heads
        widths = sizes.key_dim, sizes.key_dim, each * sizes.value_dim, each * sizes.value_dim
        parts = [
            *self.qkvz.by_head(x, sizes.num_key_heads, widths),
            *self.ba.by_head(x, sizes.num_key_heads, (each, each)),
        ]
        q, k, v, *others = (part.reshape(*x.shape[:2], -1) for part in parts)
        return [jnp.concatenate([q, k, v], -1), *others]

    def _convolved(self, whole: Array, segments: Array) -> Array:
        """Apply the filter of each channel to the tokens of its segment up to each token, float32."""
        size, length, total = self.sizes.kernel_size, segments.shape[1], jnp.float32(0)
        earlier, whole = jnp.pad(segments, ((0, 0), (size - 1, 0)), mode="edge"), whole.astype(jnp.float32)
        for at, weight in enumerate(self.conv[...].astype(jnp.float32)):
            is_inside = earlier[:, at : at + length] == segments
            total += jnp.where(is_inside[..., None], whole[:, at : at + length], 0) * weight[None, None]
        return jax.nn.silu(total)

    def _rates(self, b: Array, a: Array) -> tuple[Array, Array]:
        """Return the rates and the logarithms of the decays, float32 `[B, T, N]`."""
        a_log, a_bias = (one[...].astype(jnp.float32)[None, None] for one in (self.a_log, self.a_bias))
        decay = -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + a_bias)
        return jax.nn.sigmoid(b.astype(jnp.float32)), decay

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` sequences of any length."""
        del length
        sizes = self.sizes
        recent = jnp.zeros((batch_size, sizes.kernel_size - 1, sizes.channels), self.compute_dtype)
        return recent, jnp.zeros((batch_size, sizes.num_heads, sizes.key_dim, sizes.value_dim), jnp.float32)
