"""Decoder-only language model of attention and dense or mixture-of-experts blocks.

`MultiTokenPrediction` predicts one token further ahead from the hidden states of the model.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jax_moe_lb import ExpertConfig, Losses, MoE, Precision, SharedExpert, Stats, System, Topology
from jax_moe_lb.nn import SharedMix
from models.data.marks import positions_in
from models.decoder.attention import (
    Cache,
    GroupedAttention,
    LatentAttention,
    StreamNorm,
    linear_options,
    norm,
    stream_norm,
)
from models.decoder.config import DecoderConfig
from models.decoder.delta_net import GatedDeltaNet
from models.decoder.layers import Rules
from models.mesh import topology_of


def scaled(x: Array, factor: float) -> Array:
    """Return `x * factor` in the dtype of `x`; 1 adds no operation."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _normed(norm: StreamNorm, x: Array, *, is_here: bool) -> Array:
    """Apply a norm, which computes in float32, if it has this place in the block."""
    return norm(x).astype(x.dtype) if is_here else x


class MultiTokenPrediction(nnx.Module):
    """Multi-token prediction module with a block of its own."""

    # It shares the embedding and the output layer with the model. It is used in training only and does not change the
    # outputs of the model.
    # Source: DeepSeek-V3 technical report, section 2.2. Deviations, matching the published weights: the first module
    # receives the hidden states after the final norm, and the embedding comes first in the concatenation.

    def __init__(self, config: DecoderConfig, block: Any, *, rngs: nnx.Rngs) -> None:
        width = config.embed_dim
        self.embed_norm = norm(width, config.norm_eps, config, rngs)
        self.stream_norm = norm(width, config.norm_eps, config, rngs)
        self.join = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs, **linear_options(config))
        self.block = block
        self.norm = norm(width, config.norm_eps, config, rngs)

    def joined(self, x: Array, following: Array) -> Array:
        """Return the block input: hidden states joined with embeddings of the following tokens, `[B, T, H]`."""
        both = self.embed_norm(following).astype(x.dtype), self.stream_norm(x).astype(x.dtype)
        return self.join(jnp.concatenate(both, -1))


class FeedForward(nnx.Module):
    """Dense SwiGLU network, used in the first layers of some models."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        options = linear_options(config) | {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(config.embed_dim, config.dense_mlp_dim, **options)
        self.gate = nnx.Linear(config.embed_dim, config.dense_mlp_dim, **options)
        self.down = nnx.Linear(config.dense_mlp_dim, config.embed_dim, **options)

    def __call__(self, x: Array) -> Array:
        """Apply the network to tokens `[..., H]`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nnx.Module):
    """Decoder block: attention, then experts or a dense network, each with a residual connection."""

    def __init__(self, config: DecoderConfig, layer: int, where: dict[str, Any], rngs: nnx.Rngs) -> None:
        # `where` has the arguments `mesh`, `topology`, `system` and `rules` of the layers with experts.
        self.residual_scale, self.norm_after = config.residual_scale, config.norm_after
        self.attention_norm = stream_norm(config, rngs)
        self.attention: GroupedAttention | LatentAttention | GatedDeltaNet
        if config.delta is not None and layer in config.delta_layers:
            self.attention = GatedDeltaNet(config, config.delta, rngs=rngs)
        elif config.latent is None:
            self.attention = GroupedAttention(config, layer, mesh=where["mesh"], rngs=rngs)
        else:
            self.attention = LatentAttention(config, config.latent, mesh=where["mesh"], rngs=rngs)
        self.moe_norm = stream_norm(config, rngs)
        self.dense = FeedForward(config, rngs=rngs) if layer in config.dense_layers else None
        self.moe = None if self.dense else _experts(config, where, rngs)

    def __call__(
        self,
        x: Array,
        positions: Array | None = None,
        mask: Array | None = None,
        cache: Cache | None = None,
        segments: Array | None = None,
        experts: Array | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Apply the block to the residual stream `[B, T, H]`."""
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        between = _normed(self.attention_norm, x, is_here=not self.norm_after)
        y, new = self.attention(between, positions, cache, segments, mask)
        y = _normed(self.attention_norm, y, is_here=self.norm_after)
        x = checkpoint_name(x + scaled(y, self.residual_scale), "stream")
        between = _normed(self.moe_norm, x, is_here=not self.norm_after)
        stats: Any = None
        if self.moe is not None:
            y, *found = self.moe(between, mask, experts=experts, return_routing=return_routing)
            stats = tuple(found) if return_routing else found[0]
        elif self.dense is not None:
            y = self.dense(between)
        x = x + scaled(_normed(self.moe_norm, y, is_here=self.norm_after), self.residual_scale)
        return (x, stats) if cache is None else (x, stats, new)


class Decoder(nnx.Module):
    """Decoder-only language model, from tokens to logits of the next token."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        mesh: Mesh,
        system: System,
        topology: Topology | None = None,
        rules: Rules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.mesh = config, mesh
        options = linear_options(config) | {"rngs": rngs}
        self.embed = nnx.Embed(config.vocab_size, config.embed_dim, **options)
        where = {"mesh": mesh, "topology": topology or topology_of(mesh), "system": system, "rules": rules}
        self.blocks = nnx.List([DecoderBlock(config, layer, where, rngs) for layer in range(config.num_layers)])
        self.norm = stream_norm(config, rngs)
        options |= {"use_bias": config.head_bias}
        self.head = None if config.tie_embeddings else nnx.Linear(config.embed_dim, config.vocab_size, **options)
        further = range(config.num_layers, config.num_layers + config.num_further)
        blocks = (DecoderBlock(config, layer, where, rngs) for layer in further)
        self.further = nnx.List([MultiTokenPrediction(config, block, rngs=rngs) for block in blocks])

    def __call__(
        self, tokens: Array, mask: Array | None = None, segments: Array | None = None, experts: Array | None = None
    ) -> tuple[Array, Stats]:
        """Compute the logits of whole sequences."""
        positions = None if segments is None else positions_in(segments)
        x, per_layer = scaled(self.embed(tokens), self.config.embed_scale), list[Stats]()
        for block in self.blocks:
            given = None if experts is None or block.moe is None else experts[len(per_layer)]
            x, stats = block(x, positions, mask, None, segments, given)
            per_layer += [] if stats is None else [stats]
        return self._logits(x), jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer)

    def _logits(self, x: Array) -> Array:
        x = self.norm(x).astype(x.dtype)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return scaled(logits.astype(jnp.float32), self.config.logit_scale)

    def extend(
        self, tokens: Array, positions: Array, mask: Array, cache: Sequence[Cache], *, return_routing: bool = False
    ) -> tuple[Array, Any, list[Cache]]:
        """Compute the logits of tokens following the cached ones."""
        x, per_layer, after = scaled(self.embed(tokens), self.config.embed_scale), [], []
        for block, before in zip(self.blocks, cache, strict=True):
            x, stats, new = block(x, positions, mask, before, return_routing=return_routing)
            per_layer += [] if stats is None else [stats]
            after.append(new)
        return self._logits(x), jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer), after

    def empty_cache(self, batch_size: int, length: int) -> list[Cache]:
        """Return an empty cache of all layers for sequences of at most `length` tokens."""
        return [block.attention.empty_cache(batch_size, length) for block in self.blocks]


def _experts(config: DecoderConfig, where: dict[str, Any], rngs: nnx.Rngs) -> MoE:
    mix = SharedMix.SIGMOID if config.shared_is_gated else SharedMix.SUM
    shared = SharedExpert(config.shared_mlp_dim, mix) if config.shared_mlp_dim else None
    return MoE(
        config.embed_dim,
        config.num_experts,
        config.router,
        **where,
        experts=ExpertConfig(config.mlp_dim, config.activation, use_bias=config.expert_bias),
        shared=shared,
        losses=config.losses or Losses(),
        precision=Precision(config.compute_dtype, config.param_dtype),
        rngs=rngs,
    )
