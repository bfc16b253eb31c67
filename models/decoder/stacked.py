"""Decoder for large-scale training, with stacked layers and fully sharded parameters."""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Stats
from models.decoder.layers import KEPT, ParameterGather, period_of, scan_stacked, split
from models.decoder.model import Decoder, DecoderBlock, scaled
from models.mesh import batch_sharding

LOSS_BLOCK = 1024
"""Tokens per sequence with materialized logits; with a vocabulary of 150,000 they take 0.6 GB in float32."""


class StackedDecoder(nnx.Module):
    """`Decoder` with parameters sharded over all devices; values and gradients equal those of `Decoder`.

    Use it if the replicated parameters do not fit. Layers of equal structure form one stack for each layer of their
    period and run as one `jax.lax.scan`. Experts are sharded over the axis `expert`, and their widths over `data`.
    Every other weight shards one dimension over all devices, and optimizer state is sharded alike. The weights of a
    layer are gathered for its forward and backward pass. The loss computes logits in blocks of tokens.

    Args:
        decoder: model built with `EXPERT_RULES`; its parameters are moved into this one.
        kept: names of the residuals of a layer, besides its input (default `KEPT`). Omit "attention" if queries, keys
            and values of all layers do not fit.
    """

    def __init__(self, decoder: Decoder, *, kept: tuple[str, ...] = KEPT) -> None:
        self.config, self.mesh, self.kept = decoder.config, decoder.mesh, kept
        self.embed, self.norm, self.head = decoder.embed, decoder.norm, decoder.head
        runs = [list(run) for _, run in itertools.groupby(decoder.blocks, lambda block: block.moe is None)]
        self.stacks = nnx.List([_stacked(run) for run in runs])
        for path, variable in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            is_stacked = path[0] == "stacks"
            split(variable, path, self.mesh, int(is_stacked))

    def __call__(self, tokens: Array) -> tuple[Array, Stats]:
        """Return float32 logits `[B, T, vocab_size]` of int32 tokens `[B, T]`, and statistics `[layers, D, ...]`."""
        x, stats = self._states(tokens)
        return self._logits(x, self._head()), stats

    def loss(self, tokens: Array) -> tuple[Array, Stats]:
        """Return the mean cross-entropy of `tokens[:, 1:]` in nats, and statistics.

        Args:
            tokens: int32 `[B, T + 1]`.
        """
        x, stats = self._states(tokens[:, :-1])
        targets, head, length = tokens[:, 1:], self._head(), x.shape[1]

        @partial(jax.checkpoint, prevent_cse=False)
        def of_block(x: Array, targets: Array) -> Array:
            logits = self._logits(x, head)
            right = jnp.take_along_axis(logits, targets[:, :, None], -1)[:, :, 0]
            return (jax.nn.logsumexp(logits, -1) - right).sum()

        in_blocks, total = length - length % LOSS_BLOCK, jnp.float32(0)
        if in_blocks:
            blocks = [_in_blocks(array[:, :in_blocks], self.mesh) for array in (x, targets)]
            total = jax.lax.scan(lambda total, block: (total + of_block(*block), None), total, blocks)[0]
        if in_blocks < length:
            total += of_block(x[:, in_blocks:], targets[:, in_blocks:])
        return total / targets.size, stats

    def _states(self, tokens: Array) -> tuple[Array, Stats]:
        x, per_stack = self._embedded(tokens), []
        for stacks in self.stacks:
            gather = ParameterGather(self.mesh, x.dtype)
            x, stats = scan_stacked(stacks, x, batch_sharding(self.mesh), partial(gather, first=1), self.kept)
            per_stack += [] if stacks[0].moe is None else [stats]
        return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_stack)

    def _embedded(self, tokens: Array) -> Array:
        """Look up all tokens in the local channels of the table, then exchange for all channels of the local tokens."""
        table, everywhere = self.embed.embedding, NamedSharding(self.mesh, PartitionSpec())
        ids = jax.lax.with_sharding_constraint(tokens, everywhere)
        x = scaled(jnp.take(table[...].astype(self.config.compute_dtype), ids, axis=0), self.config.embed_scale)
        channels = PartitionSpec(None, *table.get_metadata("out_sharding"))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, channels))
        return jax.lax.with_sharding_constraint(x, batch_sharding(self.mesh))

    def _head(self) -> Array:
        gather = ParameterGather(self.mesh, self.config.compute_dtype)
        if self.head is None:
            return gather.one(("embed", "embedding"), self.embed.embedding).T
        return gather.one(("head", "kernel"), self.head.kernel)

    def _logits(self, x: Array, head: Array) -> Array:
        logits = jnp.matmul(self.norm(x).astype(x.dtype), head).astype(jnp.float32)
        return scaled(logits, self.config.logit_scale)


def _stacked(blocks: Sequence[DecoderBlock]) -> nnx.List:
    """Return a block for each layer of a period, whose arrays stack those of all periods."""
    graphs, states = zip(*map(nnx.split, blocks), strict=True)
    period = period_of(graphs)
    stacks = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[place::period]) for place in range(period)]
    return nnx.List([nnx.merge(graph, stack) for graph, stack in zip(graphs[:period], stacks, strict=True)])


def _in_blocks(array: Array, mesh: Mesh) -> Array:
    """Reshape `[B, T, ...]` to `[blocks, B, LOSS_BLOCK, ...]`; each block has tokens of all sequences."""
    blocks = array.reshape(array.shape[0], -1, LOSS_BLOCK, *array.shape[2:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(blocks, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)))
