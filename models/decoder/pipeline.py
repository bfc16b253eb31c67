"""Pipeline of stacked layers over the mesh axis `stage`, with the circular schedule of MaxText.

The layers form `repeats * stages` blocks, and block `b` belongs to stage `b % stages`. A microbatch passes all stages
`repeats` times. In tick `t`, stage `s` applies its block of repeat `(t - s) // microbatches` to microbatch
`(t - s) % microbatches`, and a permute along the ring of stages sends the result on. With 2 stages, 2 repeats and
microbatches `a` and `b`, blocks 0 to 3 run as:

    tick     0   1   2   3   4
    stage 0  a0  b0  a2  b2  -
    stage 1  -   a1  b1  a3  b3

Each stage is idle in `stages - 1` ticks of `repeats * microbatches + stages - 1`. The tokens of these ticks are masked
in the expert layers, so that they move no rows and need no further rounds.

The stages are a `jax.shard_map` over the axis `stage` alone. Inside of it, the other axes are those of a model without
a pipeline, and expert layers are another `shard_map` over them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import ParallelConfig
from models.data.marks import positions_in
from models.decoder.layers import LAYER_INPUT, ParameterGather, computed_again, scan_states, sums_of, without
from models.mesh import STAGE, batch_sharding

BY_STAGE, OF_BLOCKS = PartitionSpec(STAGE), PartitionSpec(None, STAGE)


def check_stages(pipeline: ParallelConfig, mesh: Mesh, num_layers: int, period: int) -> None:
    """Check that a mesh has the stages, and that they divide a run of layers."""
    if mesh.shape.get(STAGE) != pipeline.stages:
        raise ValueError(f"mesh has the axes {dict(mesh.shape)}; expected {STAGE!r} of size {pipeline.stages}")
    if pipeline.layers_before % period:
        raise ValueError(f"layers_before is {pipeline.layers_before}; expected a multiple of {period}, their period")
    left, blocks = num_layers - pipeline.layers_before, pipeline.stages * pipeline.repeats * period
    if left < 1 or left % blocks:
        times = f"stages {pipeline.stages} x repeats {pipeline.repeats}" + f" x period {period}" * (period > 1)
        raise ValueError(
            f"layers_before is {pipeline.layers_before}; expected a number that leaves a multiple of {blocks} of the "
            f"{num_layers} layers with experts, {times}"
        )


def _per_stage(pipeline: ParallelConfig) -> int:
    """Return the number of microbatches at home on a stage."""
    return pipeline.num_microbatches // pipeline.stages


class Parts(NamedTuple):
    """Arguments of the stages."""

    before: Any  # states of the layers before the pipeline, the same on all stages
    sums_before: Any  # sums of their gradients
    blocks: Any  # states `[R, S, layers, ...]` of the blocks, `[R, 1, layers, ...]` on a stage
    sums: Any  # sums of their gradients
    x: Any  # microbatches `[S, M / S, B, T, H]`, `[1, M / S, B, T, H]` on a stage
    documents: Any  # int32 `[M, B, T]`, the same on all stages; `None` for one per sequence
    stage: Any  # index of the stage, `[S]` and `[1]`


def through_stages(
    stacks: Sequence[nnx.Module],
    x: Array,
    documents: Array | None,
    *,
    pipeline: ParallelConfig,
    num_before: int,
    gather: ParameterGather,
    remat: str,
) -> tuple[Array, Any]:
    """Apply stacks of expert layers to `x` over the stages of a mesh."""
    mesh: Any = gather.mesh
    graphs, states = zip(*map(nnx.split, stacks), strict=True)
    is_piped = _num_periods(states) > num_before
    if documents is not None:
        documents = _to_stages(documents, pipeline, mesh).reshape(pipeline.num_microbatches, -1, documents.shape[1])
    # Sums of gradients over all microbatches.
    sums = [_sums(state) for state in states]
    states = [jax.tree.map(jax.lax.stop_gradient, state) for state in states]
    first = partial(jax.tree.map, lambda leaf: leaf[:num_before])
    blocks = partial(_in_blocks, first=num_before, pipeline=pipeline, mesh=mesh)
    parts = Parts(
        before=[first(state) for state in states] if num_before else None,
        sums_before=[first(one) for one in sums] if num_before else None,
        blocks=[blocks(state) for state in states] if is_piped else None,
        sums=[blocks(one) for one in sums] if is_piped else None,
        x=_to_stages(x, pipeline, mesh),
        documents=documents,
        stage=jnp.arange(pipeline.stages, dtype=jnp.int32),
    )
    stage = _Stage(pipeline, graphs, gather, remat)
    run = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(Parts(PartitionSpec(), PartitionSpec(), OF_BLOCKS, OF_BLOCKS, BY_STAGE, PartitionSpec(), BY_STAGE),),
        out_specs=(BY_STAGE, BY_STAGE, OF_BLOCKS),
        axis_names={STAGE},
        # With it, JAX 0.12 cannot lower the gradients of nested shard_maps.
        check_vma=False,
    )
    x_out, earlier, rest = run(parts)
    found = [jax.tree.map(lambda leaf: _as_layers(leaf.swapaxes(0, 1)), earlier)] if num_before else []
    found += [jax.tree.map(lambda leaf: _as_layers(_in_order(leaf)), rest)] if is_piped else []
    return _from_stages(x_out, x.shape, pipeline, mesh), jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)


@dataclass(frozen=True)
class _Stage:
    """Program of one stage, with the mesh axes besides `stage` left to the compiler."""

    pipeline: ParallelConfig
    graphs: Sequence[nnx.GraphDef]
    gather: ParameterGather
    remat: str

    def __call__(self, parts: Parts) -> tuple[Array, Any, Any]:
        x, stage, first, rest = parts.x[0], parts.stage[0], None, None
        if parts.before is not None:
            x, first = self._before(parts.before, parts.sums_before, x, parts.documents, stage)
        if parts.blocks is not None:
            blocks = jax.tree.map(lambda leaf: leaf[:, 0], parts.blocks)
            sums = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), parts.sums)
            x, rest = self._ticks(blocks, sums, x, parts.documents, stage)
        return x[None], first, rest

    def _before(self, states: Any, sums: Any, x: Array, documents: Array | None, stage: Array) -> tuple[Array, Any]:
        """Apply layers to the microbatches at home; return their statistics `[M / S, layers, D, ...]`."""
        per_stage = _per_stage(self.pipeline)

        def one(sums: Any, at: Array) -> tuple[Any, tuple[Array, Any]]:
            mine = None if documents is None else documents[stage * per_stage + at]
            y, stats, sums = self._layers(states, sums, 0, x[at], mine, None)
            return sums, (y, stats)

        return jax.lax.scan(one, sums, jnp.arange(per_stage))[1]

    def _ticks(self, blocks: Any, sums: Any, x: Array, documents: Array | None, stage: Array) -> tuple[Array, Any]:
        """Run the pipeline; return the outputs at home and statistics `[R, 1, M, layers, D, ...]` of this stage."""
        pipeline = self.pipeline
        num_stages, total = pipeline.stages, pipeline.num_microbatches * pipeline.repeats
        delay = pipeline.num_microbatches - num_stages if pipeline.repeats > 1 else 0
        onwards = [(i, (i + 1) % num_stages) for i in range(num_stages)]
        back = [(i, i - 1) for i in range(1, num_stages)]
        block = self._rematerialized(partial(self._block, documents))

        def tick(carry: tuple[Array, Array, Array, Any], now: Array) -> tuple[tuple[Array, Array, Array, Any], Any]:
            home, waiting, arrived, sums = carry
            slot, item = now % _per_stage(pipeline), jnp.clip(now - stage, 0, total - 1)
            # Stage 0 reads new microbatches from its home slots, which the other stages pass on to it.
            first, returned = home[slot], arrived
            if delay:
                returned, waiting = waiting[now % delay], waiting.at[now % delay].set(arrived)
            if pipeline.repeats > 1:
                first = jnp.where(now < pipeline.num_microbatches, first, returned)
            x = jnp.where(stage == 0, first, arrived)
            y, stats, sums = block(blocks, sums, x, item, item == now - stage)
            passed = jnp.where(stage == num_stages - 1, y, jax.lax.ppermute(home[slot], STAGE, back))
            return (home.at[slot].set(passed), waiting, jax.lax.ppermute(y, STAGE, onwards), sums), stats

        start = (x, jnp.zeros((delay, *x.shape[1:]), x.dtype), jnp.zeros_like(x[0]), sums)
        (home, _, _, _), stats = jax.lax.scan(tick, start, jnp.arange(total + num_stages - 1))
        # The last outputs entered their slots `stages - 1` ticks after the last inputs left them.
        home = jnp.roll(home, 1 - num_stages, 0)

        def own(leaf: Array) -> Array:
            mine = jax.lax.dynamic_slice_in_dim(leaf, stage, total)
            return mine.reshape(pipeline.repeats, 1, pipeline.num_microbatches, *leaf.shape[1:])

        return home, jax.tree.map(own, stats)

    def _block(
        self, documents: Array | None, blocks: Any, sums: Any, x: Array, item: Array, is_active: Array
    ) -> tuple[Array, Any, Any]:
        """Apply the block of one item, a microbatch in a repeat; mask all tokens unless it is active."""
        repeat, microbatch = item // self.pipeline.num_microbatches, item % self.pipeline.num_microbatches
        states = jax.tree.map(lambda leaf: leaf[0] if leaf.shape[0] == 1 else leaf[repeat], blocks)
        mine, first = None if documents is None else documents[microbatch], repeat * _num_periods(states)
        return self._layers(states, sums, first, x, mine, jnp.broadcast_to(is_active, x.shape[:2]))

    def _rematerialized(self, block: Callable) -> Callable:
        # A block of one repeat is no loop invariant, so without this its weights would be stored in every tick.
        names = LAYER_INPUT if self.remat == "full" else f"{self.remat},{LAYER_INPUT}"
        return block if self.remat == "none" else computed_again(block, names, prevent_cse=False)

    def _layers(
        self, states: Any, sums: Any, first: Array | int, x: Array, documents: Array | None, mask: Array | None
    ) -> tuple[Array, Any, Any]:
        mesh = jax.sharding.get_abstract_mesh()
        gather = partial(replace(self.gather, mesh=mesh), first=1)
        if documents is not None:
            # Padding is not routed.
            mask = documents >= 0 if mask is None else mask & (documents >= 0)
        shared = (None if documents is None else positions_in(documents), mask, None, documents)
        sharding = NamedSharding(mesh, PartitionSpec(_others(mesh)))
        x, stats, _, sums = scan_states(
            self.graphs, states, x, sharding, gather, self.remat, shared, sums=sums, first=first
        )
        return x, stats, sums


def _others(mesh: Any) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.axis_names if axis != STAGE)


def _num_periods(states: Any) -> int:
    return int(jax.tree.leaves(states)[0].shape[0])


def _sums(state: nnx.State) -> nnx.State:
    """Return the sums of the gradients of a stack's parameters, with the metadata of their sharding."""
    params = [(path, one) for path, one in nnx.to_flat_state(state) if isinstance(one, nnx.Param)]
    return nnx.from_flat_state([(path, one.replace(sums_of(one.get_value()))) for path, one in params])


def _in_blocks(state: nnx.State, first: int, pipeline: ParallelConfig, mesh: Mesh) -> nnx.State:
    """Reshape the leaves of a stack, from period `first` on, to `[R, S, periods of a block, ...]`."""

    def one(variable: nnx.Variable) -> nnx.Variable:
        spec = tuple(variable.get_metadata("out_sharding") or ()) if variable.has_metadata("gathered") else ()
        inner = [without(entry, {STAGE}) for entry in spec[1:]]
        sharding = NamedSharding(mesh, PartitionSpec(None, STAGE, None, *inner))
        leaf = variable.get_value()[first:]
        leaf = leaf.reshape(pipeline.repeats, pipeline.stages, -1, *leaf.shape[1:])
        return variable.replace(jax.lax.with_sharding_constraint(leaf, sharding))

    return nnx.from_flat_state([(path, one(variable)) for path, variable in nnx.to_flat_state(state)])


def _to_stages(array: Array, pipeline: ParallelConfig, mesh: Mesh) -> Array:
    """Reshape `[B, T, ...]`, split over all devices, to microbatches `[S, M / S, B / M, T, ...]`."""
    shape = _shape(array.shape[0], pipeline, mesh)
    array = array.reshape(*shape, *array.shape[1:]).transpose(1, 2, 0, 3, *range(4, 3 + array.ndim))
    array = array.reshape(pipeline.stages, _per_stage(pipeline), -1, *array.shape[4:])
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(STAGE, None, _others(mesh))))


def _from_stages(array: Array, shape: tuple[int, ...], pipeline: ParallelConfig, mesh: Mesh) -> Array:
    """Invert `_to_stages`; `shape` is the result's."""
    groups, stages, per_stage, size = _shape(shape[0], pipeline, mesh)
    array = array.reshape(stages, per_stage, groups, size, *shape[1:])
    array = array.transpose(2, 0, 1, 3, *range(4, array.ndim)).reshape(shape)
    return jax.lax.with_sharding_constraint(array, batch_sharding(mesh))


def _shape(batch: int, pipeline: ParallelConfig, mesh: Mesh) -> tuple[int, int, int, int]:
    groups = mesh.size // pipeline.stages
    if batch % (groups * pipeline.num_microbatches):
        raise ValueError(
            f"batch is {batch}; expected a multiple of microbatches {pipeline.num_microbatches} x {groups}, the "
            "devices of a stage"
        )
    return groups, pipeline.stages, _per_stage(pipeline), batch // (groups * pipeline.num_microbatches)


def _in_order(leaf: Array) -> Array:
    """Reshape `[R, S, M, layers, ...]` to `[R * S * layers, M, ...]`, layers in their order."""
    leaf = leaf.swapaxes(2, 3)
    return leaf.reshape(-1, *leaf.shape[3:])


def _as_layers(leaf: Array) -> Array:
    """Merge microbatches and groups of `[layers, M, D, ...]`."""
    return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])
