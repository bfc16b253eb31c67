"""Compilation of one mixture-of-experts layer for a target: of `moe` by its sizes, or of an `nn.MoE`."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from jax_moe_lb.aot.compile import compile_for, quiet_stderr
from jax_moe_lb.aot.load import LayerLoad, LayerSizes, check_sizes, counts_of
from jax_moe_lb.aot.report import ProgramReport
from jax_moe_lb.aot.targets import Target
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.stats import Stats
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import DType, State, Tokens
from jax_moe_lb.layer.moe import MoEParams, MoEState, moe
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing.routers import TopK

BACKWARD = 3
"""Ratio of a forward and backward pass to a forward pass in the ideal: each product has two gradients."""


def compile_layer(
    system: System,
    target: Target,
    sizes: LayerSizes = LayerSizes(),
    *,
    gradients: bool = False,
    fused: bool = False,
    dtype: DType = jnp.bfloat16,
    options: Mapping[str, str | bool] | None = None,
) -> ProgramReport:
    """Compile a layer for a target, with all of its devices as one expert-parallel group.

    Args:
        system: System to compile, such as `exact()`.
        target: Target machine.
        sizes: Sizes of the layer; `LayerSizes()` by default.
        gradients: If True, include the gradients of the sum of squared outputs. False by default.
        fused: If True, the experts' gates are fused into `up`; see `Experts`. False by default.
        dtype: Dtype of tokens and weights; bfloat16 by default.
        options: XLA compiler options for this program, by name without dashes; they override `compiler_options`.

    Returns:
        The report on one device.

    Raises:
        ValueError: The sizes do not fit the machine, or `compile_for` rejects the program.

    Examples:
        With the GPU compiler installed (`pip install '.[cuda]'` in a checkout):

        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.aot import Target, compile_layer, use_no_accelerators
        >>> use_no_accelerators()  # doctest: +SKIP
        >>> compile_layer(exact(), Target.parse("h100:1x8")).fits  # doctest: +SKIP
        True
    """
    mesh = target.mesh()
    check_sizes(sizes, mesh.size)
    topology = Topology.from_mesh(mesh, mesh.axis_names, rails_per_node=mesh.shape["expert"])
    system = system.limit_slots(sizes.experts, sizes.experts // mesh.size)
    layer = partial(_layer, per_token=sizes.per_token, system=system, topology=topology)
    specs = (PartitionSpec(mesh.axis_names), PartitionSpec(), PartitionSpec(mesh.axis_names), PartitionSpec())
    out_specs = (PartitionSpec(mesh.axis_names), PartitionSpec(), PartitionSpec())
    run = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out_specs)
    program = jax.jit(_with_gradients(run) if gradients else run)
    ideal_flops = sizes.ideal_flops * (BACKWARD if gradients else 1)
    args = _arguments(sizes, system, mesh, specs, dtype, fused)
    return compile_for(target, program, args, mesh, ideal_flops=ideal_flops, options=options)


def _layer(
    x: Tokens,
    kernel: Float[Array, "H E"],
    experts: Experts,
    state: State,
    *,
    per_token: int,
    system: System,
    topology: Topology,
) -> tuple[Tokens, Stats, State]:
    params, router = MoEParams(kernel, experts), TopK(per_token)
    y, stats, after = moe(x, params, router, system, topology, MoEState(state))
    return y, stats, after.balancer


def _with_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: Tokens, kernel: Float[Array, "H E"], experts: Experts, state: State) -> Any:
        y, *others = run(x, kernel, experts, state)
        # Squared, so that the output gradient depends on the outputs and is not a constant.
        return jnp.square(y.astype(jnp.float32)).sum(), others

    # Without the loss itself: its sum over all devices would be in flight during the whole backward pass, and XLA makes
    # no CUDA graph of a loop beside it.
    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)


def _arguments(
    sizes: LayerSizes, system: System, mesh: Mesh, specs: tuple[PartitionSpec, ...], dtype: DType, fused: bool
) -> tuple[Any, ...]:
    def make() -> tuple[Array, Array, Experts, State]:
        up = jnp.zeros((sizes.experts, sizes.hidden, sizes.inner), dtype)
        experts = Experts(up, up.mT, up)
        experts = experts.fused() if fused else experts
        x = jnp.zeros((mesh.size * sizes.tokens, sizes.hidden), dtype)
        kernel = jnp.zeros((sizes.hidden, sizes.experts), dtype)
        return x, kernel, experts, system.balancer.init((mesh.size, sizes.experts))

    def place(spec: PartitionSpec, like: Any) -> Any:
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=NamedSharding(mesh, spec))

    # Shapes only, without allocation.
    args = jax.eval_shape(make)
    return tuple(jax.tree.map(partial(place, spec), arg) for spec, arg in zip(specs, args, strict=True))


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """Layer with gradients of the sum of squared outputs."""

    layer: Any  # an `nn.MoE`, on devices or abstract
    x: Array | jax.ShapeDtypeStruct  # `[..., H]` tokens of all ranks, of which only shape, dtype and sharding are read
    load: str  # load of the timeline

    @property
    def mesh(self) -> Mesh:
        """Mesh of the layer."""
        return self.layer.mesh

    @property
    def topology(self) -> Topology:
        """Topology of the layer."""
        return self.layer.topology

    @cached_property
    def target(self) -> Target:
        """Machine of one expert-parallel group."""
        axes = self.topology.expert_axes
        group = self.mesh.devices[tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)]
        return Target.of(list(group.flat))

    @cached_property
    def sizes(self) -> LayerSizes:
        """Sizes of the layer, with the tokens of a rank."""
        per_token = getattr(self.layer.router, "num_experts_per_tok", None)
        if per_token is None:
            raise ValueError(f"layer.router is {self.layer.router!r}; expected one with num_experts_per_tok, as TopK")
        experts, hidden, inner = self.layer.up.shape
        tokens = math.ceil(math.prod(self.x.shape[:-1]) / self._num_shards)
        return LayerSizes(hidden, inner, experts, tokens, per_token)

    def compile(self, system: System, options: Mapping[str, str | bool]) -> ProgramReport:
        """Compile a form of the layer."""
        run = self._run(system)

        def loss(params: PyTree, others: PyTree, x: Array) -> Any:
            y, others = run(params, others, x)
            # Squared: a sum would have a constant gradient.
            return jnp.square(y.astype(jnp.float32)).sum(), others

        program = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))
        with quiet_stderr():
            return compile_for(self.target, program, self._arguments, self.mesh, options=options)

    def load_of(self, system: System) -> LayerLoad:
        """Plan the load of the timeline with a system."""
        counts = counts_of(self.load, self.sizes, self.topology.num_ranks)
        return LayerLoad.of(system, self.sizes, self.topology, counts, self.load)

    def residual_bytes(self, system: System) -> int:
        """Count the residuals of a form on one device in bytes, without the parameters."""
        params, others, x = self._arguments
        run = self._run(system)

        def residuals(params: PyTree, others: PyTree, x: Array) -> Any:
            return jax.vjp(lambda params, x: run(params, others, x)[0], params, x)[1]

        saved = jax.tree.leaves(jax.eval_shape(residuals, params, others, x))
        counted = Counter((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in saved)
        counted -= Counter((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in jax.tree.leaves(params))
        of_all = sum(count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in counted.items())
        return of_all // self.mesh.size

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.topology.data_axes + self.topology.expert_axes

    @property
    def _num_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self._axes)

    @cached_property
    def _arguments(self) -> tuple[Any, Any, Any]:
        """Parameters, other variables and tokens, as shapes with shardings."""
        _, *split = nnx.split(self.layer, nnx.Param, ...)
        by_rank = PartitionSpec(self._axes) if self.x.shape[0] % self._num_shards == 0 else PartitionSpec()
        params, others = jax.tree.map(partial(_abstract, self.mesh), split)
        return params, others, _abstract(self.mesh, self.x, by_rank)

    def _run(self, system: System) -> Callable[..., Any]:
        """Return the layer as a function of `_arguments`, to outputs and others."""
        graph = nnx.split(self.layer, nnx.Param, ...)[0]

        def run(params: PyTree, others: PyTree, x: Array) -> Any:
            layer = nnx.merge(graph, params, others)
            layer.system = system
            y, stats = layer(x)
            return y, (stats, nnx.state(layer, nnx.Not(nnx.Param)))

        return run


def _abstract(mesh: Mesh, like: PyTree, spec: PartitionSpec = PartitionSpec()) -> jax.ShapeDtypeStruct:
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
