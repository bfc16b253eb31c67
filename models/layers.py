"""`scanned` runs equal layers as one loop, which is compiled once, whatever their number; `one_by_one` does not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from jax_moe_lb import CHECKPOINT_NAMES

KEPT = (*CHECKPOINT_NAMES, "attention")
"""What the backward pass of a layer is given beside the layer's input, by the names of `checkpoint_name`.

Nobody routes or plans again, and products of attention are not computed again. All else is.
"""

NARROWED = ("qkv", "out", "up", "down", "gate")
"""The weights of products in the compute dtype; routers and norms compute in float32."""


def one_by_one(layers: Sequence[Any], x: Array, remat: str = "none") -> tuple[Array, Any]:
    """Sends `x` through one layer after the other, each of which is compiled.

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
    """Sends `x` through one layer after the other, in a loop over their stacked parameters.

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

    def run(x: Array, state: nnx.State) -> tuple[Array, tuple[Any, nnx.State]]:
        layer: Any = nnx.merge(graphs[0], state)
        x, stats = layer(jax.lax.with_sharding_constraint(x, sharding))
        return x, (stats, nnx.state(layer, nnx.Not(nnx.Param)))

    # A loop's body stands alone: no expression of the forward pass is there to be shared.
    x, (stats, kept) = jax.lax.scan(computed_again(run, remat, prevent_cse=False), x, stacked)
    for i, layer in enumerate(layers):
        nnx.update(layer, jax.tree.map(lambda leaf, i=i: leaf[i], kept))
    return x, stats


def _narrowed(path: Any, leaves: Sequence[Array], x: Array) -> list[Array]:
    """Casts the leaves of a path, one of each layer, if they are weights that are used in the dtype of `x`."""
    names = {jax.tree_util.keystr((key,), simple=True) for key in path}
    return [leaf.astype(x.dtype) if names & set(NARROWED) else leaf for leaf in leaves]
