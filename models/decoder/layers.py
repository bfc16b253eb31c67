"""Layers as one compiled loop, and weights split over all devices and gathered on use."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb.layer import CHECKPOINT_NAMES

Rules = tuple[tuple[str, str | None], ...]

EXPERT_RULES: Rules = (("exp", "expert"), ("embed", "data"), ("mlp", None))
"""The `rules` of `nn.MoE` for a mesh of `data` and `expert`: experts over one axis, their widths over the other."""

ROUTER = ("moe", "kernel")
"""Where the router's weights are, which compute in float32; all other matrices compute in a narrow dtype."""


def split(variable: nnx.Variable, path: tuple[Any, ...], mesh: Mesh, first: int = 0) -> None:
    """Notes in a parameter how it is split over a mesh; its optimizer state follows it.

    Home experts stay where their layer has them. Of any other parameter one dimension is split over all devices or, if
    none divides so far, over those of one axis; what no axis divides, such as a few biases, every device has whole.

    Args:
        variable: the parameter, with its value or its shape.
        path: where it is in its model or, of a stack of layers, in a layer.
        mesh: the devices.
        first: its first dimension that may be split; 1 in a stack, whose dimension of layers stays whole.
    """
    spec = tuple(nnx.get_partition_spec(variable).get_value())
    is_experts = "expert" in jax.tree.leaves(spec)
    if is_experts:
        spec = (None,) * first + spec
    else:
        spec = _one_dimension(variable.shape, first, mesh, is_table=path[-1] == "embedding")
    variable.set_metadata(out_sharding=spec, sharding_rules=(), mesh=mesh, gathered=not is_experts)


def _one_dimension(shape: tuple[int, ...], first: int, mesh: Mesh, *, is_table: bool) -> tuple[Any, ...]:
    # Of a table of words each device has some channels of all: ids and vectors travel then, and the table does not.
    order = range(len(shape) - 1, first - 1, -1) if is_table else range(first, len(shape))
    axes = tuple(mesh.axis_names)
    for over in (axes, *((axis,) for axis in axes)):
        for at in order:
            if shape[at] % math.prod(mesh.shape[axis] for axis in over) == 0:
                return (None,) * at + (over,)
    return ()


@dataclass(frozen=True)
class ParameterGather:
    """Gathers parameters that `split` split, but for those of experts, whose layer gathers them itself.

    Matrices are cast before they travel. The gradient of a parameter is summed over all devices, of which each gets the
    part that it has of the parameter.

    Args:
        mesh: the devices.
        dtype: that of the products.
    """

    mesh: Mesh
    dtype: Any

    def __call__(self, state: nnx.State, first: int = 0) -> nnx.State:
        """Gather all parameters of a state.

        Args:
            state: of a model or a layer.
            first: how many dimensions fewer its arrays have than when they were split: 1 for a layer of a stack.
        """
        return nnx.from_flat_state(
            [(path, variable.replace(self.one(path, variable, first))) for path, variable in nnx.to_flat_state(state)]
        )

    def one(self, path: tuple[Any, ...], variable: nnx.Variable, first: int = 0) -> Any:
        """Gather the value of a variable at a path; the arguments are those of a call."""
        value = variable.get_value()
        if not variable.has_metadata("gathered"):
            return value
        # A product with the transpose would have the compiler store all layers the other way round, in a copy.
        value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        if not variable.get_metadata("gathered"):
            return value
        is_wide = value.ndim < 2 or path[-2:] == ROUTER
        narrow = value if is_wide else value.astype(self.dtype)
        parts = NamedSharding(self.mesh, PartitionSpec(*variable.get_metadata("out_sharding")[first:]))
        return _gathered(narrow, parts)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(value: Array, parts: NamedSharding) -> Array:
    # Said of both sides, so that no compiler gathers before the cast.
    value = jax.lax.with_sharding_constraint(value, parts)
    return jax.lax.with_sharding_constraint(value, NamedSharding(parts.mesh, PartitionSpec()))


def _gathered_forward(value: Array, parts: NamedSharding) -> tuple[Array, None]:
    return _gathered(value, parts), None


def _gathered_backward(parts: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    # Otherwise it would be whole on every device before it is split.
    return (jax.lax.with_sharding_constraint(gradient, parts),)


_gathered.defvjp(_gathered_forward, _gathered_backward)

KEPT = (*CHECKPOINT_NAMES, "attention")
"""What the backward pass of a layer is given beside the layer's input, by the names of `checkpoint_name`.

Nobody routes or plans again, and products of attention are not computed again. All else is.
"""

NARROWED = ("qkv", "out", "up", "down", "gate")
"""The weights of products in the compute dtype; routers and norms compute in float32."""


def one_by_one(layers: Sequence[Any], x: Array, remat: str = "none") -> tuple[Array, Any]:
    """Send `x` through one layer after the other, each of which is compiled.

    The arguments and results are those of `scanned`; here all is kept for the backward pass by default.
    """
    per_layer = []
    for layer in layers:
        graph, state = nnx.split(layer)

        def run(x: Array, state: nnx.State, graph: Any = graph) -> tuple[Array, tuple[Any, nnx.State]]:
            layer: Any = nnx.merge(graph, state)
            x, stats = layer(x)
            return x, (stats, nnx.state(layer, nnx.Not(nnx.Param)))

        x, (stats, kept) = computed_again(run, remat, prevent_cse=True)(x, state)
        nnx.update(layer, kept)
        per_layer.append(stats)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *per_layer)


def computed_again(run: Callable, remat: str, *, prevent_cse: bool) -> Callable:
    """Has the backward pass of a function compute parts of it again.

    Args:
        run: the function.
        remat: "none" keeps all, "full" the arguments alone, and names of `checkpoint_name`, with commas between them,
            what they name beside that.
        prevent_cse: whether a compiler could see that something is computed twice, see `jax.checkpoint`.
    """
    if remat == "none":
        return run
    policy = jax.checkpoint_policies.save_only_these_names(*(() if remat == "full" else remat.split(",")))
    again: Callable = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
    return again


def scanned(layers: Sequence[Any], x: Array, sharding: NamedSharding, remat: str = ",".join(KEPT)) -> tuple[Array, Any]:
    """Send `x` through one layer after the other, in a loop over their stacked parameters.

    A layer keeps parameters and state of its own: they are stacked for the loop alone, so that names in checkpoints do
    not depend on it. Weights are cast to the dtype of `x` as they are stacked, so that what is copied is narrow.

    Args:
        layers: modules of the same kind and sizes; each maps `x` to the next `x` and its statistics.
        x: the residual stream `[B, T, H]`.
        sharding: where it lies, in every layer.
        remat: what the backward pass computes again, see `computed_again`. By default that is all of a layer but what
            `KEPT` names.

    Returns:
        The last `x`, and the statistics stacked over the layers.
    """
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    stacked = jax.tree.map_with_path(lambda path, *leaves: jnp.stack(_narrowed(path, leaves, x)), *states)
    x, (stats, kept) = _loop(graphs[0], stacked, x, sharding, lambda state: state, remat)
    for i, layer in enumerate(layers):
        nnx.update(layer, jax.tree.map(lambda leaf, i=i: leaf[i], kept))
    return x, stats


def scan_stacked(
    stack: Any, x: Array, sharding: NamedSharding, gather: Callable[[nnx.State], nnx.State], kept: Sequence[str] = KEPT
) -> tuple[Array, Any]:
    """Send `x` through a stack of layers, in a loop as that of `scanned`, which copies no parameters.

    Args:
        stack: a module whose arrays are those of all layers, stacked; it maps `x` to the next `x` and its statistics.
        x: the residual stream `[B, T, H]`.
        sharding: where it lies, in every layer.
        gather: makes the state that a layer is computed with of what is stored of it, forward and again backward.
        kept: what is kept for the backward pass beside the input of a layer, by the names of `checkpoint_name`.

    Returns:
        The last `x`, and the statistics stacked over the layers.
    """
    graph, state = nnx.split(stack)
    x, (stats, moved) = _loop(graph, state, x, sharding, gather, ",".join(kept))
    nnx.update(stack, moved)
    return x, stats


def _loop(
    graph: nnx.GraphDef,
    stacked: nnx.State,
    x: Array,
    sharding: NamedSharding,
    gather: Callable[[nnx.State], nnx.State],
    remat: str,
) -> tuple[Array, tuple[Any, nnx.State]]:
    def run(x: Array, state: nnx.State) -> tuple[Array, tuple[Any, nnx.State]]:
        layer: Any = nnx.merge(graph, gather(state))
        x, stats = layer(jax.lax.with_sharding_constraint(x, sharding))
        return x, (stats, nnx.state(layer, nnx.Not(nnx.Param)))

    # A loop's body stands alone: no expression of the forward pass is there to be shared.
    return jax.lax.scan(computed_again(run, remat, prevent_cse=False), x, stacked)


def _narrowed(path: Any, leaves: Sequence[Array], x: Array) -> list[Array]:
    """Cast the leaves of a path, one of each layer, if they are weights that are used in the dtype of `x`."""
    names = {jax.tree_util.keystr((key,), simple=True) for key in path}
    return [leaf.astype(x.dtype) if names & set(NARROWED) else leaf for leaf in leaves]
