"""`StackedDecoder` is a decoder for training at scale: layers in stacks, and all weights split over all devices."""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Stats
from models.decoder.layers import KEPT, ParameterGather, scan_stacked, split
from models.decoder.model import Decoder, DecoderBlock
from models.mesh import batch_sharding

LOSS_BLOCK = 1024
"""So many tokens of a sequence have their logits at the same time: of 150,000 words they are 0.6 GB in float32."""


class StackedDecoder(nnx.Module):
    """This is a `Decoder` of which every device holds an equal part. Values and gradients are those of the decoder.

    Use it to train what does not fit otherwise. Layers of a kind are one stack, and run as one loop. Experts are split
    over the axis `expert` and their widths over `data`, of any other weight one dimension over all devices; optimizer
    state is split alike. A layer's weights are whole while it is computed, forward and backward. Logits of few tokens
    exist at a time.

    Args:
        decoder: the model, made with `EXPERT_RULES`. Its parameters go into this one.
        kept: what is kept of a layer for the backward pass beside its input, by names; `KEPT` is usual. Without
            "attention" that is computed again, where queries, keys and values of all layers do not fit.
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
        """Compute float32 logits `[B, T, words]` of int32 tokens `[B, T]`, and statistics `[layers, D, ...]`."""
        x, stats = self._states(tokens)
        return self._logits(x, self._head()), stats

    def loss(self, tokens: Array) -> tuple[Array, Stats]:
        """Compute the mean cross-entropy in nats of `tokens[:, 1:]` given those before, and statistics.

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
        for stack in self.stacks:
            gather = ParameterGather(self.mesh, x.dtype)
            x, stats = scan_stacked(stack, x, batch_sharding(self.mesh), partial(gather, first=1), self.kept)
            per_stack += [] if stack.moe is None else [stats]
        return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_stack)

    def _embedded(self, tokens: Array) -> Array:
        """Look tokens up in the channels that a device has, and exchanges these for all channels of its tokens."""
        table, everywhere = self.embed.embedding, NamedSharding(self.mesh, PartitionSpec())
        ids = jax.lax.with_sharding_constraint(tokens, everywhere)
        x = jnp.take(table[...].astype(self.config.compute_dtype), ids, axis=0)
        channels = PartitionSpec(None, *table.get_metadata("out_sharding"))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, channels))
        return jax.lax.with_sharding_constraint(x, batch_sharding(self.mesh))

    def _head(self) -> Array:
        gather = ParameterGather(self.mesh, self.config.compute_dtype)
        if self.head is None:
            return gather.one(("embed", "embedding"), self.embed.embedding).T
        return gather.one(("head", "kernel"), self.head.kernel)

    def _logits(self, x: Array, head: Array) -> Array:
        return jnp.matmul(self.norm(x).astype(x.dtype), head).astype(jnp.float32)


def _stacked(blocks: Sequence[DecoderBlock]) -> DecoderBlock:
    """Make a block whose arrays are those of all blocks, stacked."""
    graphs, states = zip(*map(nnx.split, blocks), strict=True)
    return nnx.merge(graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def _in_blocks(array: Array, mesh: Mesh) -> Array:
    """Cut `[B, T, ...]` into `[blocks, B, LOSS_BLOCK, ...]`, each block with tokens of all sequences."""
    blocks = array.reshape(array.shape[0], -1, LOSS_BLOCK, *array.shape[2:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(blocks, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)))
