"""cuDNN's attention kernel where `jax.nn.dot_product_attention` does not offer it: latent attention, attention sinks.

`jax.nn` refuses values narrower than keys. Its rule drops the cotangent of the returned log-sum-exp without a word, and
sinks need it. So these functions call its forward and backward primitives, which are internal to JAX.

Compiled for absent GPUs and compared with plain attention on a CPU, with the primitives written out.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as cudnn

Gradients = tuple[Array, Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cudnn_attention(
    q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None, scale: float, window: int | None
) -> Array:
    """Compute causal attention without storing scores."""
    return _with_residuals(q, k, v, sinks, segments, scale, window)[0]


def _with_residuals(
    q: Array, k: Array, v: Array, sinks: Array | None, segments: Array | None, scale: float, window: int | None
) -> tuple[Array, tuple[Any, ...]]:
    out, total = forward(q, k, v, segments, scale, window)
    if sinks is not None:
        # A sink adds exp(sink) to the denominator of the softmax and nothing to its numerator.
        without, total = total, jnp.logaddexp(total, sinks.astype(jnp.float32)[None, :, None])
        share = jnp.exp(without - total).transpose(0, 2, 1)[..., None]
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
    return out, (q, k, v, sinks, segments, total, out)


def _gradients(
    scale: float, window: int | None, residuals: tuple[Any, ...], upstream: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, segments, total, out = residuals
    # Shares of keys and the product of outputs and gradients include the sink, so the kernel's formula stays the same.
    dq, dk, dv = backward(q, k, v, segments, total, out, upstream, scale, window)
    if sinks is None:
        return dq, dk, dv, None, None
    product = jnp.einsum("btnv,btnv->bnt", upstream.astype(jnp.float32), out.astype(jnp.float32))
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - total)
    return dq, dk, dv, -(share * product).sum((0, 2)).astype(sinks.dtype), None


cudnn_attention.defvjp(_with_residuals, _gradients)


def forward(
    q: Array, k: Array, v: Array, segments: Array | None, scale: float, window: int | None
) -> tuple[Array, Array]:
    """Return outputs `[B, T, N, V]` and the float32 log-sum-exp of the scores, `[B, N, T]`."""
    out, total = cudnn._dot_product_attention_fwd_p_wrapper.bind(
        q, k, v, *_other_operands(q, segments), **_options(segments, scale, window), is_training=True
    )
    return out, total


def backward(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    total: Array,
    out: Array,
    upstream: Array,
    scale: float,
    window: int | None,
) -> Gradients:
    """Return the gradients of `q`, `k` and `v` for given log-sum-exp and outputs."""
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *_other_operands(q, segments), total, out, upstream, **_options(segments, scale, window)
    )
    return dq, dk, dv


def _other_operands(q: Array, segments: Array | None) -> list[Array]:
    """Return the bias of the scores and the six unused operands."""
    empty = [jnp.zeros((0,), q.dtype)] * 7
    if segments is None:
        return empty
    outside = jnp.asarray(cudnn.get_large_negative_number(q.dtype), q.dtype)
    return [jnp.where(segments[:, None, :, None] == segments[:, None, None], 0, outside), *empty[1:]]


def _options(segments: Array | None, scale: float, window: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        # Whether there is a bias, and a gradient of it.
        "variadic_args": (segments is not None, False),
        "mask_type": cudnn.MaskType.CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    # Newer releases also have a function on scores.
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters:
        options["score_mod"] = None
    return options
