"""Grouped-query and latent attention; fused or blockwise kernels avoid storing all scores.

`attend` supports caches, sliding windows, attention sinks and custom scales. `LatentAttention` computes keys and values
from a compressed vector per token, which is stored in the cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from models.decoder.config import DecoderConfig, HeadNorm, IndexerSizes, Latent, Scores
from models.decoder.fused_attention import BLOCKS, cudnn_attention, splash_attention

QUERY_BLOCK = 512  # maximum number of queries per sequence with materialized scores

# Maximum head dimension of cuDNN's kernel on every GPU with bfloat16 matrix products; must be a multiple of 8.
CUDNN_HEAD_DIM = 128
SPLASH_WIDTH = 64  # divisor of the widths of keys and values of splash attention: those compiled are 64, 128 and 192

# Widths of keys and values of cuDNN's kernel for latent attention: those of DeepSeek-V3 and Kimi-K2.
CUDNN_LATENT_DIMS = (192, 128)


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    mesh: Mesh,
    scores: Scores,
    sinks: Array | None = None,
    segments: Array | None = None,
    index: "Index | None" = None,
) -> Array:
    """Compute causal attention of whole sequences."""
    # NVIDIA GPUs use cuDNN's kernel where `has_cudnn_kernel`, TPUs splash attention where `has_splash_kernel`; other
    # cases compute scores in blocks of queries. The mesh decides, not the local devices, so ahead-of-time compilation
    # yields the program of the target.
    # The gradient of cuDNN's kernel with a mask needs an even length.
    positions = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    if index is not None:
        return attend(q, k, v, positions, scores, sinks, segments, index=index, whole=True)
    if has_cudnn_kernel(mesh, q, v) and (segments is None or q.shape[1] % 2 == 0):
        is_usual = sinks is None and q.shape[-1] == v.shape[-1]
        kernel = partial(_of_jax if is_usual else cudnn_attention, scores)
        return _on_each_device(kernel, q, k, v, sinks, segments)
    if has_splash_kernel(mesh, q, v):
        return splash_attention(q, k, v, mesh, scores, sinks, segments)
    return attend(q, k, v, positions, scores, sinks, segments, whole=True)


def _of_jax(scores: Scores, q: Array, k: Array, v: Array, sinks: None, segments: Array | None) -> Array:
    reach = None if scores.window is None else (scores.window - 1, 0)
    mask = None if segments is None else (segments[:, :, None] == segments[:, None])[:, None]
    options: dict[str, Any] = {"is_causal": True, "local_window_size": reach, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scores.scale, **options)


def _on_each_device(
    kernel: Callable[..., Array], q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None
) -> Array:
    """Call a kernel; inside a stage of a pipeline, with the sequences of each device."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return kernel(q, k, v, sinks, segments)
    # JAX cannot partition cuDNN's calls over the other axes of a mesh of which some are manual.
    axes = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    split = PartitionSpec(axes)
    specs = (split, split, split, PartitionSpec(), split)
    run = jax.shard_map(kernel, in_specs=specs, out_specs=split, axis_names=set(axes), check_vma=False)
    return run(q, k, v, sinks, segments)


def has_cudnn_kernel(mesh: Mesh, q: Array, v: Array) -> bool:
    """Return whether cuDNN has a kernel for queries `[B, T, N, C]` and values `[B, T, G, V]` on a mesh."""
    # Widths differ in latent attention alone, whose kernel needs a Hopper GPU or newer and cuDNN 9.10.
    device = mesh.devices.flat[0]
    if q.dtype != jnp.bfloat16 or not device.device_kind.startswith("NVIDIA"):
        return False
    widths = q.shape[-1], v.shape[-1]
    if widths[0] == widths[1]:
        return widths[0] <= CUDNN_HEAD_DIM and widths[0] % 8 == 0
    return widths == CUDNN_LATENT_DIMS and float(getattr(device, "compute_capability", 0)) >= 9


def has_splash_kernel(mesh: Mesh, q: Array, v: Array) -> bool:
    """Return whether splash attention takes queries `[B, T, N, C]` and values `[B, T, G, V]` on a mesh."""
    # Each device takes whole sequences, so their number must be a multiple of the devices.
    device, (batch, length, _, width) = mesh.devices.flat[0], q.shape
    if q.dtype != jnp.bfloat16 or not device.device_kind.startswith("TPU"):
        return False
    # The sequences of a pipeline stage are split already.
    are_whole = batch % mesh.size == 0 and not jax.sharding.get_abstract_mesh().manual_axes
    return are_whole and length % BLOCKS[-1] == 0 and width % SPLASH_WIDTH == 0 and v.shape[-1] % SPLASH_WIDTH == 0


# Cached state of earlier tokens, `[B, S, ...]`: keys and values, or the compressed vectors of latent attention. Gated
# delta networks have states of the last token in place of it.
Cache = tuple[Array, Array]


class Index(NamedTuple):
    """Products that choose the keys of each query in sparse attention."""

    q: Array  # queries of the indexer, `[B, T, N, C]`
    k: Array  # keys of the indexer, `[B, S, C]`
    weights: Array  # weights of its heads, float32 `[B, T, N]`


def attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    scores: Scores,
    sinks: Array | None = None,
    segments: Array | None = None,
    *,
    index: Index | None = None,
    whole: bool = False,
) -> Array:
    """Compute attention of each query to the keys up to its position, in float32."""
    # For long sequences, at most `QUERY_BLOCK` queries have materialized scores, also in the backward pass. Of whole
    # sequences, a block reads only the keys up to its end, so few scores are masked.
    given = q, k, v, positions, sinks, segments, index
    if q.shape[1] <= QUERY_BLOCK:
        return _of_block(scores, range(q.shape[1]), k.shape[1], *given)
    parts = []
    for start in range(0, q.shape[1], QUERY_BLOCK):
        queries = range(start, min(start + QUERY_BLOCK, q.shape[1]))
        # Slice inside the checkpointed function; slices passed to it would be stored as residuals.
        block = partial(_of_block, scores, queries, queries.stop if whole else k.shape[1])
        parts.append(jax.checkpoint(block)(*given))
    return jnp.concatenate(parts, 1)


def _of_block(scores: Scores, queries: range, num_keys: int, *given: Any) -> Array:
    q, k, v, positions, sinks, segments, index = given
    part = slice(queries.start, queries.stop)
    q, k, v, positions = q[:, part], k[:, :num_keys], v[:, :num_keys], positions[:, part]
    num_groups = k.shape[2]
    # Heads of a group are adjacent: [B, T, G, N / G, C].
    grouped = q.reshape(*q.shape[:2], num_groups, -1, q.shape[-1]).astype(jnp.float32)
    logits = jnp.einsum("btgnc,bsgc->bgnts", grouped, k.astype(jnp.float32)) * scores.scale
    places = jnp.arange(num_keys, dtype=positions.dtype)[None, None]
    seen = places <= positions[:, :, None]
    if segments is not None:
        seen &= segments[:, part, None] == segments[:, None, :num_keys]
    if scores.window is not None:
        seen &= places > positions[:, :, None] - scores.window
    if scores.chunk is not None:
        seen &= places // scores.chunk == positions[:, :, None] // scores.chunk
    if index is not None:
        in_block = Index(index.q[:, part], index.k[:, :num_keys], index.weights[:, part])
        seen &= _chosen(in_block, seen, scores.num_keys)
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_groups, -1, 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:-1], 1))], -1)
    shares = jax.nn.softmax(logits, -1)[..., :num_keys]
    y = jnp.einsum("bgnts,bsgv->btgnv", shares, v.astype(jnp.float32))
    return y.reshape(*q.shape[:3], -1).astype(q.dtype)


def _chosen(index: Index, seen: Array, number: int) -> Array:
    """Return the keys with the largest sums of an indexer's heads for each query, bool `[B, T, S]`."""
    products = jnp.einsum("btnc,bsc->btns", index.q.astype(jnp.float32), index.k.astype(jnp.float32))
    sums = jnp.einsum("btns,btn->bts", jax.nn.relu(products), index.weights)
    places = jax.lax.top_k(jnp.where(seen, sums, -jnp.inf), min(number, sums.shape[-1]))[1]
    line, query = (jnp.arange(size)[:, None] for size in sums.shape[:2])
    return jnp.zeros(sums.shape, bool).at[line[..., None], query[None], places].set(True)


def remember(cache: Cache, new: Cache, positions: Array) -> Cache:
    """Write new entries `[B, T, ...]` at positions `[B, T]` of a cache `[B, S, ...]`."""
    lines = jnp.arange(positions.shape[0])[:, None]

    def put(old: Array, new: Array) -> Array:
        return old.at[lines, positions].set(new.astype(old.dtype))

    return put(cache[0], new[0]), put(cache[1], new[1])


def chunks_in(positions: Array, chunk: int) -> Array:
    """Return the number of each token's chunk, int32 `[B, T]`, ascending."""
    return jnp.cumsum((positions % chunk == 0).astype(jnp.int32), 1)


class Linear(nnx.Linear):
    """Linear map, plus the low-rank map of its adapters if `add_adapters` added some."""

    # Both are applied to the tokens, so that the gradient of the adapters needs none of the matrix.

    kernel_a: Any
    kernel_b: Any

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Apply the map to tokens `[B, T, H]`."""
        y = super().__call__(inputs, out_sharding)
        if not hasattr(self, "kernel_a"):
            return y
        a, b = (adapter[...].astype(y.dtype) for adapter in (self.kernel_a, self.kernel_b))
        return y + jnp.matmul(jnp.matmul(inputs.astype(y.dtype), a), b)

    def by_head(self, inputs: Array, num_heads: int, sizes: tuple[int, ...]) -> list[Array]:
        """Apply a map without bias to tokens `[B, T, H]`, with an array for each part of the channels of a head."""
        # Splitting the weights moves fewer bytes than splitting the outputs, and their gradients need not be joined.
        ends = [sum(sizes[: at + 1]) for at in range(len(sizes) - 1)]

        def parts(matrix: nnx.Variable) -> list[Array]:
            heads = matrix[...].astype(self.dtype).reshape(matrix.shape[0], num_heads, -1)
            return [part.reshape(matrix.shape[0], -1) for part in jnp.split(heads, ends, -1)]

        x = inputs.astype(self.dtype)
        outputs = [jnp.matmul(x, part) for part in parts(self.kernel)]
        if hasattr(self, "kernel_a"):
            low = jnp.matmul(x, self.kernel_a[...].astype(self.dtype))
            outputs = [y + jnp.matmul(low, part) for y, part in zip(outputs, parts(self.kernel_b), strict=True)]
        return [y.reshape(*x.shape[:-1], num_heads, -1) for y in outputs]


class GroupedAttention(nnx.Module):
    """Grouped-query attention with rotary positions, and optional head norms, biases, sinks, windows and chunks."""

    def __init__(self, config: DecoderConfig, layer: int, *, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.config, self.mesh, self.rotates = config, mesh, layer not in config.unrotated_layers
        width, dims, dtypes = config.embed_dim, config.head_dim, linear_options(config)

        def head_norm(num_heads: int) -> nnx.RMSNorm | None:
            is_unweighted = config.qk_norm is HeadNorm.UNWEIGHTED
            if config.qk_norm is None or (is_unweighted and not self.rotates):
                return None
            normalized = num_heads * dims if config.qk_norm is HeadNorm.FULL_WIDTH else dims
            options = {"use_scale": not is_unweighted, "zero_centered": config.zero_centered}
            return norm(normalized, config.norm_eps, config, rngs, **options)

        query_dims = 2 * dims if config.output_gate else dims
        widths = [config.num_heads * query_dims, config.num_kv_heads * dims, config.num_kv_heads * dims]
        self.q, self.k, self.v = _split_linear(width, widths, rngs, use_bias=config.qkv_bias, **dtypes)
        self.out = Linear(config.num_heads * dims, width, use_bias=config.out_bias, rngs=rngs, **dtypes)
        self.q_norm, self.k_norm = head_norm(config.num_heads), head_norm(config.num_kv_heads)
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), config.param_dtype)) if config.sinks else None
        self.scores = Scores(config.attention_scale, config.window(layer), config.chunk(layer))
        self.temperature = None if self.rotates else config.temperature

    def __call__(
        self, x: Array, positions: Array, cache: Cache | None, segments: Array | None = None, mask: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """Apply attention to tokens `[B, T, H]` at `positions`; return outputs and the updated cache."""
        q = self.q(x).reshape(*x.shape[:2], self.config.num_heads, -1)
        # With a gate, the second half of the channels of a head.
        q, gate = jnp.split(q, [self.config.head_dim], -1)
        k, v = (part(x).reshape(*x.shape[:2], -1, self.config.head_dim) for part in (self.k, self.v))
        if not self.config.norm_after_rope:
            q, k = self._normed(q, k)
        if self.rotates:
            # A rotation keeps the norm of a head, so that norms without weights before and after it are equal.
            q, k = self.config.rope(q, positions, mask), self.config.rope(k, positions, mask)
        elif self.temperature is not None:
            q = (q * self.temperature(positions)[:, :, None, None]).astype(x.dtype)
        if self.config.norm_after_rope:
            q, k = self._normed(q, k)
        q, k, v = checkpoint_name((q, k, v), "attention")
        sinks, chunk = None if self.sinks is None else self.sinks[...], self.scores.chunk
        if cache is not None:
            cache = k, v = remember(cache, (k, v), positions)
            y = attend(q, k, v, positions, self.scores, sinks)
        else:
            # A chunk at least as long as the sequence limits nothing.
            if chunk is not None and chunk < x.shape[1]:
                segments = chunks_in(jnp.broadcast_to(positions, x.shape[:2]), chunk)
            y = causal_attention(q, k, v, self.mesh, self.scores, sinks, segments)
        y = checkpoint_name(y, "attention")
        if self.config.output_gate:
            y = y * jax.nn.sigmoid(gate)
        return self.out(y.reshape(*x.shape[:2], -1)), cache

    def _normed(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Normalize queries and keys `[B, T, heads, C]`, each head or all together."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        is_full, parts = self.config.qk_norm is HeadNorm.FULL_WIDTH, ((self.q_norm, q), (self.k_norm, k))
        flat = ((norm, x.reshape(*x.shape[:2], -1) if is_full else x, x) for norm, x in parts)
        q, k = (norm(given).astype(x.dtype).reshape(x.shape) for norm, given, x in flat)
        return q, k

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` sequences of `length` tokens."""
        config = self.config
        shape = (batch_size, length, config.num_kv_heads, config.head_dim)
        return jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)


def _with_one(arrays: tuple[Array, ...], **how: Any) -> tuple[Array, ...]:
    """Replacement of Flax's `promote_dtype`: cast inputs and weights of a norm, and add 1 to the weights."""
    x, weight = promote_dtype(arrays, **how)
    return x, 1 + weight


def norm(
    width: int,
    eps: float,
    config: DecoderConfig,
    rngs: nnx.Rngs,
    *,
    use_scale: bool = True,
    zero_centered: bool = False,
) -> nnx.RMSNorm:
    """Return an RMS norm computing in float32, for parameters of any dtype."""
    options: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": config.param_dtype, "use_scale": use_scale}
    if zero_centered:
        options |= {"promote_dtype": _with_one, "scale_init": nnx.initializers.zeros}
    return nnx.RMSNorm(width, epsilon=eps, rngs=rngs, **options)


StreamNorm = nnx.RMSNorm | nnx.LayerNorm  # norm of the residual stream


def stream_norm(config: DecoderConfig, rngs: nnx.Rngs) -> StreamNorm:
    """Return a norm of the residual stream, computing in float32."""
    if not config.layer_norm:
        return norm(config.embed_dim, config.norm_eps, config, rngs, zero_centered=config.zero_centered)
    options: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": config.param_dtype, "use_fast_variance": False}
    return nnx.LayerNorm(config.embed_dim, epsilon=config.norm_eps, rngs=rngs, **options)


def linear_options(config: DecoderConfig) -> dict[str, Any]:
    """Return the dtypes of a linear map."""
    return {"dtype": config.compute_dtype, "param_dtype": config.param_dtype}


def _split_linear(inner: int, widths: Sequence[int], rngs: nnx.Rngs, **options: Any) -> list[Linear]:
    """Return linear maps whose kernels are the parts of one random matrix."""
    key, ends, init = rngs.params(), np.cumsum(widths), nnx.initializers.lecun_normal()

    def part(end: int, width: int) -> Linear:
        def kernel(_: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return init(key, (shape[0], int(ends[-1])), dtype)[:, end - width : end]

        return Linear(inner, width, kernel_init=kernel, rngs=nnx.Rngs(0), **options)

    return [part(int(end), width) for end, width in zip(ends, widths, strict=True)]


LATENT_EPS = 1e-6  # epsilon of the norms of compressed vectors, independent of `norm_eps`


class Indexer(nnx.Module):
    """Choice of the keys of each query by heads of their own (DeepSeek-V3.2, DeepSeek Sparse Attention)."""

    # It has no gradient, so that training leaves it as it is. The authors train it to follow the attention.

    def __init__(self, config: DecoderConfig, rank: int, sizes: IndexerSizes, *, rngs: nnx.Rngs) -> None:
        self.sizes = sizes
        options: dict[str, Any] = linear_options(config) | {"use_bias": False, "rngs": rngs}
        self.q = Linear(rank, sizes.num_heads * sizes.head_dim, **options)
        self.k = Linear(config.embed_dim, sizes.head_dim, **options)
        wide: dict[str, Any] = {"dtype": jnp.float32, "param_dtype": config.param_dtype, "use_fast_variance": False}
        self.k_norm = nnx.LayerNorm(sizes.head_dim, epsilon=LATENT_EPS, rngs=rngs, **wide)
        self.weights = Linear(config.embed_dim, sizes.num_heads, **options)

    def __call__(self, x: Array, low: Array, rotated: Callable[[Array], Array]) -> Index:
        """Return the products of tokens `[B, T, H]` and their compressed queries."""
        x, low = jax.lax.stop_gradient((x, low))
        q = self.q(low).reshape(*x.shape[:2], self.sizes.num_heads, -1)
        k = self.k_norm(self.k(x)).astype(x.dtype)[:, :, None]
        weights = self.weights(x).astype(jnp.float32) * (self.sizes.num_heads * self.sizes.head_dim) ** -0.5
        found = Index(rotated(q), rotated(k)[:, :, 0], weights)
        return jax.lax.stop_gradient(found)


class LatentAttention(nnx.Module):
    """Multi-head latent attention."""

    # Source: DeepSeek-V2, section 2.1. Deviation: each decoding step recomputes the keys and values of the whole cache;
    # the paper absorbs their projections into those of queries and outputs.

    def __init__(self, config: DecoderConfig, latent: Latent, *, mesh: Mesh, rngs: nnx.Rngs) -> None:
        self.config, self.latent, self.mesh = config, latent, mesh
        width, num_heads, q_width = config.embed_dim, config.num_heads, latent.query_rank

        def linear(inner: int, outer: int, use_bias: bool = False) -> Linear:
            return Linear(inner, outer, use_bias=use_bias, rngs=rngs, **linear_options(config))

        self.q_down = None if q_width is None else linear(width, q_width, config.qkv_bias)
        self.q_norm = None if q_width is None else norm(q_width, LATENT_EPS, config, rngs)
        self.q_up = linear(q_width or width, num_heads * (latent.plain_dim + latent.rotated_dim))
        self.kv_down = linear(width, latent.kv_rank + latent.rotated_dim, config.qkv_bias)
        self.kv_norm = norm(latent.kv_rank, LATENT_EPS, config, rngs)
        self.kv_up = linear(latent.kv_rank, num_heads * (latent.plain_dim + latent.value_dim))
        self.out = linear(num_heads * latent.value_dim, width, config.out_bias)
        sizes, rank = latent.indexer, q_width or width
        self.indexer = None if sizes is None else Indexer(config, rank, sizes, rngs=rngs)

    def __call__(
        self, x: Array, positions: Array, cache: Cache | None, segments: Array | None = None, mask: Array | None = None
    ) -> tuple[Array, Cache | None]:
        """Apply attention to tokens `[B, T, H]` at `positions`; return outputs and the updated cache."""
        low = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)).astype(x.dtype)
        rotated = partial(self.config.rope, positions=positions, mask=mask)
        q = self._queries(low, rotated)
        if self.config.temperature is not None:
            q = (q * self.config.temperature(positions)[:, :, None, None]).astype(x.dtype)
        small, turning = jnp.split(self.kv_down(x), [self.latent.kv_rank], -1)
        # The rotated part is a single head, shared by all query heads, without a norm.
        turned = rotated(turning[:, :, None])[:, :, 0]
        small = self.kv_norm(small).astype(x.dtype)
        index = None if self.indexer is None else self.indexer(x, low, rotated)
        if cache is not None:
            new = turned if index is None else jnp.concatenate([turned, index.k.astype(turned.dtype)], -1)
            cache = small, turned = remember(cache, (small, new), positions)
            turned, keys = jnp.split(turned, [self.latent.rotated_dim], -1)
            index = None if index is None else index._replace(k=keys)
        k, v = self._keys_and_values(small, turned)
        q, k, v = checkpoint_name((q, k, v), "attention")
        sizes = self.latent.indexer
        scores = Scores(self.config.attention_scale, num_keys=0 if sizes is None else sizes.num_keys)
        if cache is not None:
            y = attend(q, k, v, positions, scores, index=index)
        else:
            # An indexer chooses all keys of short sequences.
            index = index if x.shape[1] > scores.num_keys else None
            y = causal_attention(q, k, v, self.mesh, scores, None, segments, index)
        y = checkpoint_name(y, "attention")
        return self.out(y.reshape(*x.shape[:2], -1)), cache

    def _queries(self, low: Array, rotated: Callable[[Array], Array]) -> Array:
        heads = self.q_up(low).reshape(*low.shape[:2], self.config.num_heads, -1)
        plain, turning = jnp.split(heads, [self.latent.plain_dim], -1)
        return jnp.concatenate([plain, rotated(turning)], -1)

    def _keys_and_values(self, small: Array, turned: Array) -> tuple[Array, Array]:
        sizes = self.latent.plain_dim, self.latent.value_dim
        plain, v = self.kv_up.by_head(small, self.config.num_heads, sizes)
        shared = jnp.broadcast_to(turned[:, :, None], (*plain.shape[:3], turned.shape[-1])).astype(plain.dtype)
        return jnp.concatenate([plain, shared], -1), v

    def empty_cache(self, batch_size: int, length: int) -> Cache:
        """Return an empty cache for `batch_size` sequences of `length` tokens."""
        indexer = self.latent.indexer
        dims = (self.latent.kv_rank, self.latent.rotated_dim + (0 if indexer is None else indexer.head_dim))
        small, turned = (jnp.zeros((batch_size, length, dim), self.config.compute_dtype) for dim in dims)
        return small, turned
