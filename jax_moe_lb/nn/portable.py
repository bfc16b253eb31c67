"""What of a model any mesh can take over, and what belongs to the mesh that it was trained on."""

import warnings

import jax
from flax import nnx

from jax_moe_lb.nn.moe import BalancerState, KnownWeights, MoE

OF_ONE_MESH = (BalancerState, KnownWeights)
"""They have one part per rank or group, which another mesh has no use for."""


def portable(model: nnx.Module) -> nnx.State:
    """Returns the state of a model without what belongs to its mesh; save this, with orbax or anything else.

    It has parameters, routing biases, homes and running loads, whose shapes do not depend on the number of ranks. A
    restored tree of these fits any mesh: make the model there, restore to the shapes and shardings of its own
    `portable`, and give the result to `adopt`. `docs/how-to/checkpoints.md` is a whole example.

    Args:
        model: a module with `MoE` layers, or one of these.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb.nn import MoE, portable
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 16, 4, TopK(2), mesh=mesh, system="eplb", use_bias=True, rngs=nnx.Rngs(0))
        >>> sorted(nnx.to_pure_dict(portable(layer))), "state" in nnx.to_pure_dict(nnx.state(layer))
        (['bias', 'down', 'gate', 'kernel', 'up'], True)
    """
    return nnx.state(model, nnx.Not(nnx.Any(*OF_ONE_MESH)))


def adopt(model: nnx.Module, state: nnx.State) -> None:
    """Puts a restored `portable` state into a model of any mesh; what belongs to the mesh begins anew.

    Args:
        model: the model of this mesh. It is changed.
        state: what was restored, in the shardings of `portable(model)`.

    Warns:
        UserWarning: a balancer that remembers loads, such as `EPLB`, begins without any, and balances little until it
            has seen some.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb.nn import MoE, adopt, portable
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> one, other = (MoE(8, 16, 4, TopK(2), mesh=mesh, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        >>> adopt(other, portable(one))
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
