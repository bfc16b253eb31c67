"""Relocation of experts between ranks, and checkpoints that fit any mesh.

`relocate` moves experts, with all state that belongs to them, between two steps. `mesh_independent_state` and
`restore_mesh_independent_state` separate the state that any mesh can restore from the state of one mesh.
"""

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Int

from jax_moe_lb.core.types import AnyArray
from jax_moe_lb.core.validation import checked_permutation
from jax_moe_lb.kernels.experts import LOGICAL_AXES
from jax_moe_lb.nn.moe import BalancerState, CodecState, MoE

Params = TypeVar("Params")
OptState = TypeVar("OptState")
Path = tuple[str, ...]

WEIGHTS = tuple(LOGICAL_AXES)
"""These parameters of an `MoE` have one line per place; those of its router keep the order of experts."""

HOMES = "homes"


def relocate(params: Params, opt_state: OptState, permutation: Int[AnyArray, "layers E"]) -> tuple[Params, OptState]:
    """Moves the experts to new places, in parameters and optimizer state; what the model computes stays the same.

    Call it every so many steps with what `plan_relocation` returned. `MoE` layers are found by their paths: `kernel`
    `[H, E]` beside `up` and `down` `[E, ...]`. It permutes `up`, `down`, `gate` and their biases, and in the optimizer
    state every leaf whose path ends like that of one of them. `homes` follows, so the router's kernel, bias and running
    loads stay as they are.

    It is arithmetic on arrays, for `jax.jit`: give it `out_shardings` equal to the shardings of its arguments and
    donate them, and the compiler exchanges the experts between devices.

    Args:
        params: the state of a model, or a tree that holds one, whose `MoE` layers are `relocatable`.
        opt_state: the state of any optimizer that keeps one array per parameter.
        permutation: `[layers, E]` integers, layers in the order of their paths in `params`. What is traced is not
            checked here, but homes are where the layer uses them.

    Raises:
        ValueError: there are no layers, one has no homes, the permutation has another shape, or optimizer state has
            another shape than its parameter.

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
    if permutation.shape != (len(layers), num_experts):
        raise ValueError(
            f"permutation has shape {list(permutation.shape)}; "
            f"expected {[len(layers), num_experts]}, of the layers and their experts"
        )
    if not isinstance(permutation, jax.core.Tracer):
        checked_permutation("permutation", permutation, permutation.shape)
    orders: dict[Path, Any] = {}
    for layer, order in zip(layers, permutation, strict=True):
        if (*layer, HOMES) not in shapes:
            raise ValueError(f"{'.'.join(layer)} has no homes; expected an MoE made with relocatable=True")
        orders |= {(*layer, name): order for name in (*WEIGHTS, HOMES) if (*layer, name) in shapes}

    def moved_state(key_path: Any, leaf: Any) -> Any:
        path = _names(key_path)
        # An optimizer nests copies of the parameters' tree: the longest end of the path that is a parameter's counts.
        owner = next((path[i:] for i in range(len(path)) if path[i:] in orders), None)
        if owner is None:
            return leaf
        if leaf.shape != shapes[owner]:
            raise ValueError(
                f"{'.'.join(path)} has shape {list(leaf.shape)}; expected that of its parameter, {list(shapes[owner])}"
            )
        return leaf[orders[owner]]

    def moved_params(key_path: Any, leaf: Any) -> Any:
        path = _names(key_path)
        if path not in orders:
            return leaf
        if path[-1] == HOMES:
            # The argsort of a permutation is its inverse: where goes what was at place `p`.
            return jnp.argsort(orders[path]).astype(leaf.dtype)[leaf]
        return leaf[orders[path]]

    return jax.tree.map_with_path(moved_params, params), jax.tree.map_with_path(moved_state, opt_state)


def expert_bytes(params: Any, opt_state: Any) -> int:
    """Counts the bytes that one expert of a layer has in parameters and optimizer state, on average over layers.

    Multiply it by `moved_experts` to see what a relocation costs.

    Args:
        params: the state of a model with `MoE` layers.
        opt_state: the state of its optimizer; `()` counts the parameters alone.

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
            # Moments that an optimizer keeps travel with the weights, in their own dtype.
            total += leaf.size // leaf.shape[0] * leaf.dtype.itemsize
    return total // max(1, len(layers))


def _layers(tree: Any) -> Iterator[Path]:
    """Finds the paths of the `MoE` layers in a tree, in its order."""
    shapes = _shapes(tree)
    for path, shape in shapes.items():
        layer, up, down = path[:-1], shapes.get((*path[:-1], "up")), shapes.get((*path[:-1], "down"))
        if path[-1:] == ("kernel",) and up and down and len(up) == len(down) == 3 and shape[1] == up[0] == down[0]:
            yield layer


def _shapes(tree: Any) -> dict[Path, tuple[int, ...]]:
    return {_names(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}


def _names(path: Any) -> Path:
    """Writes a path as words, without the `value` in which Flax ends that of a variable."""
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return names[:-1] if names[-1:] == ("value",) else names


OF_ONE_MESH = (BalancerState, CodecState)
"""They have one part per rank or group, which another mesh has no use for."""


def mesh_independent_state(model: nnx.Module) -> nnx.State:
    """Returns the state of a model without what belongs to its mesh; save this, with orbax or anything else.

    It has parameters, routing biases, homes and running loads, whose shapes do not depend on the number of ranks. A
    restored tree of these fits any mesh: make the model there, restore to the shapes and shardings of its own
    `mesh_independent_state`, and give the result to `restore_mesh_independent_state`. `docs/how-to/checkpoints.md` is a
    whole example.

    Args:
        model: a module with `MoE` layers, or one of these.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb import MoE
        >>> from jax_moe_lb.nn import mesh_independent_state
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 16, 4, TopK(2), mesh=mesh, system="eplb", use_bias=True, rngs=nnx.Rngs(0))
        >>> sorted(nnx.to_pure_dict(mesh_independent_state(layer))), "state" in nnx.to_pure_dict(nnx.state(layer))
        (['bias', 'down', 'gate', 'kernel', 'up'], True)
    """
    return nnx.state(model, nnx.Not(nnx.Any(*OF_ONE_MESH)))


def restore_mesh_independent_state(model: nnx.Module, state: nnx.State) -> None:
    """Puts a restored `mesh_independent_state` state into a model of any mesh; what belongs to the mesh begins anew.

    Args:
        model: the model of this mesh. It is changed.
        state: what was restored, in the shardings of `mesh_independent_state(model)`.

    Warns:
        UserWarning: a balancer that remembers loads, such as `EPLB`, begins without any, and balances little until it
            has seen some.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb import MoE
        >>> from jax_moe_lb.nn import mesh_independent_state, restore_mesh_independent_state
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> one, other = (MoE(8, 16, 4, TopK(2), mesh=mesh, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> restore_mesh_independent_state(other, mesh_independent_state(one))
        >>> bool((one.up[...] == other.up[...]).all())
        True
    """
    nnx.update(model, state)
    layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, MoE)]
    if any(jax.tree.leaves(layer.state) for layer in layers):
        warnings.warn("balancers that remember loads begin without any", stacklevel=2)
    for layer in layers:
        # What ranks know of their expert domains is that of other weights.
        layer.tell_domains()
