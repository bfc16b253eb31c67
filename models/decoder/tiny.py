"""Small decoder-only language model with MoE layers, and optional sharding over the data axis (FSDP)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import ExpertConfig, Losses, MoE, Precision, Stats, System, TopK, Topology
from jax_moe_lb.nn import logical_axis_rules
from jax_moe_lb.routing import ForceBalanced
from models.decoder.attention import causal_attention
from models.decoder.layers import one_by_one, scanned
from models.mesh import batch_sharding
from models.model_config import ModelConfig

DATA = "data"
"""Mesh axis over which parameters are sharded."""


def expert_rules(topology: Topology) -> tuple[tuple[str, Any], ...]:
    """Return the `rules` of `nn.MoE` with the widths of experts sharded over the data axis."""
    return tuple((name, DATA if name == "embed" else axes) for name, axes in logical_axis_rules(topology))


def linear_options(mesh: Mesh) -> dict[str, Any]:
    """Return options of `nnx.Linear` with the kernel sharded by rows."""
    return {"kernel_metadata": {"out_sharding": (DATA, None), "mesh": mesh}, "promote_dtype": _Gathering(mesh, 1)}


def embed_options(mesh: Mesh) -> dict[str, Any]:
    """Return options of `nnx.Embed` with the table sharded by channels."""
    return {"embedding_metadata": {"out_sharding": (None, DATA), "mesh": mesh}, "promote_dtype": _Gathering(mesh, 0)}


class _Gathering:
    """Replacement of Flax's `promote_dtype`: cast the arrays of a layer, then gather one of them."""

    def __init__(self, mesh: Mesh, which: int) -> None:
        self.mesh, self.which = mesh, which

    def __call__(self, arrays: tuple[Array | None, ...], **how: Any) -> tuple[Array | None, ...]:
        cast: list[Any] = list(promote_dtype(arrays, **how))
        whole = NamedSharding(self.mesh, PartitionSpec())
        cast[self.which] = jax.lax.with_sharding_constraint(cast[self.which], whole)
        return tuple(cast)


ROPE_BASE = 10_000.0
"""Base of the rotary frequencies, which fall from 1 to `1 / ROPE_BASE`."""


def rope(x: Array) -> Array:
    """Apply the rotary position embedding to `x`, `[B, T, N, C]`."""
    half = x.shape[-1] // 2
    # bfloat16 cannot represent integers between 256 and 258, so angles are float32.
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None]
    sin, cos = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    wide = x.astype(jnp.float32)
    left, right = wide[..., :half], wide[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, mesh: Mesh, split: bool = False, rngs: nnx.Rngs) -> None:
        self.num_heads, self.mesh, width = config.num_heads, mesh, config.embed_dim
        options: dict[str, Any] = linear_options(mesh) if split else {}
        options |= {"use_bias": False, "dtype": config.compute_dtype, "rngs": rngs}
        # One fused product is faster than three.
        self.qkv = nnx.Linear(width, 3 * width, **options)
        self.out = nnx.Linear(width, width, **options)

    def __call__(self, x: Array) -> Array:
        """Apply causal attention to tokens `[B, T, H]`."""
        heads = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        # Rotate queries and keys but not values, so that only scores depend on the distance.
        q, k, v = checkpoint_name((rope(q), rope(k), v), "attention")
        y = checkpoint_name(causal_attention(q, k, v, self.mesh), "attention")
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    """Transformer block: attention, then experts, each with a residual connection."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: Mesh,
        topology: Topology,
        system: System,
        split: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        top_k = TopK(config.experts_per_token, selection_bias=config.bias_rate > 0)
        self.attention_norm = nnx.RMSNorm(config.embed_dim, dtype=jnp.float32, rngs=rngs)
        self.attention = Attention(config, mesh=mesh, split=split, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.embed_dim, dtype=jnp.float32, rngs=rngs)
        self.moe = MoE(
            config.embed_dim,
            config.num_experts,
            ForceBalanced(top_k) if config.force_balanced else top_k,
            mesh=mesh,
            topology=topology,
            system=system,
            experts=ExpertConfig(config.mlp_dim),
            losses=Losses(switch=config.aux_loss, z=config.z_loss),
            rules=expert_rules(topology) if split else None,
            precision=Precision(config.compute_dtype),
            rngs=rngs,
        )

    def __call__(self, x: Array) -> tuple[Array, Stats]:
        """Return the residual stream `[B, T, H]` after the block, and statistics of the MoE layer."""
        # Norms compute in float32; their outputs are cast to the dtype of the stream.
        x = x + self.attention(self.attention_norm(x).astype(x.dtype))
        y, stats = self.moe(self.moe_norm(x).astype(x.dtype))
        return x + y, stats


class LanguageModel(nnx.Module):
    """Language model with MoE layers, from tokens to logits of the next token."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: Mesh,
        topology: Topology,
        system: System,
        split: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.mesh, self.scan_layers = mesh, config.scan_layers
        self.remat: dict[str, Any] = {} if config.remat is None else {"remat": config.remat}
        table: dict[str, Any] = embed_options(mesh) if split else {}
        kernel: dict[str, Any] = linear_options(mesh) if split else {}
        words, width = config.vocab_size, config.embed_dim
        self.embed = nnx.Embed(words, width, dtype=config.compute_dtype, rngs=rngs, **table)
        options: dict[str, Any] = {"mesh": mesh, "topology": topology, "system": system}

        def block() -> Block:
            return Block(config, split=split, rngs=rngs, **options)

        self.blocks = nnx.List([block() for _ in range(config.num_layers)])
        # The loss is computed in float32; with a small vocabulary, so is the output layer, at little cost.
        self.norm = nnx.RMSNorm(config.embed_dim, dtype=jnp.float32, rngs=rngs)
        self.head = nnx.Linear(width, words, use_bias=False, dtype=jnp.float32, rngs=rngs, **kernel)

    def __call__(self, tokens: Array) -> tuple[Array, Stats]:
        """Return logits `[B, T, vocab_size]` of int32 tokens `[B, T]`, and statistics `[layers, D, ...]`."""
        x = self.embed(tokens)
        if self.scan_layers:
            x, stats = scanned(self.blocks, x, batch_sharding(self.mesh), **self.remat)
        else:
            x, stats = one_by_one(self.blocks, x, **self.remat)
        return self.head(self.norm(x)), stats

    def update_bias(self, stats: Stats, rate: float) -> None:
        """Update the selection biases of all layers from the load of one step; see `MoE.update_bias`."""
        for i, block in enumerate(self.blocks):
            block.moe.update_bias(jax.tree.map(lambda leaf, i=i: leaf[i], stats), rate)

    def update_loads(self, stats: Stats) -> None:
        """Update the running loads of all layers, for their relocation; see `MoE.update_loads`."""
        for i, block in enumerate(self.blocks):
            block.moe.update_loads(jax.tree.map(lambda leaf, i=i: leaf[i], stats))
