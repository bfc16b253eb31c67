"""Parameters and calls of the Flax layer over the arrays of all ranks.

It creates parameters with their sharding, runs `moe` and the gather of expert domains in `jax.shard_map`, and adds the
output of the shared expert.
"""

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jax_moe_lb.core.stats import Checks, Stats
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import DType, State
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.kernels.grouped_ffn import dense_ffn
from jax_moe_lb.layer.moe import moe
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.routers import Router
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.fsdp import FsdpExperts

LogicalAxes = tuple[str | None, ...]

LogicalAxisRules = tuple[tuple[str, tuple[str, ...] | str | None], ...]


@dataclass(frozen=True)
class Parameters:
    """Makes the parameters of a layer.

    Args:
        mesh: where they live.
        rules: the table from logical to mesh axes.
        dtype: theirs.
        kernel_init: the initializer of all kernels.
        rngs: random numbers for them.
    """

    mesh: Mesh
    rules: LogicalAxisRules
    dtype: DType
    kernel_init: nnx.Initializer
    rngs: nnx.Rngs

    def kernel(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Makes one kernel, of two dimensions, or a stack of them.

        Args:
            shape: its shape.
            axes: the logical axis of each dimension, `None` for one that is not split.
        """
        # Initializers take the leading axis of a stack of kernels for a batch: give single ones such an axis.
        batched = (1, *shape) if len(shape) == 2 else shape
        value = self.kernel_init(self.rngs.params(), batched, self.dtype)
        return nnx.Param(value.reshape(shape), out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)

    def bias(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Makes a bias, or a stack of them, which are 0.

        Args:
            shape: its shape.
            axes: the logical axis of each dimension.
        """
        value = jnp.zeros(shape, self.dtype)
        return nnx.Param(value, out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)


HiddenStates = Float[Array, "*B H"]


class SharedMix(Enum):
    """Says how the outputs of the shared expert and of a token's other experts become one.

    Examples:
        >>> from jax_moe_lb.nn import SharedMix
        >>> [mix.num_logits for mix in SharedMix]
        [0, 1, 2]
    """

    SUM = 0
    """Adds both: DeepSeek-V3, GLM-4.5, Llama 4. It is usual."""
    SIGMOID = 1
    """Weighs the shared one by a sigmoid of a learned product with the token: Qwen2-MoE and Qwen3-Next."""
    SOFTMAX = 2
    """Weighs both by a softmax of two learned products: the dense residual branch of DeepSpeed-MoE (arXiv 2201.05596,
    section 4.1.1)."""

    @property
    def num_logits(self) -> int:
        """Counts the learned products of a token: the columns of the kernel."""
        return self.value

    def __call__(
        self, x: HiddenStates, routed: HiddenStates, shared: Experts, kernel: Float[Array, "H _"] | None
    ) -> HiddenStates:
        """Returns the output of the layer.

        Args:
            x: `[..., H]`, the tokens.
            routed: `[..., H]`, the outputs of their other experts.
            shared: the shared expert, in the dtype of `x`.
            kernel: `[H, num_logits]`; `None` for `SUM`.
        """
        y = dense_ffn(x, shared)
        if kernel is None:
            return routed + y
        # In float32 like the router's logits, and rounded once.
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
        if self is SharedMix.SIGMOID:
            return routed + jax.nn.sigmoid(logits).astype(x.dtype) * y
        weights = jax.nn.softmax(logits, -1).astype(x.dtype)
        return weights[..., :1] * routed + weights[..., 1:] * y


def expert_axes(topology: Topology, migrate: GatherExpertDomain | None) -> tuple[str, ...]:
    """Tells over which mesh axes home experts are sharded."""
    return topology.expert_axes if migrate is None else migrate.domains.expert_axes


@dataclass(frozen=True)
class LayerConfig:
    """Holds what is static in a layer; see `nn.MoE` and `moe` for what each says."""

    router: Router
    system: System
    migrate: GatherExpertDomain | None
    topology: Topology
    mesh: Mesh
    shards: FsdpExperts
    losses: Losses
    sequence_length: int | None
    capacity_factor: float | None
    checks: Checks
    fused: bool


class LayerInputs(NamedTuple):
    """Holds the arrays of one call, of all ranks, each `None` where there is no such.

    Args:
        tokens: `[C, H]`, the tokens of all ranks.
        mask: `[C]` booleans.
        token_ids: `[C]` int32.
        key: random numbers, equal on all ranks.
        kernel: `[H, E]`, the router's.
        kernel_bias: `[E]`.
        experts: all home experts.
        bias: `[E]`, of the choice.
        homes: `[E]` int32.
        state: the balancer's, stacked over groups.
        known: what expert domains know of their experts.
    """

    tokens: Any
    mask: Any
    token_ids: Any
    key: Any
    kernel: Any
    kernel_bias: Any
    experts: Any
    bias: Any
    homes: Any
    state: Any
    known: Any


# Compiled once for all layers of a kind, also where the caller does not jit.
@functools.partial(jax.jit, inline=True, static_argnames=("layer",))
def sharded_moe(inputs: LayerInputs, *, layer: LayerConfig) -> tuple[Float[Array, "C H"], Stats, State, Experts | None]:
    """Runs `moe` over the tokens of all ranks; statistics and state have one entry per group."""
    topology, migrate, mesh = layer.topology, layer.migrate, layer.mesh
    home_axes = expert_axes(topology, migrate)
    whole, by_expert = PartitionSpec(), PartitionSpec(home_axes)
    # Data axes stand outermost: tokens of one group lie side by side.
    by_token = PartitionSpec(topology.data_axes + topology.expert_axes)
    by_group = PartitionSpec(topology.data_axes) if topology.data_axes else PartitionSpec(None)
    specs = LayerInputs(
        tokens=by_token,
        mask=by_token,
        token_ids=by_token,
        key=whole,
        kernel=whole,
        kernel_bias=whole,
        experts=layer.shards.specs(inputs.experts, home_axes, topology.tensor_axes),
        bias=whole,
        homes=whole,
        state=by_group,
        known=by_expert,
    )
    # Some axes may be manual already, such as the stages of a pipeline. Over those that are neither the group's nor the
    # data's all devices do the same: no compiler divides custom calls.
    around = jax.sharding.get_abstract_mesh().manual_axes
    if taken := sorted(set(around) & set(home_axes + topology.data_axes + topology.tensor_axes)):
        raise ValueError(f"topology has the axes {taken}, which are manual already; expected others: see `data_axes`")
    return jax.shard_map(
        functools.partial(_one_rank, layer=layer),
        mesh=None if around else mesh,
        in_specs=(specs,),
        out_specs=(by_token, by_group, by_group, by_expert),
        axis_names=set(mesh.axis_names) - set(around),
    )(LayerInputs(*(_place_by(array, spec, mesh) for array, spec in zip(inputs, specs, strict=True))))


def _one_rank(inputs: LayerInputs, layer: LayerConfig) -> tuple[Array, Stats, State, Experts | None]:
    # A balancer knows nothing of other groups: inside, its state has no dimension for them.
    state = jax.tree.map(lambda leaf: leaf[0], inputs.state)
    experts, known = layer.shards(inputs.experts), inputs.known
    if layer.migrate is not None and known is not None:
        experts, known = layer.migrate.update(experts, known)
    elif layer.migrate is not None:
        experts = layer.migrate(experts)
    y, stats, state = moe(
        inputs.tokens,
        inputs.kernel,
        experts.fused() if layer.fused else experts,
        layer.router,
        layer.system,
        layer.topology,
        state=state,
        kernel_bias=inputs.kernel_bias,
        bias=inputs.bias,
        homes=inputs.homes,
        mask=inputs.mask,
        losses=layer.losses,
        sequence_length=layer.sequence_length,
        capacity_factor=layer.capacity_factor,
        token_ids=inputs.token_ids,
        key=inputs.key,
        checks=layer.checks,
    )
    return y, *jax.tree.map(lambda leaf: leaf[None], (stats, state)), known


@functools.partial(jax.jit, inline=True, static_argnames=("migrate", "mesh"))
def sharded_known(experts: Experts, *, migrate: GatherExpertDomain, mesh: Mesh) -> Experts:
    """Runs `migrate.known` on all ranks."""
    spec = PartitionSpec(migrate.domains.expert_axes)
    placed = place(experts, NamedSharding(mesh, spec), mesh)
    return jax.shard_map(migrate.known, mesh=mesh, in_specs=spec, out_specs=spec)(placed)


def _place_by(tree: Any, specs: Any, mesh: Mesh) -> Any:
    if isinstance(specs, PartitionSpec):
        return place(tree, NamedSharding(mesh, specs), mesh)
    return jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(mesh, spec), mesh), tree, specs)


def reshaped(array: Array, shape: tuple[int, ...], sharding: NamedSharding, mesh: Mesh) -> Array:
    """Reshapes, and where the mesh has Explicit axes reshards at once: alone not every split can be reshaped there."""
    if AxisType.Explicit not in mesh.axis_types:
        return array.reshape(shape)
    return jax.lax.reshape(array, shape, out_sharding=sharding)


def place(tree: Any, sharding: jax.sharding.Sharding, mesh: Mesh) -> Any:
    """Reshards a tree where the mesh has Explicit axes; where they are Auto, the compiler does."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, sharding), tree)
