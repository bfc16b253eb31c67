"""The Flax layer `MoE` as a Linen module."""

import inspect
from typing import Any

from flax import nnx

from jax_moe_lb.nn.moe import MoE


def as_linen(*args: Any, **kwargs: Any) -> nnx.bridge.ToLinen:
    """Return `MoE` as a Linen module, for use in Linen models.

    The balancer state and the routing bias are in the collections `BalancerState` and `RouterBias`. Make these
    collections mutable in `apply` if the layer has them.

    Args:
        *args: positional arguments of `MoE`.
        **kwargs: keyword arguments of `MoE`, without `rngs`.

    Returns:
        The Linen module; its `init` initializes the parameters.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import ExpertConfig, TopK, as_linen
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = as_linen(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16))
        >>> (y, stats), variables = layer.init_with_output(jax.random.key(0), jnp.ones((6, 8)))
        >>> y.shape, sorted(variables["params"])
        ((6, 8), ['down', 'gate', 'kernel', 'up'])
    """
    return nnx.bridge.to_linen(MoE, *args, **kwargs)


def _linen_signature() -> inspect.Signature:
    of_moe = inspect.signature(MoE.__init__)
    kept = [parameter for name, parameter in of_moe.parameters.items() if name not in {"self", "rngs"}]
    return of_moe.replace(parameters=kept, return_annotation=nnx.bridge.ToLinen)


# Show the signature of `MoE` in `help` and editors in place of `*args`.
as_linen.__signature__ = _linen_signature()  # type: ignore[attr-defined]
