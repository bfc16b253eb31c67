"""Statistics and faults of one layer and microbatch.

A `Fault` is an error code for the host to read after the step. The program replaces invalid values by harmless ones and
continues, and `raise_on_fault` raises on the host. An error raised inside a program would stop a device while others
wait for it, and later programs would fail, too.
"""

from dataclasses import field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.checks import check_value
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.types import AnyArray, namespace, pytree
from jax_moe_lb.core.validation import check_homes, check_plan, check_routed

NO_FAULT, ROUTING, HOMES, PLAN, ROUNDS = range(5)
"""Fault codes. The lowest of several is reported, because later faults may follow from it."""


@runtime_checkable
class HostErrors(Protocol):
    """Planner called on the host by a program, which keeps the error of the last failure."""

    def raise_error_of(self, plan: Plan) -> None:
        """Raise the error behind a plan, with the planner's own error as its cause; return if there is none."""


@pytree
class Fault:
    """Error code and inputs of the checks of one layer and microbatch, equal on all ranks of a group."""

    # Read it with `raise_on_fault`. `*D` denotes stacked leading dimensions.

    code: Int[AnyArray, "*D"]  # `NO_FAULT` (0) or the code of the first failed check
    counts: Int[AnyArray, "*D R E"]  # the counts of the plan
    routed: Int[AnyArray, "*D R 5"]  # routing errors of each rank; see `validation.check_routed`
    homes: Int[AnyArray, "*D E"] | None  # the place of each expert; `None` if experts never move
    plan: Plan  # plan of the balancer, before any replacement; `Stats` describes the executed plan
    dynamic: Bool[AnyArray, "*D E"] | None  # false for static experts; `None` if all experts are dynamic
    rounds: Int[AnyArray, "*D"]  # rounds needed by the plan
    max_rounds: Int[AnyArray, "*D"] | None  # maximum number of rounds of the program; `None` if unlimited
    # Planners of the balancer that run on the host, for the error of an illegal plan
    host_errors: tuple[HostErrors, ...] = field(default=(), metadata={"static": True})


def fault_code(
    routing: Bool[Array, ""], homes: Bool[Array, ""], plan: Bool[Array, ""], rounds: Bool[Array, ""]
) -> Int[Array, ""]:
    """Return the code of the first failed check."""
    passed = ((ROUNDS, rounds), (PLAN, plan), (HOMES, homes), (ROUTING, routing))
    code = jnp.int32(NO_FAULT)
    for number, ok in passed:
        code = jnp.where(ok, code, jnp.int32(number))
    return code


def check_rounds(rounds: Any, max_rounds: Any) -> None:
    """Check that the plan needs at most `max_rounds` rounds."""
    if int(rounds) > int(max_rounds):
        raise ValueError(
            f"max_rounds is {int(max_rounds)}; expected at least {int(rounds)}, the rounds of the plan. "
            "Increase max_rounds or headroom, or pass max_rounds=None."
        )


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("stats is traced; expected concrete arrays: return it from the jitted function")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        # Other processes have other groups. All processes read the same codes, so all of them get here.
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def _check(fault: Fault) -> None:
    if fault.code == ROUTING:
        check_routed(fault.routed, fault.plan.num_experts)
    elif fault.code == HOMES:
        check_homes(fault.homes)
    elif fault.code == PLAN:
        for planner in fault.host_errors:
            planner.raise_error_of(fault.plan)
        check_plan(fault.plan, fault.counts, fault.dynamic)
    else:
        check_rounds(fault.rounds, fault.max_rounds)


def _place(where: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """Return the index of a fault as text."""
    # The last dimension is the group, as in `nn.MoE`; the others are the caller's.
    names = [f"group {where[-1]} of {sizes[-1]}"] if where and sizes[-1] > 1 else []
    names = [f"entry {i}" for i in where[:-1]] + names
    return f"{', '.join(names)}: " if names else ""


@pytree
class Stats:
    """Statistics of one layer and microbatch, equal on all ranks of the group.

    `moe` returns it without the leading dimensions `*D`; callers stack groups and layers along these.

    Args:
        counts: `[*D, R, E]` int32, the token copies by source rank and expert, excluding dropped copies.
        dropped: `[*D]` int32, the token copies dropped in the group; 0 if the router has no `capacity_factor`.
        quota: `[*D, E, R]` int32, the token copies of each expert served by each rank.
        load_before: `[*D, R]` int32, the load under plain expert parallelism, in token copies.
        load_after: `[*D, R]` int32, the load under the plan, in token copies.
        imbalance_before: `[*D]`, `max / mean` of `load_before`; 1 is balanced.
        imbalance_after: `[*D]`, `max / mean` of `load_after`. One round suffices up to the dispatch's headroom.
        straggler_before: `[*D]`, `max - mean` of `load_before`, in token copies.
        straggler_after: `[*D]`, `max - mean` of `load_after`, in token copies.
        rounds: `[*D]` int32, fillings of the receive buffer; usually 1, and each further round takes more time.
        rows_moved: `[*D]` int32, the token copies served by another rank than their source, one way.
        weight_bytes_moved: `[*D]`, the bytes of expert weights copied into slots of other ranks.
        loss: `[*D]`, the weighted sum of the router losses of a group. Add `router_loss` of the statistics to the
            model's loss.
        fault: record for `raise_on_fault`.
        z_loss: `[*D]`, the part of `loss` from `Losses.z`; `None` (default) if this coefficient is 0.
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
    z_loss: Float[Array, "*D"] | None = None

    @property
    def of_group(self) -> "Stats":
        """The same statistics with a leading dimension of one group.

        Return them from your own `jax.shard_map`, with `PartitionSpec(topology.data_axes)` in its `out_specs`.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from jax.sharding import AxisType, PartitionSpec
            >>> from jax_moe_lb import Experts, MoEParams, TopK, Topology, moe, plain
            >>> axes = {"axis_names": ("data", "expert"), "axis_types": (AxisType.Auto,) * 2}
            >>> mesh = jax.make_mesh((2, 2), **axes, devices=jax.devices()[:4])
            >>> topology = Topology.from_mesh(mesh)
            >>> params = MoEParams(jnp.eye(4), Experts(jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4))))
            >>> layer = lambda x: moe(x, params, TopK(1), plain(), topology)[1].of_group
            >>> specs = {"in_specs": PartitionSpec(("data", "expert")), "out_specs": PartitionSpec(topology.data_axes)}
            >>> jax.jit(jax.shard_map(layer, mesh=mesh, **specs))(jnp.ones((8, 4))).rounds.tolist()
            [2, 2]
        """
        return jax.tree.map(lambda leaf: leaf[None], self)

    @property
    def overload_factor(self) -> Float[AnyArray, "*D"]:
        """`[*D]`, `max / mean` of the ranks' load as served: the name in Megatron-LM of `imbalance_after`."""
        return self.imbalance_after

    @property
    def max_violation(self) -> Float[AnyArray, "*D"]:
        """`[*D]`, MaxVio: `(max - mean) / mean` of the token copies routed to each expert; 0 without tokens.

        A balancer does not change it, because it depends on the router alone.

        Reference: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (arXiv 2408.15664),
        with the copies of one microbatch and group.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> from flax import nnx
            >>> from jax.sharding import AxisType
            >>> from jax_moe_lb import ExpertConfig, MoE, TopK
            >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
            >>> layer = MoE(8, 4, TopK(1), mesh=mesh, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
            >>> _, stats = layer(jnp.ones((8, 8)))  # equal tokens select one expert of four
            >>> stats.max_violation.tolist(), stats.overload_factor.tolist() == stats.imbalance_after.tolist()
            ([3.0], True)
        """
        copies = self.counts.sum(-2).astype(self.imbalance_after.dtype)
        mean = copies.mean(-1)
        xp = namespace(copies)
        return xp.where(mean > 0, copies.max(-1) / xp.where(mean > 0, mean, 1) - 1, xp.zeros_like(mean))


def raise_on_fault(stats: Stats) -> None:
    """Raise the error of the first fault of a step, if any.

    Call it once per step on the statistics returned by the jitted step; it waits for the device. Without a fault it
    reads one integer per layer and group. If the arrays span processes, all processes must call it.

    Args:
        stats: statistics of one or several layers, optionally stacked over layers or steps.

    Raises:
        ValueError: there is a fault. The message names its index, the rank, the expert and the numbers. If the planner
            of a `HostCallback` failed in this process, its error is the cause.
        TypeError: `stats` is traced.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import AxisType
        >>> from flax import nnx
        >>> from jax_moe_lb import ExpertConfig, MoE, TopK
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> layer = MoE(8, 4, TopK(2), mesh=mesh, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> step = nnx.jit(lambda layer, x: layer(x))
        >>> raise_on_fault(step(layer, jnp.ones((6, 8)))[1])
        >>> raise_on_fault(step(layer, jnp.full((6, 8), jnp.nan))[1])
        Traceback (most recent call last):
        ...
        ValueError: router logits of rank 0 give weights that are not finite; expected finite logits
    """
    check_value("stats", stats, Stats)
    codes = _on_host(stats.fault.code)
    if not codes.any():
        return
    where = tuple(int(i) for i in np.argwhere(codes)[0])
    one: Fault = jax.tree.map(lambda leaf: _on_host(leaf)[where], stats.fault)
    try:
        _check(one)
    except ValueError as error:
        raise ValueError(f"{_place(where, codes.shape)}{error}") from error.__cause__
    raise RuntimeError(f"fault {int(one.code)} at {where} passes its check on the host; expected it to fail there too")


def raise_if_concrete(stats: Stats) -> None:
    """Raise the error of the first fault outside of JAX transformations; inside, return."""
    if not isinstance(stats.fault.code, jax.core.Tracer):
        raise_on_fault(stats)


def router_loss(stats: Stats) -> Float[Array, ""]:
    """Return the router losses, summed over layers and averaged over groups.

    Add the result to the loss of the model. The mean over groups makes the coefficients of `Losses` independent of the
    mesh: the model's loss is a mean over tokens, and all groups have equally many. A sum would scale with the number of
    groups.

    Args:
        stats: statistics of `nn.MoE`, with leading dimensions `[D]`, or of several layers, stacked to `[..., D]`.
            Statistics of one `moe` call have no leading dimension; their loss is returned unchanged.

    Returns:
        Scalar of the dtype of `stats.loss`.

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
    check_value("stats", stats, Stats)
    return stats.loss if stats.loss.ndim == 0 else stats.loss.mean(-1).sum()


def needs_more_rounds(stats: Stats) -> bool:
    """Return whether a step failed only by exceeding `max_rounds`.

    Use it with a system with `max_rounds` and a second program without: repeat the step with the second program, as in
    `examples/one_round.py`. It runs on the host, waits for the device, and reads one integer per layer and group.
    Layers after the failed one get NaN inputs; their routing faults are ignored.

    Args:
        stats: statistics of one or several layers, optionally stacked over layers or steps in execution order.

    Returns:
        True if the step must be repeated with more rounds.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax.sharding import AxisType
        >>> from jax_moe_lb import Buffers, ExpertConfig, MoE, TopK, plain
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> system = plain(Buffers(max_rounds=1))
        >>> layer = MoE(8, 4, TopK(1), mesh=mesh, system=system, experts=ExpertConfig(16), rngs=nnx.Rngs(0))
        >>> step = nnx.jit(lambda layer, x: layer(x))
        >>> needs_more_rounds(step(layer, jnp.ones((8, 8)))[1])  # equal tokens all go to one rank
        True
    """
    check_value("stats", stats, Stats)
    codes = _on_host(stats.fault.code).ravel()
    faulty = codes[codes != NO_FAULT]
    return bool(faulty.size and faulty[0] == ROUNDS and np.isin(faulty, (ROUTING, ROUNDS)).all())
