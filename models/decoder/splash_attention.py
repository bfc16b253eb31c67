"""Splash attention on TPUs: causal attention without stored scores.

Compiled for an absent TPU and compared with plain attention in interpret mode.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, PartitionSpec

BLOCKS = (512, 256, 128)
"""Queries and keys of a step of the kernel: the largest divisor of the sequence length is used."""


def splash_attention(
    q: Array,
    k: Array,
    v: Array,
    mesh: Mesh,
    *,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
    segments: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Compute causal attention of whole sequences, each on one device."""
    by_sequence = PartitionSpec(mesh.axis_names)
    # The kernel has no partitioning rule.
    run = jax.shard_map(
        partial(_of_sequences, scale=scale, window=window, interpret=interpret),
        mesh=mesh,
        in_specs=(by_sequence, by_sequence, by_sequence, PartitionSpec(), by_sequence),
        out_specs=by_sequence,
        check_vma=False,
    )
    return run(q, k, v, sinks, segments)


def _of_sequences(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segments: Array | None,
    *,
    scale: float,
    window: int | None,
    interpret: bool,
) -> Array:
    length, num_heads = q.shape[1:3]
    block = next(size for size in BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    shape = (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # The kernel has no factor on the scores, and heads come before the sequence.
    wide = (q * jnp.asarray(scale, q.dtype)).swapaxes(1, 2)

    def of_sequence(q: Array, k: Array, v: Array, segments: Array | None) -> Array:
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        out: Array = kernel(q, k, v, ids, sinks)
        return out

    return jax.vmap(of_sequence)(wide, k.swapaxes(1, 2), v.swapaxes(1, 2), segments).swapaxes(1, 2)
