"""Weights that are split over all devices of a mesh, and gathered where they are used."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
class Gather:
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
        """Gathers all parameters of a state.

        Args:
            state: of a model or a layer.
            first: how many dimensions fewer its arrays have than when they were split: 1 for a layer of a stack.
        """
        return nnx.from_flat_state(
            [(path, variable.replace(self.one(path, variable, first))) for path, variable in nnx.to_flat_state(state)]
        )

    def one(self, path: tuple[Any, ...], variable: nnx.Variable, first: int = 0) -> Any:
        """Gathers the value of a variable at a path; the arguments are those of a call."""
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
