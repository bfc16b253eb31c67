"""Variables of the Flax layer beside the parameters; optimizers do not update them, as they are no `nnx.Param`."""

from flax import nnx


class BalancerState(nnx.Variable):
    """Balancer state between steps."""


class RouterBias(nnx.Variable):
    """Routing bias per expert, `[E]` float32."""

    # `MoE.update_bias` updates it; it has no gradient.


class ExpertHomes(nnx.Variable):
    """Place per expert, `[E]` int32."""

    # `relocate` updates it; it has no gradient.


class RunningLoads(nnx.Variable):
    """Running mean of each expert's load, `[E]` float32."""

    # `MoE.update_loads` updates it.


class CodecState(nnx.Variable):
    """Decoded weights of each rank's expert domain, `[E * domain_size, ...]`."""

    # Every call of the layer updates them; they have no gradient.


class GradientResidual(nnx.Variable):
    """Entries of expert gradients not sent home yet, `[E * B, ...]` float32; see `GatherExpertDomain`.

    Differentiate with respect to it, beside the parameters, and pass the gradients to `keep_residuals`.
    """


def keep_residuals(model: nnx.Module, gradients: nnx.State) -> nnx.State:
    """Store the residuals computed by a backward pass in the layers, and return the other gradients.

    Call it after each backward pass of a model whose `Codec` encodes gradients. The gradient of a residual is its
    next value: entries that were not sent, in the units of these gradients. Skip the call if the step is skipped.

    Args:
        model: an `MoE` layer, or a module containing some.
        gradients: gradients with respect to `nnx.Any(nnx.Param, GradientResidual)`.

    Returns:
        The gradients of the parameters, for the optimizer.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK, Topology, plain
        >>> from jax_moe_lb.nn import GradientResidual, keep_residuals
        >>> from jax_moe_lb.transport import Codec, ExpertDomains, GatherExpertDomain, hybrid_mesh
        >>> auto, two = (jax.sharding.AxisType.Auto,), jax.devices()[:2]
        >>> devices = jax.make_mesh((2,), ("expert",), axis_types=auto, devices=two)
        >>> mesh = hybrid_mesh(devices, {"expert": 2})
        >>> domains = ExpertDomains.from_mesh(mesh, Topology.from_mesh(devices))
        >>> system = plain().replace(migrate=GatherExpertDomain(domains, Codec(gradient_ratio=50.0)))
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, system=system, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> trained = nnx.DiffState(0, nnx.Any(nnx.Param, GradientResidual))
        >>> gradients = nnx.grad(lambda layer: layer(jnp.ones((6, 8)))[0].sum(), argnums=trained)(layer)
        >>> sorted(nnx.to_pure_dict(keep_residuals(layer, gradients)))
        ['down', 'gate', 'kernel', 'up']
        >>> bool(abs(layer.residual[0][...]).max() > 0)
        True
    """
    residuals, others = nnx.split_state(gradients, GradientResidual, ...)
    nnx.update(model, residuals)
    return others
