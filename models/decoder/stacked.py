"""Decoder for training, with stacked layers and parameters sharded over all devices."""

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import MoE, Stats
from models.config import LoraConfig, ParallelConfig
from models.data.marks import positions_in, predicted, segments, words
from models.decoder.attention import StreamNorm
from models.decoder.layers import KEPT, ParameterGather, add_adapters, period_of, scan_states, split
from models.decoder.model import Decoder, DecoderBlock, scaled
from models.decoder.pipeline import check_stages, through_stages
from models.mesh import all_axes, batch_sharding

# Tokens per sequence with materialized logits; with a vocabulary of 150,000 they take 2.5 GB in float32. Gradients of
# layers, which take more, do not exist yet. Each block reads the head and reduce-scatters its gradient.
LOSS_BLOCK = 4096

Places = tuple[tuple[str, int], ...]  # path of the stack with each layer, and the layer's index in it


class StackedDecoder(nnx.Module):
    """`Decoder` with parameters sharded over all devices; values and gradients equal those of `Decoder`."""

    # Layers of equal structure form one stack for each layer of their period and run as one `jax.lax.scan`. Experts are
    # sharded as by `expert_rules`. Every other weight shards one dimension over all devices, and optimizer state is
    # sharded alike. The weights of a layer are gathered for its forward and backward pass. The loss computes logits in
    # blocks of tokens.

    def __init__(
        self,
        decoder: Decoder,
        *,
        remat: str = ",".join(KEPT),
        within_documents: bool = True,
        has_padding: bool = False,
        lora: LoraConfig = LoraConfig(),
        adapted: Collection[str] | None = None,
        pipeline: ParallelConfig | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.config, self.mesh = decoder.config, decoder.mesh
        self.remat, self.within_documents, self.pipeline = remat, within_documents, pipeline
        self.has_padding = has_padding
        self.embed, self.norm, self.head = decoder.embed, decoder.norm, decoder.head
        runs = [list(run) for _, run in itertools.groupby(decoder.blocks, lambda block: block.moe is None)]
        self.stacks = nnx.List([stacked(run) for run in runs])
        # The longest run of layers with experts.
        self.piped = max(range(len(runs)), key=lambda i: len(runs[i]) * (runs[i][0].moe is not None))
        if pipeline is not None:
            check_stages(pipeline, self.mesh, len(runs[self.piped]), len(self.stacks[self.piped]))
        is_even = pipeline is not None and not pipeline.layers_before and pipeline.repeats == 1
        self.further = decoder.further
        for further in self.further:
            (further.block,) = stacked([further.block])
        self.places: Places = (
            *(
                (f"stacks.{i}.{layer % len(stacks)}", layer // len(stacks))
                for i, (run, stacks) in enumerate(zip(runs, self.stacks, strict=True))
                for layer in range(len(run))
            ),
            *((f"further.{i}.block", 0) for i in range(len(self.further))),
        )
        for path, variable in nnx.to_flat_state(nnx.state(self)):
            first = int(path[0] == "stacks" or "block" in path)
            if isinstance(variable, nnx.Param):
                split(variable, path, self.mesh, first, is_staged=is_even and path[:2] == ("stacks", self.piped))
            elif spec := variable.get_metadata().get("out_sharding"):
                variable.set_metadata(out_sharding=((None,) * first + tuple(spec)))
        self.adapter_scale = lora.alpha / lora.rank if lora.rank else 0.0
        rngs = rngs or nnx.Rngs(0)
        for i, stacks in enumerate(self.stacks if lora.rank else ()):
            for stack in stacks:
                staged = is_even and i == self.piped
                add_adapters(stack, lora.rank, self.mesh, rngs, paths=adapted, is_staged=staged)

    def __call__(self, tokens: Array) -> tuple[Array, Stats]:
        """Return float32 logits `[B, T, vocab_size]` of int32 tokens `[B, T]`, and statistics `[layers, D, ...]`."""
        x, stats = self._states(tokens, None)
        return self._logits(self.norm, x, self._head()), stats

    def loss(
        self, tokens: Array, counts: Array, further_weight: float = 0.0, experts: Array | None = None
    ) -> tuple[Array, tuple[Array, Stats]]:
        """Compute the training loss of tokens with marks."""
        # Source: DeepSeek-V3 technical report, section 2.2.2: multi-token prediction.
        plain, following = words(tokens[:, :-1]), words(tokens[:, 1:])
        documents = segments(tokens[:, :-1]) if self.within_documents else None
        x, stats = self._states(plain, documents, experts)
        head, are_counted = self._head(), predicted(tokens, len(counts) - 1)
        loss = self._cross_entropy(self.norm, x, following, are_counted[0], head) / counts[0]
        if not further_weight:
            return loss, (loss, stats)
        losses, per_stack, x = [], [stats], self.norm(x).astype(x.dtype)
        for k, further in enumerate(self.further, 1):
            # The roll wraps around, which affects only the last `k` positions, whose predictions are not counted.
            whole, later = self._whole(further), jnp.roll(following, -k, 1)
            joined = whole.joined(x, self._embedded(jnp.roll(following, 1 - k, 1)))
            x, stats = self._scanned([further.block], joined, documents)
            losses.append(self._cross_entropy(whole.norm, x, later, are_counted[k], head) / counts[k])
            per_stack.append(stats)
        stats = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_stack)
        return loss + further_weight * sum(losses) / len(losses), (loss, stats)

    def update_bias(self, stats: Stats, rate: float) -> None:
        """Update the selection biases of all layers from the load of one step; see `MoE.update_bias`."""
        self._update(stats, lambda moe, one: moe.update_bias(one, rate))

    def update_loads(self, stats: Stats) -> None:
        """Update the running loads of all layers, for their relocation; see `MoE.update_loads`."""
        self._update(stats, MoE.update_loads)

    def _update(self, stats: Stats, update: Callable[[MoE, Stats], None]) -> None:
        first = 0
        for stacks in [*self.stacks, *([further.block] for further in self.further)]:
            layers = [block.moe for block in stacks if block.moe is not None]
            for place, moe in enumerate(layers):
                graph, state = nnx.split(moe)
                part = slice(first + place, first + moe.kernel.shape[0] * len(layers), len(layers))

                def of_layer(state: nnx.State, stats: Stats, graph: nnx.GraphDef = graph) -> nnx.State:
                    moe: MoE = nnx.merge(graph, state)
                    update(moe, stats)
                    return nnx.state(moe, nnx.Not(nnx.Param))

                nnx.update(moe, jax.vmap(of_layer)(state, jax.tree.map(lambda leaf, part=part: leaf[part], stats)))
            first += sum(moe.kernel.shape[0] for moe in layers)

    def _cross_entropy(self, norm: StreamNorm, x: Array, targets: Array, are_counted: Array, head: Array) -> Array:
        """Return the sum of the cross-entropies of the counted targets."""
        length = x.shape[1]

        @partial(jax.checkpoint, prevent_cse=False)
        def of_block(x: Array, targets: Array, are_counted: Array) -> Array:
            logits = self._logits(norm, x, head)
            right = jnp.take_along_axis(logits, targets[:, :, None], -1)[:, :, 0]
            return jnp.where(are_counted, jax.nn.logsumexp(logits, -1) - right, 0).sum()

        in_blocks, total, arrays = length - length % LOSS_BLOCK, jnp.float32(0), (x, targets, are_counted)
        if in_blocks:
            blocks = [_in_blocks(array[:, :in_blocks], self.mesh) for array in arrays]
            total = jax.lax.scan(lambda total, block: (total + of_block(*block), None), total, blocks)[0]
        if in_blocks < length:
            total += of_block(*(array[:, in_blocks:] for array in arrays))
        return total

    def _states(self, tokens: Array, documents: Array | None, experts: Array | None = None) -> tuple[Array, Stats]:
        x, per_stack = self._embedded(tokens), []
        for stacks in self.stacks:
            given = None
            if experts is not None and stacks[0].moe is not None:
                given, experts = jnp.split(experts, [len(stacks) * stacks[0].moe.kernel.shape[0]])
            x, stats = self._scanned(stacks, x, documents, given)
            per_stack += [] if stacks[0].moe is None else [stats]
        return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *per_stack)

    def _scanned(
        self, stacks: Sequence[DecoderBlock], x: Array, documents: Array | None, experts: Array | None = None
    ) -> tuple[Array, Stats]:
        gather = ParameterGather(self.mesh, x.dtype, self.adapter_scale)
        if self.pipeline is not None and stacks[0].moe is not None:
            if experts is not None:
                raise ValueError("experts is an array; expected None, as the model has pipeline stages")
            num_periods, first = stacks[0].moe.kernel.shape[0], self.pipeline.layers_before // len(stacks)
            num_before = first if stacks[0] is self.stacks[self.piped][0] else num_periods
            how: dict[str, Any] = {"pipeline": self.pipeline, "num_before": num_before, "remat": self.remat}
            return through_stages(stacks, x, documents, gather=gather, **how)
        mask = documents >= 0 if documents is not None and self.has_padding else None
        shared = () if documents is None else (positions_in(documents), mask, None, documents)
        graphs, states = zip(*map(nnx.split, stacks), strict=True)
        x, stats, after, _ = scan_states(
            graphs, states, x, batch_sharding(self.mesh), partial(gather, first=1), self.remat, shared, experts=experts
        )
        for stack, state in zip(stacks, after, strict=True):
            nnx.update(stack, state)
        return x, stats

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

    def _whole(self, module: nnx.Module) -> Any:
        """Return a copy of a module with gathered parameters, except those of its block."""
        gather, (graph, state) = ParameterGather(self.mesh, self.config.compute_dtype), nnx.split(module)
        outside = [(path, variable) for path, variable in nnx.to_flat_state(state) if path[0] != "block"]
        inside = [(path, variable) for path, variable in nnx.to_flat_state(state) if path[0] == "block"]
        gathered = [(path, variable.replace(gather.one(path, variable))) for path, variable in outside]
        return nnx.merge(graph, nnx.from_flat_state([*gathered, *inside]))

    def _logits(self, norm: StreamNorm, x: Array, head: Array) -> Array:
        logits = jnp.matmul(norm(x).astype(x.dtype), head).astype(jnp.float32)
        return scaled(logits, self.config.logit_scale)


def stacked(blocks: Sequence[DecoderBlock]) -> nnx.List:
    """Return a block for each layer of a period, whose arrays stack those of all periods."""
    graphs, states = zip(*map(nnx.split, blocks), strict=True)
    period = period_of(graphs)
    stacks = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states[place::period]) for place in range(period)]
    return nnx.List([nnx.merge(graph, stack) for graph, stack in zip(graphs[:period], stacks, strict=True)])


def _in_blocks(array: Array, mesh: Mesh) -> Array:
    """Reshape `[B, T, ...]` to `[blocks, B, LOSS_BLOCK, ...]`; each block has tokens of all sequences."""
    blocks = array.reshape(array.shape[0], -1, LOSS_BLOCK, *array.shape[2:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(blocks, NamedSharding(mesh, PartitionSpec(None, all_axes(mesh))))
