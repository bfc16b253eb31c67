"""Statistics and faults of one layer and microbatch.

A `Fault` is an error code that the host reads after the step. A program can also stop at once through a host callback
(`validation.ensure`). On accelerators each such callback makes the host wait for the device in every layer. There the
program replaces bad values by harmless ones, and `raise_on_fault` raises the same message on the host.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.types import AnyArray, pytree
from jax_moe_lb.core.validation import check_homes, check_plan, check_routed

OnFault = Literal["raise", "record"]
"""What a program does about a fault: stop, by a callback to the host, or go on and say so in `Stats.fault`."""

NO_FAULT, ROUTING, HOMES, PLAN, ROUNDS = range(5)
"""The codes of faults. Of several the lowest is told, as the others may follow from it."""


@pytree
class Fault:
    """Holds what the checks of one layer and microbatch looked at, and what they found; equal on all ranks of a group.

    Read it with `raise_on_fault`.

    Args:
        code: int32, `NO_FAULT` (0) or which check failed.
        counts: `[R, E]` int32, the counts that the plan was made for.
        routed: `[R, 4]` int32, what each rank's router got wrong; see `validation.check_routed`.
        homes: `[E]` int32, the places of experts, or `None` where they never move.
        plan: the plan as the balancer made it. What was served is in `Stats`.
        dynamic: `[E]` booleans, which experts the plan may take from home; `None`: all.
        rounds: int32, the rounds that the plan needs.
        max_rounds: the rounds that the program has; `None` for as many as are needed.
    """

    code: Int[AnyArray, "*D"]
    counts: Int[AnyArray, "*D R E"]
    routed: Int[AnyArray, "*D R 4"]
    homes: Int[AnyArray, "*D E"] | None
    plan: Plan
    dynamic: Bool[AnyArray, "*D E"] | None
    rounds: Int[AnyArray, "*D"]
    max_rounds: Int[AnyArray, "*D"] | None


def fault_code(
    routing: Bool[Array, ""], homes: Bool[Array, ""], plan: Bool[Array, ""], rounds: Bool[Array, ""]
) -> Int[Array, ""]:
    """Computes the code of the first check that failed.

    Args:
        routing: whether the routing is right.
        homes: whether the places of experts are.
        plan: whether the plan is.
        rounds: whether the rounds suffice.
    """
    passed = ((ROUNDS, rounds), (PLAN, plan), (HOMES, homes), (ROUTING, routing))
    code = jnp.int32(NO_FAULT)
    for number, ok in passed:
        code = jnp.where(ok, code, jnp.int32(number))
    return code


def check_rounds(rounds: Any, max_rounds: Any) -> None:
    """Refuses a plan that needs more rounds than a program has.

    Args:
        rounds: how many it needs.
        max_rounds: how many there are.

    Raises:
        ValueError: it needs more.
    """
    if int(rounds) > int(max_rounds):
        raise ValueError(
            f"max_rounds is {int(max_rounds)}; expected at least the {int(rounds)} that the plan needs, "
            "more headroom, or None"
        )


def raise_first(fault: Fault) -> None:
    """Raises what the first check that failed says; does nothing where all passed.

    Args:
        fault: of any number of groups, layers and steps, stacked along leading dimensions.

    Raises:
        ValueError: there is a fault. The message says where, and names rank, expert and numbers.
    """
    codes = np.asarray(fault.code)
    if not codes.any():
        return
    where = tuple(int(i) for i in np.argwhere(codes)[0])
    one: Fault = jax.tree.map(lambda leaf: np.asarray(leaf)[where], fault)
    try:
        _check(one)
    except ValueError as error:
        raise ValueError(f"{_place(where, codes.shape)}{error}") from None
    raise RuntimeError(f"fault {int(one.code)} at {where} passes its check on the host; expected it to fail there too")


def is_of_rounds(fault: Fault) -> bool:
    """Says whether plans that need more rounds than the program has are all that is wrong, as far as can be seen.

    What such a layer returns is NaN, so that routers of the layers behind it are faulty, too: the first fault counts.

    Args:
        fault: of any number of groups, layers and steps, stacked along leading dimensions, in their order.
    """
    codes = np.asarray(fault.code).ravel()
    faulty = codes[codes != NO_FAULT]
    return bool(faulty.size and faulty[0] == ROUNDS and np.isin(faulty, (ROUTING, ROUNDS)).all())


def _check(fault: Fault) -> None:
    if fault.code == ROUTING:
        check_routed(fault.routed, fault.plan.num_experts)
    elif fault.code == HOMES:
        check_homes(fault.homes)
    elif fault.code == PLAN:
        check_plan(fault.plan, fault.counts, fault.dynamic)
    else:
        check_rounds(fault.rounds, fault.max_rounds)


def _place(where: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The last dimension is that of groups, as `nn.MoE` returns it, and those before are a caller's own."""
    names = [f"group {where[-1]} of {sizes[-1]}"] if where and sizes[-1] > 1 else []
    names = [f"entry {i}" for i in where[:-1]] + names
    return f"{', '.join(names)}: " if names else ""


@pytree
class Stats:
    """Reports what happened in one layer and microbatch; equal on all ranks of the group.

    `moe` returns it without the leading dimensions, over which callers stack groups and layers.

    Args:
        counts: `[R, E]` int32, the token copies that each rank routed to each expert, without those dropped.
        dropped: int32, the token copies of the group that were dropped; 0 if the router has no `capacity_factor`.
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
        fault: what was wrong, for `raise_on_fault`; nothing, where checks stop the program.
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


def raise_on_fault(stats: Stats) -> None:
    """Raises on the host what was wrong in a step under `on_fault="record"`; does nothing where all was well.

    Call it once per step, on statistics that the step returned; it waits for the device. It reads one integer per layer
    and group, unless there is a fault.

    Args:
        stats: what one or several layers returned, also stacked over layers or steps.

    Raises:
        ValueError: there is a fault; the message is that of `on_fault="raise"`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16), on_fault="record", rngs=nnx.Rngs(0))
        >>> raise_on_fault(layer(jnp.ones((6, 8)))[1])
        >>> raise_on_fault(layer(jnp.full((6, 8), jnp.nan))[1])
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
        >>> from jax_moe_lb import ExpertConfig, Losses, MoE, TopK, router_loss
        >>> mesh = jax.make_mesh(
        ...     (2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
        ... )
        >>> losses = Losses(switch=1.0)
        >>> layer = MoE(8, 4, TopK(4), mesh=mesh, experts=ExpertConfig(16), losses=losses, rngs=nnx.Rngs(0))
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
        >>> from jax_moe_lb import Buffers, ExpertConfig, MoE, TopK, plain
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(
        ...     8, 4, TopK(1), mesh=mesh, system=plain(Buffers(max_rounds=1)), experts=ExpertConfig(16),
        ...     on_fault="record", rngs=nnx.Rngs(0)
        ... )
        >>> needs_more_rounds(layer(jnp.ones((8, 8)))[1])  # equal tokens all go to one rank
        True
    """
    return is_of_rounds(stats.fault)
