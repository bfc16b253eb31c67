"""What a layer tells of a microbatch, and what to do with it."""

from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.faults import Fault, is_of_rounds, raise_first


@pytree
class Stats:
    """Reports what happened in one layer and microbatch; equal on all ranks of the group.

    `moe` returns it without the leading dimensions, over which callers stack groups and layers.

    Args:
        counts: `[R, E]` int32, the token copies that each rank routed to each expert, without those dropped.
        dropped: int32, the token copies of the group that were dropped; 0 without a `capacity_factor`.
        quota: `[E, R]` int32, the token copies of each expert that each rank served.
        load_before: `[R]` int32, the token copies that each rank would serve under plain expert parallelism.
        load_after: `[R]` int32, the token copies that each rank served.
        imbalance_before: `max / mean` of `load_before`; 1 is level.
        imbalance_after: `max / mean` of `load_after`; up to the dispatch's headroom one round suffices.
        straggler_before: `max - mean` of `load_before`, in token copies.
        straggler_after: `max - mean` of `load_after`, in token copies.
        rounds: int32, how often the receive buffer was filled; 1 is usual, and more shows as time.
        rows_moved: int32, the token copies that were served by another rank than their own, one way.
        weight_bytes_moved: the bytes of expert weights that were copied into slots of other ranks.
        loss: the weighted sum of the router losses of a group; add `router_loss` of the statistics to the model's.
        fault: what was wrong, for `raise_fault`; nothing, where checks stop the program.
    """

    counts: Int[Array, "*D R E"]
    dropped: Int[Array, "*D"]
    quota: Int[Array, "*D E R"]
    load_before: Int[Array, "*D R"]
    load_after: Int[Array, "*D R"]
    imbalance_before: Float[Array, "*D"]
    imbalance_after: Float[Array, "*D"]
    straggler_before: Float[Array, "*D"]
    straggler_after: Float[Array, "*D"]
    rounds: Int[Array, "*D"]
    rows_moved: Int[Array, "*D"]
    weight_bytes_moved: Float[Array, "*D"]
    loss: Float[Array, "*D"]
    fault: Fault


def raise_fault(stats: Stats) -> None:
    """Raises on the host what was wrong in a step under `checks="deferred"`; does nothing where all was well.

    Call it once per step, on statistics that the step returned; it waits for the device. It reads one integer per layer
    and group, unless there is a fault.

    Args:
        stats: what one or several layers returned, also stacked over layers or steps.

    Raises:
        ValueError: there is a fault; the message is that of `checks="callback"`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from flax import nnx
        >>> from jax_moe_lb import TopK, Topology
        >>> from jax_moe_lb.nn import MoE
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(
        ...     8, 16, 4, TopK(2), mesh=mesh, topology=Topology.from_mesh(mesh), checks="deferred", rngs=nnx.Rngs(0)
        ... )
        >>> raise_fault(layer(jnp.ones((6, 8)))[1])
        >>> raise_fault(layer(jnp.full((6, 8), jnp.nan))[1])
        Traceback (most recent call last):
        ...
        ValueError: router logits of rank 0 give weights that are not finite; expected finite logits
    """
    raise_first(stats.fault)


def router_loss(stats: Stats) -> Float[Array, ""]:
    """Sums the router losses over layers, and takes their mean over groups; add it to the loss of the model.

    So the coefficients of `Losses` mean the same on every mesh: the loss of a model is a mean over tokens, and every
    group has as many. A sum over groups would multiply them by the number of groups.

    Args:
        stats: what `nn.MoE` returned, `[D]`, or several layers did, stacked, `[..., D]`. That of one call of `moe` is
            its own sum.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_moe_lb import Losses, TopK, router_loss
        >>> from jax_moe_lb.nn import MoE
        >>> mesh = jax.make_mesh(
        ...     (2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
        ... )
        >>> layer = MoE(8, 16, 4, TopK(4), mesh=mesh, losses=Losses(switch=1.0), rngs=nnx.Rngs(0))
        >>> round(float(router_loss(layer(jnp.ones((8, 8)))[1])), 3)  # experts are used evenly, in both groups
        1.0
    """
    return stats.loss if stats.loss.ndim == 0 else stats.loss.mean(-1).sum()


def needs_more_rounds(stats: Stats) -> bool:
    """Says on the host whether a step must be served again by a program with more rounds, and nothing else is wrong.

    Use it where a system has `max_rounds`, with a second program that has none: `examples/one_round.py`. It waits for
    the device, and reads one integer per layer and group. Layers behind one that could not be served got NaN; what is
    wrong with their routing does not count.

    Args:
        stats: what one or several layers returned, also stacked over layers or steps, in their order.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import Direct, System, TopK, Topology
        >>> from jax_moe_lb.nn import MoE
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(
        ...     8, 16, 4, TopK(1), mesh=mesh, topology=Topology.from_mesh(mesh), checks="deferred",
        ...     system=System(dispatch=Direct(max_rounds=1)), rngs=nnx.Rngs(0)
        ... )
        >>> needs_more_rounds(layer(jnp.ones((8, 8)))[1])  # equal tokens all go to one rank
        True
    """
    return is_of_rounds(stats.fault)
