"""Layers as one `jax.lax.scan`, and parameters sharded over all devices and gathered on use."""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_moe_lb.core.experts import LOGICAL_AXES
from jax_moe_lb.layer import CHECKPOINT_NAMES
from models.mesh import STAGE, all_axes

Rules = tuple[tuple[str, tuple[str, ...] | str | None], ...]


def expert_rules(mesh: Mesh, num_experts: int) -> Rules:
    """Return the `rules` of `nn.MoE` for a mesh of `data` and `expert`."""
    # The experts of a rank are sharded over `data` if their number allows it, and otherwise their widths, whose gather
    # costs a transpose. With pipeline stages, `split` shards the widths over the stages, too.
    if STAGE not in mesh.axis_names and num_experts % (mesh.shape["expert"] * mesh.shape["data"]) == 0:
        return ("exp", ("expert", "data")), ("embed", None), ("mlp", None)
    return ("exp", "expert"), ("embed", "data"), ("mlp", None)


# Path of the router weights, which compute in float32; all other matrices compute in the compute dtype.
ROUTER = ("moe", "kernel")


def split(
    variable: nnx.Variable, path: tuple[Any, ...], mesh: Mesh, first: int = 0, *, is_staged: bool = False
) -> None:
    """Set the sharding metadata of a parameter; its optimizer state follows."""
    # Home experts keep the sharding of their layer, with stages of a pipeline beside `data`. Other parameters shard one
    # dimension over all devices. If no dimension is divisible by their number, they shard over one axis, and otherwise
    # stay replicated, such as small biases.
    spec, is_experts = tuple(nnx.get_partition_spec(variable).get_value()), path[-1] in LOGICAL_AXES
    shape, axes = variable.shape[first:], tuple(axis for axis in all_axes(mesh) if axis != STAGE or not is_staged)
    if not is_experts:
        spec = _one_dimension(shape, mesh, axes, is_table=path[-1] == "embedding")
    elif STAGE in axes:
        both = mesh.shape.get("data", 1) * mesh.shape[STAGE]
        entries = zip(spec, shape, strict=False)
        spec = tuple(("data", STAGE) if axis == "data" and size % both == 0 else axis for axis, size in entries)
    spec = ((STAGE,) if is_staged else (None,) * first) + spec
    variable.set_metadata(out_sharding=spec, sharding_rules=(), mesh=mesh, gathered=not is_experts)


def _one_dimension(shape: tuple[int, ...], mesh: Mesh, axes: tuple[str, ...], *, is_table: bool) -> tuple[Any, ...]:
    # Shard an embedding table by channels. Token ids and vectors are then exchanged, and the table stays in place.
    order = range(len(shape) - 1, -1, -1) if is_table else range(len(shape))
    for over in (axes, *((axis,) for axis in axes)):
        for at in order:
            if shape[at] % math.prod(mesh.shape[axis] for axis in over) == 0:
                return (None,) * at + (over,)
    return ()


class Adapter(nnx.Param):
    """Low-rank update of a matrix (LoRA, arXiv 2106.09685)."""


# Path of the matrices with adapters in a block: attention and experts.
ADAPTED = re.compile(r"attention\.\w+\.kernel|moe\.(up|gate|down)")


def add_adapters(
    block: nnx.Module,
    rank: int,
    mesh: Mesh,
    rngs: nnx.Rngs,
    *,
    paths: Collection[str] | None = None,
    is_staged: bool = False,
) -> None:
    """Add adapters to a stack of blocks: for a matrix `[..., I, O]` of each, `[..., I, rank]` and `[..., rank, O]`."""
    # They are attributes beside the matrix, with its name and `_a` or `_b`. Their product is initially 0. Attention and
    # experts multiply tokens with both factors, so that the gradients of adapters need none of the matrix.
    for path, matrix in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        dotted = ".".join(map(str, path))
        if not (ADAPTED.fullmatch(dotted) if paths is None else dotted in paths):
            continue
        *inside, name = path
        owner: Any = block
        for key in inside:
            owner = getattr(owner, str(key))
        *leading, inner, outer = matrix.shape
        first = jax.random.normal(rngs.params(), (*leading, inner, rank), matrix.dtype) * inner**-0.5
        parts = {"a": Adapter(first), "b": Adapter(jnp.zeros((*leading, rank, outer), matrix.dtype))}
        spec = list(matrix.get_metadata("out_sharding"))
        for part, adapter in parts.items():
            if matrix.get_metadata("gathered"):
                split(adapter, (*inside, part), mesh, 1, is_staged=is_staged)
            else:
                # The dimension of the rank stays whole.
                own = [None if at == (-1 if part == "a" else -2) + len(spec) else axis for at, axis in enumerate(spec)]
                adapter.set_metadata(out_sharding=tuple(own), sharding_rules=(), mesh=mesh, gathered=False)
            setattr(owner, f"{name}_{part}", adapter)


def adapted(matrix: Array, a: Array, b: Array, scale: float) -> Array:
    """Return a matrix plus the scaled product of its adapters, in the dtype of the matrix."""
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    return (matrix.astype(jnp.float32) + scale * product).astype(matrix.dtype)


@dataclass(frozen=True)
class ParameterGather:
    """Gather of the parameters sharded by `split`, except those of experts, which their layer gathers."""

    # Matrices are cast before the gather. The gradient of a parameter is reduce-scattered to the parameter's sharding.

    mesh: Mesh | AbstractMesh  # devices; inside a `jax.shard_map`, its mesh
    dtype: Any  # dtype of the matrix products
    adapter_scale: float = 1.0  # factor on the products of adapters

    def __call__(self, state: nnx.State, first: int = 0) -> nnx.State:
        """Gather all parameters of a state, and apply the factor of its adapters."""
        variables: dict[Any, Any] = dict(nnx.to_flat_state(state))
        values = {path: self.one(path, variable, first) for path, variable in variables.items()}
        for path, variable in variables.items():
            if isinstance(variable, Adapter) and path[-1].endswith("_b"):
                values[path] = values[path] * self.adapter_scale
        return nnx.from_flat_state([(path, variable.replace(values[path])) for path, variable in variables.items()])

    def one(self, path: tuple[Any, ...], variable: nnx.Variable, first: int = 0) -> Any:
        """Gather the value of one variable; the arguments match those of `__call__`."""
        value = variable.get_value()
        if isinstance(value, Summed):
            value = _read(*value)
        if not variable.has_metadata("gathered"):
            return value
        # Fix the layout; a product with the transpose would make XLA store a transposed copy of all layers.
        value = with_layout_constraint(value, Layout(tuple(range(value.ndim))))
        if not variable.get_metadata("gathered"):
            return value
        is_wide = value.ndim < 2 or path[-2:] == ROUTER
        narrow = value if is_wide else value.astype(self.dtype)
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        manual = {axis for axis, kind in kinds if kind == AxisType.Manual}
        spec = [without(entry, manual) for entry in variable.get_metadata("out_sharding")[first:]]
        return _gathered(narrow, NamedSharding(self.mesh, PartitionSpec(*spec)))


def without(entry: Any, axes: Collection[str]) -> Any:
    """Return an entry of a `PartitionSpec` without some mesh axes."""
    left = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis not in axes)
    return left or None


class Summed(NamedTuple):
    """Value of a parameter in one layer, whose gradient is added to sums over microbatches."""

    value: Array  # the parameter, without a gradient
    sums: Array  # float32 of its shape, see `sums_of`


@jax.custom_vjp
def sums_of(value: Array) -> Array:
    """Return float32 zeros in the shape of a parameter, whose gradient is that of the parameter."""
    # Their values are never read. A loop that carries them carries the sums of the gradients backward, and each layer
    # adds to its own part in place. The gradient of a parameter closed over by the loop would be a stack of all layers
    # in each iteration, in the dtype of the parameter.
    return jnp.zeros(value.shape, jnp.float32)


sums_of.defvjp(
    lambda value: (sums_of(value), jnp.zeros((), value.dtype)), lambda like, sums: (sums.astype(like.dtype),)
)


@jax.custom_vjp
def _read(value: Array, sums: Array) -> Array:
    return value


_read.defvjp(lambda value, sums: (value, None), lambda _, gradient: (None, gradient.astype(jnp.float32)))


@jax.custom_vjp
def _part(sums: Array, at: Array) -> tuple[Array, Array]:
    """Return the sums, and the part of one layer."""
    return sums, sums[at]


_part.defvjp(
    lambda sums, at: (_part(sums, at), at), lambda at, gradients: (gradients[0].at[at].add(gradients[1]), None)
)


def _with_sums(state: nnx.State, sums: nnx.State, at: Array) -> tuple[nnx.State, nnx.State]:
    """Pair the parameters of a layer with their part of the sums; return the sums for the next layer."""
    flat, after = dict(nnx.to_flat_state(state)), []
    for path, whole in nnx.to_flat_state(sums):
        left, part = _part(whole.get_value(), at)
        after.append((path, whole.replace(left)))
        flat[path] = flat[path].replace(Summed(flat[path].get_value(), part))
    return nnx.from_flat_state(list(flat.items())), nnx.from_flat_state(after)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(value: Array, parts: NamedSharding) -> Array:
    # Constrain both sides, so that XLA does not move the gather before the cast.
    value = jax.lax.with_sharding_constraint(value, parts)
    return jax.lax.with_sharding_constraint(value, NamedSharding(parts.mesh, PartitionSpec()))


def _gathered_backward(parts: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    # Without this constraint, the full gradient would exist on every device before the scatter.
    return (jax.lax.with_sharding_constraint(gradient, parts),)


_gathered.defvjp(lambda value, parts: (_gathered(value, parts), None), _gathered_backward)

# Names of the residuals of a layer, besides its input, as set by `checkpoint_name`. The backward pass reuses routing,
# plans and attention products, and rematerializes everything else. "stream" is the residual stream after attention,
# which saves the product of its output projection.
KEPT = (*CHECKPOINT_NAMES, "attention")
LAYER_INPUT = "layer_input"  # name of the input of a layer in a loop, as set by `checkpoint_name`


def computed_again(run: Callable, remat: str, *, prevent_cse: bool) -> Callable:
    """Wrap a function so that its backward pass rematerializes parts of it."""
    if remat == "none":
        return run
    policy = jax.checkpoint_policies.save_only_these_names(*(() if remat == "full" else remat.split(",")))
    again: Callable = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
    return again


def period_of(graphs: Sequence[Any]) -> int:
    """Return the smallest divisor `p` of the number of layers such that the graphs of layers `i` and `i + p` agree."""
    sizes = (size for size in range(1, len(graphs)) if len(graphs) % size == 0)
    return next((size for size in sizes if graphs[size:] == graphs[:-size]), len(graphs))


def scan_states(
    graphs: Sequence[nnx.GraphDef],
    stacks: Sequence[nnx.State],
    x: Array,
    sharding: NamedSharding,
    gather: Callable[[nnx.State], nnx.State],
    remat: str,
    shared: Sequence[Array | None],
    sums: Sequence[nnx.State] = (),
    first: Array | int = 0,
    experts: Array | None = None,
) -> tuple[Array, Any, list[nnx.State], Sequence[nnx.State]]:
    """Apply stacks of layers, split into graphs and states, to `x` with `jax.lax.scan`, without copying parameters."""

    def run_layer(
        graph: nnx.GraphDef, x: Array, state: nnx.State, given: dict[str, Array]
    ) -> tuple[Array, tuple[Any, nnx.State]]:
        layer: Any = nnx.merge(graph, gather(state))
        x = checkpoint_name(jax.lax.with_sharding_constraint(x, sharding), LAYER_INPUT)
        x, stats = layer(x, *shared, **given)
        return x, (stats, nnx.state(layer, nnx.Not(nnx.Param)))

    # The body of a loop shares no expressions with the forward pass; XLA inlines a loop with one iteration.
    num_periods = jax.tree.leaves(stacks)[0].shape[0]
    runs = [computed_again(partial(run_layer, graph), remat, prevent_cse=num_periods == 1) for graph in graphs]

    def run_period(
        carry: tuple[Array, list[nnx.State]], period: tuple[Array, list[nnx.State], dict[str, Array]]
    ) -> tuple[tuple[Array, list[nnx.State]], list[tuple[Any, nnx.State]]]:
        (x, sums), (at, states, given), after, per_layer = carry, period, [], []
        for place, (run, state) in enumerate(zip(runs, states, strict=True)):
            if sums:
                state, left = _with_sums(state, sums[place], at)
                after.append(left)
            x, found = run(x, state, {name: array[place] for name, array in given.items()})
            per_layer.append(found)
        return (x, after), per_layer

    places = first + jnp.arange(num_periods, dtype=jnp.int32)
    given = {} if experts is None else {"experts": experts.reshape(len(places), len(stacks), *experts.shape[1:])}
    (x, after), per_place = jax.lax.scan(run_period, (x, list(sums)), (places, list(stacks), given))
    stats, kept = zip(*per_place, strict=True)
    return x, jax.tree.map(_interleaved, *stats), list(kept), after


def _interleaved(*stacks: Array) -> Array:
    """Return the entries of `[periods, ...]` arrays, one per layer of a period, in the order of the layers."""
    return stacks[0] if len(stacks) == 1 else jnp.stack(stacks, 1).reshape(-1, *stacks[0].shape[1:])
