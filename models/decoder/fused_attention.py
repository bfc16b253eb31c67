"""Attention kernels that store no scores: cuDNN's on NVIDIA GPUs, and splash attention on TPUs.

`jax.nn.dot_product_attention` refuses values narrower than keys. Its rule drops the cotangent of the returned
log-sum-exp without a word, and attention sinks need it. For latent attention and sinks, the functions for cuDNN
therefore call its forward and backward primitives, which are internal to JAX.

Both are compiled for absent devices and compared with plain attention on a CPU, with cuDNN's primitives written out.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

from models.decoder.config import Scores

BLOCKS = (512, 256, 128)  # queries and keys of a step of the kernel: the largest divisor of the sequence length is used


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    mesh: Mesh,
    scores: Scores,
    sinks: Array | None,
    segments: Array | None,
    *,
    interpret: bool = False,
) -> Array:
    """Compute causal attention of whole sequences, each on one device."""
    by_sequence = PartitionSpec(mesh.axis_names)
    # The kernel has no partitioning rule.
    run = jax.shard_map(
        partial(_of_sequences, scores, interpret),
        mesh=mesh,
        in_specs=(by_sequence, by_sequence, by_sequence, PartitionSpec(), by_sequence),
        out_specs=by_sequence,
        check_vma=False,
    )
    return run(q, k, v, sinks, segments)


def _of_sequences(
    scores: Scores, interpret: bool, q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None
) -> Array:
    length, num_heads = q.shape[1:3]
    block = next(size for size in BLOCKS if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": block for name in names}
    shape = (length, length)
    mask: Any = masks.CausalMask(shape)
    if scores.window is not None:
        mask = masks.LocalMask(shape, (scores.window - 1, 0), 0)
    how: dict[str, Any] = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads), block_sizes=kernels.BlockSizes(**blocks), **how
    )
    # The kernel has no factor on the scores, and heads come before the sequence.
    wide = (q * jnp.asarray(scores.scale, q.dtype)).swapaxes(1, 2)

    def of_sequence(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        out: Array = kernel(q, k, v, ids, sinks)
        return out

    return jax.vmap(of_sequence)(wide, k.swapaxes(1, 2), v.swapaxes(1, 2), segments).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def cudnn_attention(scores: Scores, q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None) -> Array:
    """Compute causal attention without storing scores."""
    return _with_residuals(scores, q, k, v, sinks, segments)[0]


def _with_residuals(
    scores: Scores, q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    out, total = forward(q, k, v, segments, scores)
    if sinks is not None:
        # A sink adds exp(sink) to the denominator of the softmax and nothing to its numerator.
        without, total = total, jnp.logaddexp(total, sinks.astype(jnp.float32)[None, :, None])
        share = jnp.exp(without - total).transpose(0, 2, 1)[..., None]
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
    return out, (q, k, v, sinks, segments, total, out)


def _gradients(
    scores: Scores, residuals: tuple[Any, ...], upstream: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, segments, total, out = residuals
    # Shares of keys and the product of outputs and gradients include the sink, so the kernel's formula stays the same.
    dq, dk, dv = backward(q, k, v, segments, total, out, upstream, scores)
    if sinks is None:
        return dq, dk, dv, None, None
    product = jnp.einsum("btnv,btnv->bnt", upstream.astype(jnp.float32), out.astype(jnp.float32))
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - total)
    return dq, dk, dv, -(share * product).sum((0, 2)).astype(sinks.dtype), None


cudnn_attention.defvjp(_with_residuals, _gradients)


def forward(q: Array, k: Array, v: Array, segments: Array | None, scores: Scores) -> tuple[Array, Array]:
    """Return outputs `[B, T, N, V]` and the float32 log-sum-exp of the scores, `[B, N, T]`."""
    bind: Any = cudnn._dot_product_attention_fwd_p_wrapper.bind
    out, total = bind(q, k, v, *_other_operands(q, segments), **_options(segments, scores), is_training=True)
    return out, total


def backward(
    q: Array, k: Array, v: Array, segments: Array | None, total: Array, out: Array, upstream: Array, scores: Scores
) -> tuple[Array, Array, Array]:
    """Return the gradients of `q`, `k` and `v` for given log-sum-exp and outputs."""
    given = q, k, v, *_other_operands(q, segments), total, out, upstream
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(*given, **_options(segments, scores))
    return dq, dk, dv


def _other_operands(q: Array, segments: Array | None) -> list[Array]:
    """Return the bias of the scores and the six unused operands."""
    empty = [jnp.zeros((0,), q.dtype)] * 7
    if segments is None:
        return empty
    outside = jnp.asarray(cudnn.get_large_negative_number(q.dtype), q.dtype)
    return [jnp.where(segments[:, None, :, None] == segments[:, None, None], 0, outside), *empty[1:]]


def _options(segments: Array | None, scores: Scores) -> dict[str, Any]:
    options: dict[str, Any] = {
        "scale": scores.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        # Whether there is a bias, and a gradient of it.
        "variadic_args": (segments is not None, False),
        "mask_type": cudnn.MaskType.CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": scores.window,
    }
    # Newer releases also have a function on scores.
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters:
        options["score_mod"] = None
    return options
