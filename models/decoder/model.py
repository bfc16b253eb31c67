"""Decoder-only language model of attention and dense or mixture-of-experts blocks.

`MultiTokenPrediction` predicts one token further ahead from the hidden states of the model.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
from models.decoder.layers import Rules, one_by_one, over_data, scanned
from models.mesh import batch_sharding, topology_of


def first_layers(experts: Array | None, number: int) -> tuple[Array | None, Array | None]:
    """Split given experts `[layers, ...]` into those of the first layers and of the others."""
    return (None, None) if experts is None else (experts[:number], experts[number:])


def scaled(x: Array, factor: float) -> Array:
    """Return `x * factor` in the dtype of `x`; 1 adds no operation."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _normed(norm: StreamNorm, x: Array) -> Array:
    # Norms compute in float32; their outputs are cast to the dtype of the stream.
    return norm(x).astype(x.dtype)


def _same(norm: StreamNorm, x: Array) -> Array:
    del norm
    return x


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
        self.join = nnx.Linear(
            2 * width, width, use_bias=False, dtype=config.compute_dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.block = block
        self.norm = norm(width, config.norm_eps, config, rngs)

    def joined(self, x: Array, following: Array) -> Array:
        """Return the block input: hidden states joined with embeddings of the following tokens, `[B, T, H]`."""
        both = self.embed_norm(following).astype(x.dtype), self.stream_norm(x).astype(x.dtype)
        return self.join(jnp.concatenate(both, -1))


class FeedForward(nnx.Module):
    """Dense SwiGLU network, used in the first layers of some models."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.up = nnx.Linear(config.embed_dim, config.dense_mlp_dim, use_bias=False, **dtypes)
        self.gate = nnx.Linear(config.embed_dim, config.dense_mlp_dim, use_bias=False, **dtypes)
        self.down = nnx.Linear(config.dense_mlp_dim, config.embed_dim, use_bias=False, **dtypes)

    def __call__(self, x: Array) -> Array:
        """Apply the network to tokens `[..., H]`."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Placement(NamedTuple):
    """Arguments of the layers with experts."""

    mesh: Mesh  # devices
    topology: Topology  # ranks of the experts
    system: System  # load-balancing system
    rules: Rules | None  # sharding of the parameters; `None` for the default


class DecoderBlock(nnx.Module):
    """Decoder block: attention, then experts or a dense network, each with a residual connection."""

    def __init__(self, config: DecoderConfig, layer: int, where: Placement, rngs: nnx.Rngs) -> None:
        self.residual_scale, self.norm_after = config.residual_scale, config.norm_after
        self.attention_norm = stream_norm(config, rngs)
        self.attention: GroupedAttention | LatentAttention | GatedDeltaNet
        if config.delta is not None and layer in config.delta_layers:
            self.attention = GatedDeltaNet(config, config.delta, mesh=where.mesh, rngs=rngs)
        elif config.latent is None:
            self.attention = GroupedAttention(config, layer, mesh=where.mesh, rngs=rngs)
        else:
            self.attention = LatentAttention(config, config.latent, mesh=where.mesh, rngs=rngs)
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
        before, after = (_same, _normed) if self.norm_after else (_normed, _same)
        between = before(self.attention_norm, x)
        if isinstance(self.attention, GatedDeltaNet):
            y, new = self.attention(between, mask, cache, segments)
        else:
            y, new = self.attention(between, positions, cache, segments)
        y = after(self.attention_norm, y)
        x = checkpoint_name(x + scaled(y, self.residual_scale), "stream")
        between = before(self.moe_norm, x)
        stats: Any = None
        if self.moe is not None:
            y, *found = self.moe(between, mask, experts=experts, return_routing=return_routing)
            stats = tuple(found) if return_routing else found[0]
        elif self.dense is not None:
            y = self.dense(between)
        x = x + scaled(after(self.moe_norm, y), self.residual_scale)
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
        words: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        words |= over_data("embedding", mesh) if config.fsdp else {}
        self.embed = nnx.Embed(config.vocab_size, config.embed_dim, **words)
        where = Placement(mesh, topology or topology_of(mesh), system, rules)
        self.blocks = nnx.List([DecoderBlock(config, layer, where, rngs) for layer in range(config.num_layers)])
        self.norm = stream_norm(config, rngs)
        words = linear_options(config, mesh) | {"use_bias": config.head_bias, "rngs": rngs}
        self.head = None if config.tie_embeddings else nnx.Linear(config.embed_dim, config.vocab_size, **words)
        further = range(config.num_layers, config.num_layers + config.num_further)
        blocks = (DecoderBlock(config, layer, where, rngs) for layer in further)
        self.further = nnx.List([MultiTokenPrediction(config, block, rngs=rngs) for block in blocks])

    def __call__(
        self, tokens: Array, mask: Array | None = None, segments: Array | None = None, experts: Array | None = None
    ) -> tuple[Array, Stats]:
        """Compute the logits of whole sequences, for training."""
        x, stats = self._stream(tokens, mask, segments, experts)
        return self._logits(x), stats

    def _stream(
        self, tokens: Array, mask: Array | None, segments: Array | None, experts: Array | None
    ) -> tuple[Array, Stats]:
        x, per_run = scaled(self.embed(tokens), self.config.embed_scale), []
        for is_dense, run in itertools.groupby(self.blocks, lambda block: block.moe is None):
            blocks = list(run)
            given, experts = (None, experts) if is_dense else first_layers(experts, len(blocks))
            x, stats = self._run(blocks, x, mask, segments, given)
            per_run += [] if is_dense else [stats]
        return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_run)

    def _run(
        self,
        blocks: Sequence[DecoderBlock],
        x: Array,
        mask: Array | None,
        segments: Array | None,
        experts: Array | None,
    ) -> tuple[Array, Any]:
        how: dict[str, Any] = {} if self.config.remat is None else {"remat": self.config.remat}
        how["shared"] = (None if segments is None else positions_in(segments), mask, None, segments)
        if self.config.scan_layers:
            return scanned(blocks, x, batch_sharding(self.mesh), experts=experts, **how)
        return one_by_one(blocks, x, experts=experts, **how)

    def _logits(self, x: Array) -> Array:
        x = self.norm(x).astype(x.dtype)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return scaled(logits.astype(jnp.float32), self.config.logit_scale)

    def update_bias(self, stats: Stats, rate: float) -> None:
        """Update the selection biases of all layers from the load of one step; see `MoE.update_bias`."""
        for moe, one in self._with_stats(stats):
            moe.update_bias(one, rate)

    def update_loads(self, stats: Stats) -> None:
        """Update the running loads of all layers, for their relocation; see `MoE.update_loads`."""
        for moe, one in self._with_stats(stats):
            moe.update_loads(one)

    def _with_stats(self, stats: Stats) -> Iterator[tuple[MoE, Stats]]:
        for i, moe in enumerate(block.moe for block in self.blocks if block.moe is not None):
            yield moe, jax.tree.map(lambda leaf, i=i: leaf[i], stats)

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


def _experts(config: DecoderConfig, where: Placement, rngs: nnx.Rngs) -> MoE:
    mix = SharedMix.SIGMOID if config.shared_is_gated else SharedMix.SUM
    shared = SharedExpert(config.shared_mlp_dim, mix) if config.shared_mlp_dim else None
    return MoE(
        config.embed_dim,
        config.num_experts,
        config.router,
        **where._asdict(),
        experts=ExpertConfig(config.mlp_dim, config.activation, use_bias=config.expert_bias),
        shared=shared,
        losses=config.losses or Losses(),
        precision=Precision(config.compute_dtype, config.param_dtype),
        rngs=rngs,
    )
