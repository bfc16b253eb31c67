"""Relocation of experts between ranks, and checkpoints that fit any mesh.

`relocate` moves experts, with all state that belongs to them, between two steps. `mesh_independent_state` and
`restore_mesh_independent_state` separate the state that any mesh can restore from the state of one mesh.
`restore_target` places its arrays on the mesh.
"""

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Int, PyTree

from jax_moe_lb.core.checks import check_array
from jax_moe_lb.core.experts import LOGICAL_AXES
from jax_moe_lb.core.types import AnyArray
from jax_moe_lb.core.validation import checked_permutation
from jax_moe_lb.nn.moe import MoE
from jax_moe_lb.nn.sharding import explicit_sharding
from jax_moe_lb.nn.variables import BalancerState, CodecState, GradientResidual

Params = TypeVar("Params")
OptState = TypeVar("OptState")
States = TypeVar("States")
Path = tuple[str, ...]
Nodes = nnx.Module | tuple[nnx.Module | nnx.Optimizer, ...]

WEIGHTS = tuple(LOGICAL_AXES)
"""Parameters of an `MoE` indexed by place; the router's parameters are indexed by expert."""

HOMES = "homes"


def relocate(params: Params, opt_state: OptState, permutation: Int[AnyArray, "layers E"]) -> tuple[Params, OptState]:
    """Move experts to new places in parameters and optimizer state; the function of the model does not change.

    Call it at regular intervals with the permutation of `plan_relocation`. It finds `MoE` layers by path: `kernel`
    `[H, E]` beside `up` and `down` `[E, ...]`. It permutes `up`, `down`, `gate`, their biases and adapters. In the
    optimizer state it permutes every leaf whose path ends with the path of one of these. It updates `homes`, so the
    router's kernel, bias and running loads do not move.

    Call it in `jax.jit` with donated arguments and the shardings of `restore_target((params, opt_state))` as
    `out_shardings`. The compiler then exchanges the experts between devices. Before the first step the optimizer's
    counts are on one device; these shardings replicate them over the mesh.

    Args:
        params: state of a model, or a tree containing one, whose `MoE` layers have `relocates=True`.
        opt_state: state of any optimizer with one array per parameter.
        permutation: `[layers, E]` integers, layers in the order of their paths in `params`. Traced values are not
            checked here; the layer checks its homes.

    Returns:
        `params` and `opt_state` with the same shapes, experts moved.

    Raises:
        ValueError: `params` has no `MoE` layer, a layer has no homes, the permutation has another shape or is
            invalid, or optimizer state has another shape than its parameter.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from jax_moe_lb import relocate
        >>> params = {"kernel": jnp.zeros((1, 2)), "up": jnp.array([[[1.0]], [[2.0]]]), "down": jnp.zeros((2, 1, 1))}
        >>> params |= {"homes": jnp.array([0, 1], jnp.int32)}
        >>> moved, _ = relocate(params, (), np.array([[1, 0]]))
        >>> moved["up"].ravel().tolist(), moved["homes"].tolist()
        ([2.0, 1.0], [1, 0])
    """
    layers = list(_layers(params))
    shapes = _shapes(params)
    if not layers:
        raise ValueError("params have no MoE layer; expected kernel, up and down beside each other")
    num_experts = shapes[(*layers[0], "kernel")][1]
    check_array("permutation", permutation, (len(layers), num_experts), jnp.integer)
    if not isinstance(permutation, jax.core.Tracer):
        checked_permutation("permutation", permutation, permutation.shape)
    orders: dict[Path, Any] = {}
    for layer, order in zip(layers, permutation, strict=True):
        name, own = ".".join(layer) or "params", shapes[(*layer, "kernel")][1]
        if (*layer, HOMES) not in shapes:
            raise ValueError(f"{name} has no homes; expected an MoE whose system has relocates=True")
        if own != num_experts:
            raise ValueError(f"{name} has {own} experts; expected {num_experts}, as the first layer")
        orders |= {(*layer, name): order for name in (*WEIGHTS, HOMES) if (*layer, name) in shapes}

    def moved_state(key_path: KeyPath, leaf: Any) -> Any:
        path = _names(key_path)
        # Optimizer state nests copies of the parameter tree: the longest path suffix naming a parameter is its owner.
        owner = next((path[i:] for i in range(len(path)) if path[i:] in orders), None)
        if owner is None:
            return leaf
        if leaf.shape != shapes[owner]:
            raise ValueError(
                f"{'.'.join(path)} has shape {list(leaf.shape)}; expected {list(shapes[owner])}, as its parameter"
            )
        return _reordered(leaf, orders[owner])

    def moved_params(key_path: KeyPath, leaf: Any) -> Any:
        path = _names(key_path)
        if path not in orders:
            return leaf
        if path[-1] == HOMES:
            # The argsort of a permutation is its inverse: it maps old places to new ones.
            return jnp.argsort(orders[path]).astype(leaf.dtype)[leaf]
        return _reordered(leaf, orders[path])

    return jax.tree.map_with_path(moved_params, params), jax.tree.map_with_path(moved_state, opt_state)


def _reordered(leaf: Any, order: Int[AnyArray, "E"]) -> Any:
    # An index on Explicit axes requires the sharding of the result.
    sharding = explicit_sharding(leaf) if isinstance(leaf, jax.Array) else None
    return leaf[order] if sharding is None else leaf.at[order].get(out_sharding=sharding)


def expert_bytes(params: PyTree, opt_state: PyTree) -> int:
    """Return the bytes of one expert in parameters and optimizer state, averaged over layers.

    Multiply it by `moved_experts` for the bytes moved by a relocation.

    Args:
        params: state of a model with `MoE` layers.
        opt_state: state of its optimizer; `()` counts the parameters alone.

    Returns:
        Bytes per expert and layer; 0 without `MoE` layers.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.nn import expert_bytes
        >>> layer = {"kernel": jnp.zeros((8, 4)), "up": jnp.zeros((4, 8, 16)), "down": jnp.zeros((4, 16, 8))}
        >>> expert_bytes(layer, ())
        1024
    """
    layers = list(_layers(params))
    owners = {(*layer, name) for layer in layers for name in WEIGHTS}
    total = 0
    for key_path, leaf in jax.tree.leaves_with_path((params, opt_state)):
        path = _names(key_path)
        if any(path[i:] in owners for i in range(len(path))):
            # Optimizer moments move with the weights, in their own dtype.
            total += leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    return total // max(1, len(layers))


def _layers(tree: PyTree) -> Iterator[Path]:
    """Yield the paths of the `MoE` layers in a tree, in order."""
    shapes = _shapes(tree)
    for path, shape in shapes.items():
        layer, up, down = path[:-1], shapes.get((*path[:-1], "up")), shapes.get((*path[:-1], "down"))
        if path[-1:] == ("kernel",) and up and down and len(up) == len(down) == 3 and shape[1:] == up[:1] == down[:1]:
            yield layer


def _shapes(tree: PyTree) -> dict[Path, tuple[int, ...]]:
    return {_names(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}


def _names(path: KeyPath) -> Path:
    """Return a key path as strings, without Flax's trailing `value` of a variable."""
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names[:-1] if names[-1:] == ("value",) else names


OF_ONE_MESH = (BalancerState, CodecState, GradientResidual)
"""Variables with one part per rank or group: they do not fit another mesh."""


def mesh_independent_state(model: Nodes) -> nnx.State:
    """Return the state of a model that any mesh can restore; save it with orbax or another library.

    It contains the parameters, routing biases, homes, running loads, optimizer state, and all variables of other
    layers. Their shapes do not depend on the number of ranks. To restore, create the model on the new mesh and load
    into the `restore_target` of its own `mesh_independent_state`. Then pass the result to
    `restore_mesh_independent_state`. See `docs/how-to/checkpoints.md` for an example.

    Args:
        model: an `MoE` layer or a module containing some, or a tuple of it and its `nnx.Optimizer`.

    Returns:
        The state without balancer and codec state.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> from jax_moe_lb.nn import mesh_independent_state
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> router, experts = TopK(2, selection_bias=True), ExpertConfig(16)
        >>> layer = MoE(8, 4, router, mesh=mesh, system="eplb", experts=experts, rngs=nnx.Rngs(0))
        >>> sorted(nnx.to_pure_dict(mesh_independent_state(layer))), "state" in nnx.to_pure_dict(nnx.state(layer))
        (['bias', 'down', 'gate', 'kernel', 'up'], True)
    """
    return nnx.state(model, nnx.Not(nnx.Any(*OF_ONE_MESH)))


def restore_target(state: States) -> States:
    """Return the shapes, dtypes and shardings into which orbax restores a state, or a tree of states.

    Arrays on a mesh keep their sharding. Arrays without a sharding of their own are replicated over the mesh: those of
    `nnx.Linear`, norms, embeddings and optimizer counts. Restored into their present sharding, they would be committed
    to one device, and a step would raise `Received incompatible devices`.

    Args:
        state: `mesh_independent_state` of a model on the new mesh, or `nnx.state` of one on the mesh of the checkpoint.

    Returns:
        The state with a `jax.ShapeDtypeStruct` in place of every array. Without an array on a mesh, all keep their
        sharding.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> from jax_moe_lb.nn import mesh_independent_state, restore_target
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> target = restore_target(mesh_independent_state((layer, nnx.Linear(8, 8, rngs=nnx.Rngs(0)))))
        >>> [tuple(target[i][name].get_value().sharding.spec) for i, name in ((0, "up"), (1, "kernel"))]
        [('expert', None, None), ()]
    """
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    meshes = [one.mesh for one in shardings if isinstance(one, NamedSharding)]
    everywhere = NamedSharding(max(meshes, key=lambda mesh: mesh.size), PartitionSpec()) if meshes else None

    def target(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if leaf.committed or everywhere is None else everywhere
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed: States = jax.tree.map(target, state)
    return placed


def restore_mesh_independent_state(model: Nodes, state: nnx.State) -> None:
    """Update a model on any mesh from a restored `mesh_independent_state`.

    The codec state is computed from the restored weights. The balancer state of `model` stays as it is.

    Args:
        model: model on the new mesh, or a tuple of it and its optimizer, updated in place.
        state: restored state, in the shardings of `restore_target(mesh_independent_state(model))`.

    Warns:
        UserWarning: a balancer with load history, such as `EPLB`, has none on a new model and balances little at
            first.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> from jax_moe_lb.nn import mesh_independent_state, restore_mesh_independent_state
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> experts = ExpertConfig(16)
        >>> one, other = (MoE(8, 4, TopK(2), mesh=mesh, experts=experts, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> restore_mesh_independent_state(other, mesh_independent_state(one))
        >>> bool((one.up[...] == other.up[...]).all())
        True
    """
    nnx.update(model, state)
    layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, MoE)]
    if any(jax.tree.leaves(layer.state) for layer in layers):
        warnings.warn("balancers that remember loads begin without any", stacklevel=2)
    for layer in layers:
        # The codec state belongs to the previous weights.
        layer.reset_codec()
