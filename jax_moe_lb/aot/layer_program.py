"""Program of an `nn.MoE` with gradients, for any system and compiler options."""

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
from jaxtyping import Array, PyTree

from jax_moe_lb.aot.compile import compile_for, quiet_stderr
from jax_moe_lb.aot.load import LayerLoad, counts_of
from jax_moe_lb.aot.report import ProgramReport
from jax_moe_lb.aot.sizes import LayerSizes
from jax_moe_lb.aot.targets import Target
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.layer.systems import System

Abstract = jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """Layer with gradients of the sum of squared outputs."""

    layer: Any  # an `nn.MoE`, on devices or abstract
    x: Array | Abstract  # `[..., H]` tokens of all ranks, of which only shape, dtype and sharding are read
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


def _abstract(mesh: Mesh, like: PyTree, spec: PartitionSpec = PartitionSpec()) -> Abstract:
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        sharding = NamedSharding(mesh, spec)
    return Abstract(like.shape, like.dtype, sharding=sharding)
