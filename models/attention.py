"""Causal attention that never holds the scores of all pairs of tokens: cuDNN's kernel, or blocks of queries."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

QUERY_BLOCK = 512
"""So many queries of a sequence have their scores at the same time."""

CUDNN_HEAD_DIM = 128
"""Up to so many channels of a head, a multiple of 8, cuDNN has a kernel on every GPU that multiplies bfloat16."""


def causal_attention(q: Array, k: Array, v: Array, mesh: Mesh) -> Array:
    """Computes the attention of every token to itself and those before it.

    On NVIDIA GPUs it is cuDNN's kernel, which takes narrow heads of bfloat16, and `attention_in_blocks` elsewhere. The
    devices of the mesh decide, not those of this machine, so that a program compiled ahead is the one that runs there.

    Args:
        q: queries `[B, T, N, C]`.
        k: keys, likewise.
        v: values, likewise.
        mesh: the devices that it is computed on.
    """
    if has_cudnn_kernel(mesh, q):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return attention_in_blocks(q, k, v)


def has_cudnn_kernel(mesh: Mesh, q: Array) -> bool:
    """Says whether cuDNN has a kernel for queries `[B, T, N, C]` on the devices of a mesh."""
    narrow = q.dtype == jnp.bfloat16 and q.shape[-1] <= CUDNN_HEAD_DIM and q.shape[-1] % 8 == 0
    return narrow and mesh.devices.flat[0].device_kind.startswith("NVIDIA")


def attention_in_blocks(q: Array, k: Array, v: Array, block: int = QUERY_BLOCK) -> Array:
    """Computes causal attention one block of queries after the other, forward and backward.

    A block reads the keys up to its end alone, so that little is computed to be masked. Scores are not kept: the
    backward pass computes those of a block again. The program grows with the number of blocks. All is computed in
    float32, in which gradients of a key are summed over the blocks that read it; a TPU multiplies bfloat16 even so.

    Args:
        q: queries `[B, T, N, C]`.
        k: keys, likewise.
        v: values, likewise.
        block: how many queries a block has; the last may have fewer.
    """
    wide = [part.astype(jnp.float32) for part in (q, k, v)]
    if q.shape[1] <= block:
        return jax.nn.dot_product_attention(*wide, is_causal=True).astype(q.dtype)
    # Whole arrays go in, of which each block takes its part: slices would be kept for the backward pass.
    blocks = [
        jax.checkpoint(partial(_of_block, start=start, stop=min(start + block, q.shape[1])))(*wide)
        for start in range(0, q.shape[1], block)
    ]
    return jnp.concatenate(blocks, 1).astype(q.dtype)


def _of_block(q: Array, k: Array, v: Array, *, start: int, stop: int) -> Array:
    mask = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None]
    return jax.nn.dot_product_attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask=mask[None, None])
