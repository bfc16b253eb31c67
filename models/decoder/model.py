"""A decoder-only language model of attention and dense or mixture-of-experts blocks.

`MultiTokenPrediction` predicts one token further ahead from the hidden states of the model.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jax_moe_lb import ExpertConfig, MoE, Precision, SharedExpert, Stats, System, Topology
from models.decoder.attention import Cache, GroupedAttention, LatentAttention, norm
from models.decoder.config import DecoderConfig
from models.decoder.layers import Rules, scanned
from models.mesh import batch_sharding


class MultiTokenPrediction(nnx.Module):
    """It is a module of multi-token prediction (DeepSeek-V3's technical report, section 2.2), with a block of its own.

    It shares the embedding and the output layer with the model. It serves training: the model learns to look further
    ahead, and without it computes the same as before.

    deviates: the stream of the model comes to the first module behind the model's last norm, and the embedding stands
    before it, as those expect that generate with the published weights; the paper has neither.

    Args:
        config: the sizes of the model.
        block: a `DecoderBlock` like those of the model.
        rngs: random numbers for the parameters.
    """

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
        """Join the stream `[B, T, H]` of tokens and the embeddings `[B, T, H]` of those that follow, for the block."""
        both = self.embed_norm(following).astype(x.dtype), self.stream_norm(x).astype(x.dtype)
        return self.join(jnp.concatenate(both, -1))


class FeedForward(nnx.Module):
    """This is a dense SwiGLU network, as the first layers of some models have it.

    Args:
        config: the sizes of the model.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        dtypes: dict[str, Any] = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.up = nnx.Linear(config.embed_dim, config.dense_mlp_dim, use_bias=False, **dtypes)
        self.gate = nnx.Linear(config.embed_dim, config.dense_mlp_dim, use_bias=False, **dtypes)
        self.down = nnx.Linear(config.dense_mlp_dim, config.embed_dim, use_bias=False, **dtypes)

    def __call__(self, x: Array) -> Array:
        """Compute each token `[..., H]` alone."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nnx.Module):
    """A block has attention, then experts or a dense network, each on the residual stream.

    Args:
        config: the sizes of the model.
        layer: the number of the block.
        mesh: the mesh of the expert and data axes.
        topology: what `Topology.from_mesh(mesh)` reads.
        system: the strategies that balance the load.
        rules: how experts are split over the mesh, see `nn.MoE`; `None`: over the expert axes alone.
        rngs: random numbers for the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        mesh: Mesh,
        topology: Topology,
        system: System,
        rules: Rules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.attention_norm = norm(config.embed_dim, config.norm_eps, config, rngs)
        self.attention: GroupedAttention | LatentAttention
        if config.latent is None:
            self.attention = GroupedAttention(config, layer, mesh=mesh, rngs=rngs)
        else:
            self.attention = LatentAttention(config, config.latent, rngs=rngs)
        self.moe_norm = norm(config.embed_dim, config.norm_eps, config, rngs)
        self.dense = FeedForward(config, rngs=rngs) if layer in config.dense_layers else None
        where: dict[str, Any] = {"mesh": mesh, "topology": topology, "system": system, "rules": rules}
        self.moe = None if self.dense else _experts(config, **where, rngs=rngs)

    def __call__(
        self, x: Array, positions: Array | None = None, mask: Array | None = None, cache: Cache | None = None
    ) -> Any:
        """Compute the residual stream `[B, T, H]` behind the block.

        Args:
            x: the stream before it.
            positions: int32 `[B, T]`; `None`: each sequence begins here.
            mask: `[B, T]`, false for tokens that no expert serves; `None`: all are served.
            cache: the tokens before; `None`: there are none.

        Returns:
            The stream and the statistics of the experts, `None` where there are none; and the cache, if there is one.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
        # Norms compute in float32, and what follows them in the dtype of the stream.
        y, new = self.attention(self.attention_norm(x).astype(x.dtype), positions, cache)
        x = x + y
        between = self.moe_norm(x).astype(x.dtype)
        stats: Stats | None = None
        if self.moe is not None:
            y, stats = self.moe(between, mask)
        elif self.dense is not None:
            y = self.dense(between)
        return (x + y, stats) if cache is None else (x + y, stats, new)


class Decoder(nnx.Module):
    """This model maps tokens to logits of the next one.

    Args:
        config: the sizes of the model.
        mesh: the mesh of the expert and data axes, as `models.mesh.make_mesh` makes it.
        system: the strategies that balance the load.
        ranks_per_domain: `M`, the ranks among which expert weights may move, see `Topology`; `None`: all of a group.
        rules: how experts are split over the mesh, see `nn.MoE`; `None`, the default: over the expert axes alone.
        rngs: random numbers for the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        mesh: Mesh,
        system: System,
        ranks_per_domain: int | None = None,
        rules: Rules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.mesh = config, mesh
        topology = Topology.from_mesh(mesh, ranks_per_domain=ranks_per_domain)
        dtypes: dict[str, Any] = {"param_dtype": config.param_dtype, "rngs": rngs}
        self.embed = nnx.Embed(config.vocab_size, config.embed_dim, dtype=config.compute_dtype, **dtypes)
        options: dict[str, Any] = {"mesh": mesh, "topology": topology, "system": system, "rules": rules, "rngs": rngs}
        self.blocks = nnx.List([DecoderBlock(config, layer, **options) for layer in range(config.num_layers)])
        self.norm = norm(config.embed_dim, config.norm_eps, config, rngs)
        words: dict[str, Any] = {"use_bias": False, "dtype": config.compute_dtype, **dtypes}
        self.head = None if config.tie_embeddings else nnx.Linear(config.embed_dim, config.vocab_size, **words)
        further = range(config.num_layers, config.num_layers + config.num_further)
        blocks = (DecoderBlock(config, layer, **options) for layer in further)
        self.further = nnx.List([MultiTokenPrediction(config, block, rngs=rngs) for block in blocks])

    def __call__(self, tokens: Array, mask: Array | None = None) -> tuple[Array, Stats]:
        """Compute logits of whole sequences, for training.

        Args:
            tokens: int32 `[B, T]`.
            mask: `[B, T]`, false for padding, which no expert serves; `None` if there is none.

        Returns:
            Float32 logits `[B, T, words]`, and statistics of the layers with experts, `[layers, D, ...]`.
        """
        x, stats = self._stream(tokens, mask)
        return self._logits(x), stats

    def ahead(self, tokens: Array, following: Array) -> tuple[list[Array], Stats]:
        """Compute logits of the next token, and of those after it that `further` predicts, for training.

        Args:
            tokens: int32 `[B, T]`.
            following: int32 `[B, T]`, the token after each.

        Returns:
            Float32 logits `[B, T, words]`: first those of `following`, then those of the tokens `k` places behind them,
            which are none at the last `k` places. And statistics as `__call__` returns them, those of `further` last.
        """
        x, stats = self._stream(tokens, None)
        logits, per_run = [self._logits(x)], [stats]
        x = self.norm(x).astype(x.dtype)
        for k, further in enumerate(self.further):
            # Sequences end: what comes round is seen by those last places alone.
            x, stats = self._run([further.block], further.joined(x, self.embed(jnp.roll(following, -k, 1))), None)
            logits.append(self._words(further.norm(x).astype(x.dtype)))
            per_run.append(stats)
        return logits, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_run)

    def _stream(self, tokens: Array, mask: Array | None) -> tuple[Array, Stats]:
        x, per_run = self.embed(tokens), []
        for is_dense, run in itertools.groupby(self.blocks, lambda block: block.moe is None):
            x, stats = self._run(list(run), x, mask)
            per_run += [] if is_dense else [stats]
        return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_run)

    def _run(self, blocks: Sequence[DecoderBlock], x: Array, mask: Array | None) -> tuple[Array, Any]:
        if self.config.scan_layers and mask is None:
            return scanned(blocks, x, batch_sharding(self.mesh))
        per_layer = []
        for block in blocks:
            x, stats = block(x, None, mask)
            per_layer.append(stats)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer)

    def _logits(self, x: Array) -> Array:
        return self._words(self.norm(x).astype(x.dtype))

    def _words(self, x: Array) -> Array:
        return (self.embed.attend(x) if self.head is None else self.head(x)).astype(jnp.float32)

    def extend(
        self, tokens: Array, positions: Array, mask: Array, cache: Sequence[Cache]
    ) -> tuple[Array, Stats, list[Cache]]:
        """Compute logits of tokens that follow others, which a cache holds.

        Args:
            tokens: int32 `[B, T]`: the prompts, or the token of each sequence that was chosen last.
            positions: int32 `[B, T]`, where they are in their sequences; each is below the length of the cache.
            mask: `[B, T]`, false for padding, which no expert serves.
            cache: what `empty_cache` or the last call returned.

        Returns:
            Logits `[B, T, words]`, statistics `[layers, D, ...]`, and the cache with these tokens.
        """
        x, per_layer, after = self.embed(tokens), [], []
        for block, before in zip(self.blocks, cache, strict=True):
            x, stats, new = block(x, positions, mask, before)
            per_layer += [] if stats is None else [stats]
            after.append(new)
        return self._logits(x), jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer), after

    def empty_cache(self, batch_size: int, length: int) -> list[Cache]:
        """Make the cache of all layers for sequences of at most `length` tokens."""
        return [block.attention.empty_cache(batch_size, length) for block in self.blocks]


def _experts(
    config: DecoderConfig, *, mesh: Mesh, topology: Topology, system: System, rules: Rules | None, rngs: nnx.Rngs
) -> MoE:
    shared = SharedExpert(config.shared_mlp_dim) if config.shared_mlp_dim else None
    return MoE(
        config.embed_dim,
        config.num_experts,
        config.router,
        mesh=mesh,
        topology=topology,
        system=system,
        experts=ExpertConfig(config.mlp_dim, config.activation, use_bias=config.expert_bias),
        shared=shared,
        precision=Precision(config.compute_dtype, config.param_dtype),
        rules=rules,
        # Whoever trains or generates reads the statistics of each step anyway.
        on_fault="record",
        rngs=rngs,
    )
