"""Parameters and calls of the Flax layer over the arrays of all ranks.

It creates parameters with the sharding, and runs `moe` and the gather of expert domains in `jax.shard_map`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.stats import Stats
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import AnyArray, DType, State
from jax_moe_lb.layer.moe import MoEParams, MoEState, moe
from jax_moe_lb.layer.systems import System
from jax_moe_lb.nn.tokens import TokenLayout, axis_names, place
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.routers import RouterFunction, TokenInfo
from jax_moe_lb.transport.expert_domains import GatherExpertDomain
from jax_moe_lb.transport.fsdp import FsdpExperts

LogicalAxes = tuple[str | None, ...]

LogicalAxisRules = tuple[tuple[str, tuple[str, ...] | str | None], ...]


@dataclass(frozen=True)
class Parameters:
    """Factory of the parameters of a layer, with the sharding."""

    mesh: Mesh  # mesh of the parameters
    rules: LogicalAxisRules  # table from logical to mesh axes
    dtype: DType  # dtype of the parameters
    kernel_init: nnx.Initializer  # initializer of all kernels
    rngs: nnx.Rngs  # random number generators for the kernels

    def kernel(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Initialize a kernel, or a stack of kernels."""
        self._check_sizes(shape, axes)
        # Initializers treat the leading axis as the stack's batch axis, so add one to a single kernel.
        batched = (1, *shape) if len(shape) == 2 else shape
        value = self.kernel_init(self.rngs.params(), batched, self.dtype)
        return nnx.Param(value.reshape(shape), out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)

    def bias(self, shape: tuple[int, ...], axes: LogicalAxes) -> nnx.Param:
        """Initialize a bias, or a stack of biases, to 0."""
        self._check_sizes(shape, axes)
        value = jnp.zeros(shape, self.dtype)
        return nnx.Param(value, out_sharding=axes, mesh=self.mesh, sharding_rules=self.rules)

    def _check_sizes(self, shape: tuple[int, ...], axes: LogicalAxes) -> None:
        """Raise `ValueError` if the mesh axes of a logical axis do not divide its size."""
        table = dict(self.rules)
        for size, axis in zip(shape, axes, strict=True):
            split = axis_names(table.get(axis or ""))
            shards = math.prod(self.mesh.shape.get(name, 1) for name in split)
            if size % shards:
                raise ValueError(
                    f"rules split axis {axis!r} of size {size} over {split}; expected a multiple of {shards}"
                )


def expert_axes(topology: Topology, migrate: GatherExpertDomain | None) -> tuple[str, ...]:
    """Return the mesh axes that shard the home experts."""
    return topology.expert_axes if migrate is None else migrate.domains.expert_axes


def logical_axis_rules(topology: Topology, migrate: GatherExpertDomain | None = None) -> LogicalAxisRules:
    """Return the default rules: experts over the expert axes, their inner width over the tensor axes.

    For FSDP, replace the rule of `embed` by data axes, such as `("embed", "fsdp")`, or add them to the rule of `exp`,
    such as `("exp", ("expert", "fsdp"))`, and pass the table as `rules` of `MoE`. Parameters, gradients and optimizer
    state are then sharded over these axes, too; the layer all-gathers the weights of the experts. See `FsdpExperts`.

    A pair of `length` names the mesh axes of sequences in the tokens `[..., S, H]`, such as `("length",
    "context")`. Explicit axes carry their sharding. On Auto axes without the pair, the layer assumes that its data and
    expert axes shard whole sequences as far as they divide their number, and then parts of sequences.

    Args:
        topology: topology of the layer.
        migrate: `GatherExpertDomain` of the layer; `None` (default) if it has none.

    Returns:
        Pairs of a logical axis (`"exp"`, `"embed"` or `"mlp"`) and the mesh axes; `None` replicates.

    Examples:
        >>> from jax.sharding import AbstractMesh
        >>> from jax_moe_lb import Topology
        >>> from jax_moe_lb.nn import logical_axis_rules
        >>> logical_axis_rules(Topology.from_mesh(AbstractMesh((2, 8), ("data", "expert"))))
        (('exp', ('expert',)), ('embed', None), ('mlp', None))
    """
    return (("exp", expert_axes(topology, migrate)), ("embed", None), ("mlp", topology.tensor_axes or None))


@dataclass(frozen=True)
class LayerConfig:
    """Static configuration of one layer call; see `nn.MoE` and `moe` for the fields."""

    router: RouterFunction
    system: System
    topology: Topology
    mesh: Mesh
    shards: FsdpExperts
    losses: Losses
    tokens: TokenLayout
    num_segments: int | None
    return_routing: bool
    fuse_gate_up: bool


class LayerInputs(NamedTuple):
    """Arrays of one layer call over all ranks; `None` for absent ones."""

    tokens: Any  # tokens of all ranks in the layout of the call
    info: Any  # properties of these tokens in the same layout, by the field of `TokenInfo`
    key: Any  # random key, equal on all ranks
    kernel: Any  # router kernel
    experts: Any  # home experts of all ranks
    logit_bias: Any  # bias of the router logits
    selection_bias: Any  # bias of the router scores for expert selection
    homes: Any  # place of each expert
    state: Any  # balancer state, stacked over groups
    known: Any  # codec state of the expert domains
    residual: Any  # entries of expert gradients not sent home


# Jitted here: all layers of one configuration share a compilation, even if the caller does not jit.
@functools.partial(jax.jit, inline=True, static_argnames=("layer",))
def sharded_moe(
    inputs: LayerInputs, *, layer: LayerConfig
) -> tuple[Array, Stats, State, Experts | None, list[Int[Array, "*C K"]]]:
    """Run `moe` on the tokens of all ranks."""
    # Return outputs, statistics and state per group, codec state, and a list of the experts of tokens if requested.
    topology, migrate, mesh = layer.topology, layer.system.migrate, layer.mesh
    home_axes = expert_axes(topology, migrate)
    whole, by_expert = PartitionSpec(), PartitionSpec(home_axes)
    by_token = layer.tokens.spec
    by_group = PartitionSpec(topology.data_axes) if topology.data_axes else PartitionSpec(None)
    specs = LayerInputs(
        tokens=by_token,
        info=by_token,
        key=whole,
        kernel=whole,
        experts=layer.shards.specs(inputs.experts, home_axes, topology.tensor_axes),
        logit_bias=whole,
        selection_bias=whole,
        homes=whole,
        state=by_group,
        known=by_expert,
        residual=None if inputs.residual is None else expert_specs(inputs.experts, topology, migrate),
    )
    # Some axes may already be manual, such as the stages of a pipeline. All other mesh axes become manual here, because
    # the compiler cannot partition custom calls; devices along unused axes repeat the same computation.
    around = jax.sharding.get_abstract_mesh().manual_axes
    if taken := sorted(set(around) & set(home_axes + topology.data_axes + topology.tensor_axes)):
        raise ValueError(f"topology has the axes {taken}, which are manual already; expected others: see `data_axes`")
    return jax.shard_map(
        functools.partial(_one_rank, layer=layer),
        mesh=None if around else mesh,
        in_specs=(specs,),
        out_specs=(by_token, by_group, by_group, by_expert, by_token),
        axis_names=set(mesh.axis_names) - set(around),
    )(LayerInputs(*(_place_by(array, spec, mesh) for array, spec in zip(inputs, specs, strict=True))))


def _one_rank(
    inputs: LayerInputs, layer: LayerConfig
) -> tuple[Array, Stats, State, Experts | None, list[Int[Array, "*C K"]]]:
    # Each group has its own balancer state: drop the group dimension.
    state = jax.tree.map(lambda leaf: leaf[0], inputs.state)
    known, migrate = inputs.known, layer.system.migrate
    # Fuse shards, which are smaller, except shards of `F`: a gather would interleave their halves.
    fuses_shards = layer.fuse_gate_up and migrate is None and not layer.shards.mlp_axes
    experts = layer.shards(inputs.experts.fused() if fuses_shards else inputs.experts)
    if migrate is not None and known is not None:
        experts, known = migrate.update(experts, known, inputs.residual)
    elif migrate is not None:
        experts = migrate(experts, residual=inputs.residual)
    experts = experts.fused() if layer.fuse_gate_up else experts
    layout = layer.tokens
    info = TokenInfo(
        **jax.tree.map(layout.flatten, inputs.info),
        key=inputs.key,
        position=layout.positions(),
        num_segments=layer.num_segments,
    )
    y, stats, after, *routing = moe(
        layout.flatten(inputs.tokens),
        MoEParams(inputs.kernel, experts, inputs.logit_bias, inputs.selection_bias),
        layer.router,
        # The experts are already gathered.
        replace(layer.system, migrate=None),
        layer.topology,
        MoEState(state, inputs.homes),
        info,
        layer.losses,
        return_routing=layer.return_routing,
    )
    y, routing = jax.tree.map(layout.unflatten, (y, routing))
    return y, stats.of_group, jax.tree.map(lambda leaf: leaf[None], after.balancer), known, routing


@functools.partial(jax.jit, inline=True, static_argnames=("migrate", "mesh"))
def sharded_known(experts: Experts, *, migrate: GatherExpertDomain, mesh: Mesh) -> Experts:
    """Run `migrate.known` on all ranks; return the initial codec state."""
    spec = PartitionSpec(migrate.domains.expert_axes)
    placed = place(experts, NamedSharding(mesh, spec), mesh)
    return jax.shard_map(migrate.known, mesh=mesh, in_specs=spec, out_specs=spec)(placed)


def expert_specs(experts: Experts, topology: Topology, migrate: GatherExpertDomain | None) -> Experts:
    """Return the `PartitionSpec` per array of experts: whole matrices, but for tensor shards."""
    return FsdpExperts().specs(experts, expert_axes(topology, migrate), topology.tensor_axes)


@functools.partial(jax.jit, inline=True, static_argnames=("topology", "migrate", "mesh"))
def sharded_residual(experts: Experts, *, topology: Topology, migrate: GatherExpertDomain, mesh: Mesh) -> Experts:
    """Run `migrate.initial_residual` on all ranks."""
    specs = expert_specs(experts, topology, migrate)
    return jax.shard_map(migrate.initial_residual, mesh=mesh, in_specs=(specs,), out_specs=specs)(
        _place_by(experts, specs, mesh)
    )


def _place_by(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    if isinstance(specs, PartitionSpec):
        return place(tree, NamedSharding(mesh, specs), mesh)
    return jax.tree.map(lambda leaf, spec: place(leaf, NamedSharding(mesh, spec), mesh), tree, specs)


def explicit_sharding(array: AnyArray) -> NamedSharding | None:
    """Return the sharding of an array over Explicit axes; `None` if the mesh has no such axes."""
    sharding = jax.typeof(array).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def add_shared(
    x: Float[Array, "*B H"],
    routed: Float[Array, "*B H"],
    mask: Bool[Array, "*B"] | None,
    shared: Experts,
    kernel: Float[Array, "H _"] | None,
    *,
    mix: Callable[..., Array],
    mesh: Mesh,
) -> Float[Array, "*B H"]:
    """Combine the outputs of routed experts with those of a shared expert; 0 for padding, which may contain NaN."""
    operands = _placed_shared(_zero_masked(x, mask, mesh), shared, kernel, mesh)
    # An activation of 0 need not be 0.
    return _zero_masked(mix(operands[0], routed, *operands[1:]), mask, mesh)


def _zero_masked(x: Float[Array, "*B H"], mask: Bool[Array, "*B"] | None, mesh: Mesh) -> Float[Array, "*B H"]:
    if mask is None:
        return x
    rows = PartitionSpec(*jax.typeof(x).sharding.spec[:-1], None)
    return jnp.where(place(mask[..., None], NamedSharding(mesh, rows), mesh), x, 0)


def _placed_shared(
    x: Float[Array, "*B H"], shared: Experts, kernel: Float[Array, "H _"] | None, mesh: Mesh
) -> tuple[Float[Array, "*B H"], Experts, Float[Array, "H _"] | None]:
    """Reshard the operands on Explicit axes, so that no axis occurs twice in a product."""
    if AxisType.Explicit not in mesh.axis_types:
        return x, shared, kernel
    rows = jax.typeof(x).sharding.spec[:-1]
    taken = [axis for axes in rows for axis in axis_names(axes)]
    # The inner width stays sharded by the axes without tokens.
    inner = tuple(axis for axis in axis_names(jax.typeof(shared.up).sharding.spec[-1]) if axis not in taken) or None

    def by(array: Any, *axes: Any) -> Any:
        return place(array, NamedSharding(mesh, PartitionSpec(*axes)), mesh)

    up, gate = by((shared.up, shared.gate), None, inner)
    return by(x, *rows, None), replace(shared, up=up, gate=gate, down=by(shared.down, inner, None)), by(kernel)


def fsdp_axes(rules: LogicalAxisRules, topology: Topology, home_axes: tuple[str, ...]) -> FsdpExperts:
    """Return the data axes over which `rules` split the home experts of a rank and their matrices."""
    table = dict(rules)
    exp, embed, mlp = (axis_names(table.get(name)) for name in ("exp", "embed", "mlp"))
    exp = exp[len(home_axes) :] if exp[: len(home_axes)] == home_axes else ()
    if mlp[len(mlp) - len(topology.tensor_axes) :] != topology.tensor_axes:
        raise ValueError(f"rules split mlp over {mlp}; expected the topology's tensor_axes {topology.tensor_axes} last")
    mlp = mlp[: len(mlp) - len(topology.tensor_axes)]
    if others := [axis for axis in exp + embed + mlp if axis not in topology.data_axes]:
        raise ValueError(f"rules split experts over {others}; expected data axes, of {topology.data_axes}")
    return FsdpExperts(embed, mlp, exp)
