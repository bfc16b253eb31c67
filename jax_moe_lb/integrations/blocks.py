"""Execution of one MoE block by `moe`: the block's library routes, this library plans, sends tokens and multiplies."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.stats import Stats, raise_if_concrete
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import as_int32, wide_dtype
from jax_moe_lb.layer.moe import MoEParams, moe
from jax_moe_lb.layer.systems import System
from jax_moe_lb.nn.sharding import expert_specs
from jax_moe_lb.nn.tokens import TokenLayout, token_layout
from jax_moe_lb.routing.routers import Routing, TokenInfo


@dataclass(frozen=True)
class BlockConfig:
    """Static configuration of a balanced block, the attribute `balance_config`; see `balance` for the fields."""

    mesh: Mesh
    topology: Topology
    system: System
    record_stats: bool


@dataclass(frozen=True)
class Adapter:
    """Description of the MoE block of one library."""

    # Return the subclass of a block's class, with `serve`. It has the same name, so programs looking for blocks by
    # class name still find it.
    balanced: Callable[[type], type]
    # Raise `ValueError` if a feature of the block is unsupported; called with the block and its path
    check: Callable[[Any, str], None]
    # Return the default topology of a block; called with the block, the mesh and its path
    topology: Callable[[Any, Mesh, str], Topology]
    num_experts: Callable[[Any], int]  # return the number of routed experts of the block


def refuse(path: str, argument: str, value: object, expected: str) -> None:
    """Raise the error of a block that cannot be replaced."""
    raise ValueError(f"{path}.{argument} is {value}; expected {expected}")


Axes = str | Sequence[str] | None
"""Mesh axes of a dimension, as in a `PartitionSpec`."""


def topology_of(mesh: Mesh, expert_axes: Axes, tensor_axes: Axes, path: str) -> Topology:
    """Return the topology of a block whose library names the axes."""
    expert_axes, tensor_axes = (
        (axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in (expert_axes, tensor_axes)
    )
    if missing := [axis for axis in expert_axes if axis not in mesh.axis_names]:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; expected {missing}, the expert axes of {path}. "
            "Pass topology=Topology.from_mesh(mesh, ...) for other axes."
        )
    tensor = tuple(axis for axis in tensor_axes if mesh.shape.get(axis, 1) > 1)
    return Topology.from_mesh(mesh, expert_axes, tensor_axes=tensor)


class _BlockInputs(NamedTuple):
    # Arrays, or the sharding of each.
    tokens: Any
    mask: Any
    experts_of_tokens: Any
    weights: Any
    experts: Any


def serve(
    block: Any,
    x: Float[Array, "*B H"],
    experts_of_tokens: Int[Array, "*B K"],
    weights: Float[Array, "*B K"],
    experts: Experts,
) -> Float[Array, "*B H"]:
    """Compute the weighted outputs of the routed experts of a block."""
    config: BlockConfig = block.balance_config
    topology = config.topology
    layout = token_layout(x.shape[:-1], config.mesh, topology.data_axes + topology.expert_axes)
    mask = jnp.ones(layout.shape, bool) if layout.is_padded else None
    tokens, mask, ids, factors = (
        layout.enter(array) for array in (x, mask, as_int32(experts_of_tokens), weights.astype(wide_dtype(x)))
    )
    experts = jax.tree.map(lambda leaf: leaf.astype(x.dtype), experts)
    y, stats = _sharded(_BlockInputs(tokens, mask, ids, factors, experts), config=config, layout=layout)
    raise_if_concrete(stats)
    if config.record_stats:
        block.moe_stats, block.moe_experts = nnx.Intermediate(stats), nnx.Intermediate(experts_of_tokens)
    return layout.leave(y, jax.typeof(x).sharding)


# Compiled once for all equal blocks, also if the caller does not jit.
@functools.partial(jax.jit, inline=True, static_argnames=("config", "layout"))
def _sharded(inputs: _BlockInputs, *, config: BlockConfig, layout: TokenLayout) -> tuple[Float[Array, "*C H"], Stats]:
    topology, by_token = config.topology, layout.spec
    by_group = PartitionSpec(topology.data_axes or None)
    num_experts = inputs.experts.up.shape[0]
    specs = _BlockInputs(
        tokens=by_token,
        mask=by_token,
        experts_of_tokens=by_token,
        weights=by_token,
        experts=expert_specs(inputs.experts, topology, None),
    )

    def one_rank(inputs: _BlockInputs) -> tuple[Float[Array, "*C H"], Stats]:
        tokens, mask, experts_of_tokens, weights = jax.tree.map(layout.flatten, inputs[:4])

        def given(logits: Array, *_: Any) -> Routing:
            return Routing(experts_of_tokens, weights, logits, logits)

        # The kernel gives the number of experts. XLA removes its product, as `given` returns other experts and weights.
        kernel = jnp.zeros((tokens.shape[1], num_experts), tokens.dtype)
        y, stats, _ = moe(
            tokens,
            MoEParams(kernel, inputs.experts),
            given,
            config.system,
            topology,
            tokens=TokenInfo(mask),
        )
        return layout.unflatten(y), stats.of_group

    return jax.shard_map(one_rank, mesh=config.mesh, in_specs=(specs,), out_specs=(by_token, by_group))(inputs)
