"""`moe` is the one executor: it goes from routing to counts to plan to weights to tokens to experts and back."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.balancers.base import LayerCost
from jax_moe_lb.core.manual_axes import varying_axes
from jax_moe_lb.core.plan import Plan, imbalance, load, plain_plan, straggler, traffic
from jax_moe_lb.core.stats import Fault, OnFault, Stats, fault_code
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens, iota, pytree, wide_dtype
from jax_moe_lb.core.validation import check_homes, check_routed, ensure
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.more_routers import capacity, within_capacity
from jax_moe_lb.routing.routers import (
    NO_EXPERT,
    Router,
    RouterFunction,
    Routing,
    TokenInfo,
    mask_tokens,
    router_options,
    tokens_per_expert,
)
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.exchange import RoutingWeights

TOKEN_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)
"""What tokens may be; the custom calls and the kernels of accelerators have no form for others."""

CHECKPOINT_NAMES = ("moe_routing", "moe_plan")
"""The names of intermediates for `jax.checkpoint_policies`: the routing, and the plan with where each copy goes.

A layer keeps no copies and no outputs of experts, with or without a policy. Give these names to `save_only_these_names`
to keep a few integers per token, so that a layer inside `jax.checkpoint` neither routes nor plans again.
"""


@pytree
class MoEParams:
    """Parameters of `moe`.

    Args:
        router: `[H, E]`, the kernel from tokens to router logits, equal on all ranks.
        experts: the `L` home experts of this rank; over `tensor_axes` of the topology a shard of their inner width.
        logit_bias: `[E]`, learned, added to the router logits; `None` (default) adds none.
        selection_bias: `[E]`, added to the router's scores for the choice of experts alone, and not learned; `None`
            (default) adds none. `routing.updated_bias` computes the next one.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import Experts, MoEParams
        >>> params = MoEParams(jnp.zeros((8, 4)), Experts(jnp.zeros((4, 8, 16)), jnp.zeros((4, 16, 8))))
        >>> len(jax.tree.leaves(params))
        3
    """

    router: Float[Array, "H E"]
    experts: Experts
    logit_bias: Float[Array, "E"] | None = None
    selection_bias: Float[Array, "E"] | None = None


@pytree
class MoEState:
    """State of `moe` between steps, which optimizers do not touch.

    Args:
        balancer: the state of `system.balancer`, from its `init` or the last call; `()` (default) for balancers
            without.
        homes: `[E]` int32, the place of each of the router's experts: slot `p % L` of rank `p // L`. Statistics number
            experts by place. `None` (default): expert `e` is at place `e`.

    Examples:
        >>> from jax_moe_lb import MoEState, Topology, systems
        >>> system, topology = systems.eplb(), Topology.flat(8)
        >>> MoEState(system.balancer.init((8, 64))).homes is None
        True
    """

    balancer: State = ()
    homes: Int[Array, "E"] | None = None


def moe(
    x: Tokens,
    params: MoEParams,
    router: RouterFunction,
    system: System,
    topology: Topology,
    state: MoEState = MoEState(),
    tokens: TokenInfo = TokenInfo(),
    losses: Losses = Losses(),
    on_fault: OnFault = "raise",
) -> tuple[Tokens, Stats, MoEState]:
    """Compute a mixture-of-experts layer on one rank; call it inside `jax.shard_map`.

    Values and gradients equal those of a dense mixture of experts, for any plan. `nn.MoE` calls it with arrays of the
    whole mesh; call `moe` in a `jax.shard_map` of your own.

    Args:
        x: `[T, H]`, tokens of this rank; bfloat16, float32 or float64.
        params: weights of the router and of this rank's home experts.
        router: `TopK`, another router of `jax_moe_lb.routing`, or a function like them.
        system: balancer, weight transport and token dispatch, such as `exact()`. If it has `migrate`, `moe` gathers the
            experts of the expert domain from `params.experts` first.
        topology: return value of `Topology.from_mesh`, with the axes that `x` varies over.
        state: initial state, or the one that the last call returned.
        tokens: mask, ids, random key and sequence length of the tokens.
        losses: coefficients of the router losses; 0 by default.
        on_fault: action on bad values, such as a logit that is not finite or an illegal plan. "raise" (default) stops
            the program on all ranks, by a callback to the host. "record", usual on accelerators, calls no host: the
            layer computes what is right, and `raise_on_fault` of the statistics raises on the host. See
            `docs/pipeline.md`.

    Returns:
        Outputs `[T, H]`, statistics and the state for the next call.

    Raises:
        ValueError: shapes do not match each other or the topology, or a bias that the router requires is missing. With
            `on_fault="raise"`, bad values stop the program with an error of the same form.

    Examples:
        >>> from jax.sharding import AxisType, PartitionSpec
        >>> from jax_moe_lb import TopK, greedy
        >>> mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> topology, ranks, whole = Topology.from_mesh(mesh), PartitionSpec("expert"), PartitionSpec()
        >>> layer = lambda x, kernel, experts: moe(x, MoEParams(kernel, experts), TopK(1), greedy(1), topology)[0]
        >>> run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(ranks, whole, ranks), out_specs=ranks))
        >>> run(jnp.ones((8, 4)), jnp.eye(4), Experts(jnp.ones((4, 4, 8)), jnp.ones((4, 8, 4)))).shape
        (8, 4)
    """
    kernel, homes = params.router, state.homes
    experts = params.experts if system.migrate is None else system.migrate(params.experts)
    options = router_options(router)
    _check_arguments(x, params, experts, options, topology)
    info = rank_tokens(tokens, x.shape[0], topology)
    routing = route(x, kernel, router, info, params.selection_bias, params.logit_bias)
    factor = options.capacity_factor
    limit = None if factor is None else capacity(factor, routing.experts.size, kernel.shape[1])
    counted = count(routing, kernel.shape[1], topology, on_fault, limit)
    routed, is_homed = permute_to_homes(counted, routing.weights, homes, on_fault)
    # One rank alone has all experts at home.
    num_slots = experts.up.shape[0] + (system.replica_slots if topology.num_ranks > 1 else 0)
    start = plain_plan(routed.counts, topology, num_slots)
    served, balancer = _served(x, routed, experts, start, state.balancer, system, topology, on_fault)
    max_rounds = system.dispatch.buffers.max_rounds
    y = _outputs(served, homes, is_homed, max_rounds, topology, on_fault)
    loss = losses(routing, counted.asked, topology.expert_axes, tokens.sequence_length)
    fault = _fault(counted, routed.counts, homes, is_homed, served, max_rounds)
    dropped = (counted.asked - counted.counts).sum(dtype=jnp.int32)
    stats = _stats(routed.counts, dropped, start, served.plan, served.rounds, experts, loss, fault)
    return y, stats, MoEState(balancer, homes)


def rank_tokens(tokens: TokenInfo, num_tokens: int, topology: Topology) -> TokenInfo:
    """Return the properties of this rank's tokens for its router.

    Args:
        tokens: the argument of `moe`.
        num_tokens: `T`.
        topology: its expert axes give the position of this rank's first token in the group.
    """
    key = tokens.key
    if key is not None:
        # Fold in the rank index so that each rank samples different noise.
        key = jax.random.fold_in(key, jax.lax.axis_index(topology.data_axes + topology.expert_axes))
    return replace(tokens, key=key, first=jax.lax.axis_index(topology.expert_axes) * num_tokens)


@jax.named_scope("route")
def route(
    x: Tokens,
    kernel: Float[Array, "H E"],
    router: RouterFunction,
    info: TokenInfo,
    bias: Float[Array, "E"] | None = None,
    logit_bias: Float[Array, "E"] | None = None,
) -> Routing:
    """Asks the router for the experts and weights of this rank's tokens, in float32 at least.

    Args:
        x: `[T, H]`, this rank's tokens.
        kernel: `[H, E]`, the router's weights, equal on all ranks.
        router: `TopK`, `ForceBalanced` or a callable like them.
        info: what else the router may know. Padding tokens, where its mask is false, get `NO_EXPERT`.
        bias: `[E]`, added to the scores when experts are chosen.
        logit_bias: `[E]`, added to the logits.
    """
    if info.mask is not None:
        # Padding may hold anything: NaN times the zero gradient of its logits would be NaN in the kernel's gradient.
        x = jnp.where(info.mask[:, None], x, 0)
    # Logits that differ in their last bits choose other experts, so they are computed wide and at full precision,
    # which accelerators do not give by default.
    dtype = wide_dtype(x)
    logits = jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision=jax.lax.Precision.HIGHEST)
    if logit_bias is not None:
        logits += logit_bias.astype(dtype)[None]
    routing = router(logits, bias, info)
    routing = routing if info.mask is None else mask_tokens(routing, info.mask)
    return checkpoint_name(routing, "moe_routing")


class RoutingCounts(NamedTuple):
    """Holds the routing that is right, and what is wrong with the rest.

    Args:
        experts: `[T, K]` int32, the expert of each copy of this rank; tokens whose routing is wrong get `NO_EXPERT`.
        counts: `[R, E]` int32, the copies that each rank routes to each expert; equal on all ranks.
        asked: `[R, E]` int32, the same before any were dropped.
        wrong: `[R, 4]` int32, what `validation.check_routed` reads; equal on all ranks.
        ok: whether nothing is wrong; always, under checks that stop the program.
    """

    experts: Int[Array, "T K"]
    counts: Counts
    asked: Counts
    wrong: Int[Array, "R 4"]
    ok: Bool[Array, ""]


@jax.named_scope("count")
def count(
    routing: Routing, num_experts: int, topology: Topology, on_fault: OnFault, capacity: int | None = None
) -> RoutingCounts:
    """Gathers the counts of this microbatch, equal on all ranks.

    Every rank also tells what its router got wrong, so that all of them stop or none does.

    Args:
        routing: what `route` returned on this rank. Its weights stay as they are, so that outputs of logits that are
            not finite are not finite either.
        num_experts: `E`.
        topology: its expert axes are the ranks that count together.
        on_fault: what to do where something is wrong.
        capacity: how many copies an expert takes from a rank; `None`: all.
    """
    valid = (routing.experts >= NO_EXPERT) & (routing.experts < num_experts)
    finite = jnp.isfinite(routing.weights)
    experts = jnp.where(valid & finite, routing.experts, NO_EXPERT)
    # The range of bad ids is enough for a message, and has a fixed size. Good ones count as 0, which no bad id is.
    bad_ids = jnp.where(valid, 0, routing.experts).reshape(-1)
    lowest, highest = bad_ids.min(initial=0), bad_ids.max(initial=0)
    wrong = jnp.stack([(~valid).sum(dtype=jnp.int32), lowest, highest, (~finite.all()).astype(jnp.int32)])
    mine = jnp.concatenate([tokens_per_expert(experts.reshape(1, -1), num_experts)[0], wrong])
    # One all-gather for counts and errors: a second collective would cost as much again, for four integers.
    table = jax.lax.all_gather(mine, topology.expert_axes, to="invarying")
    asked, wrong = table[:, :num_experts], table[:, num_experts:]
    ok = (wrong[:, 0] == 0).all() & (wrong[:, 3] == 0).all()
    if on_fault == "raise":
        # `ensure` returns 0 or stops the program. Added to the counts, it is neither dropped as unused nor late.
        asked = asked + ensure(ok, check_routed, wrong, np.int32(num_experts))
    if capacity is None:
        return RoutingCounts(experts, asked, asked, wrong, ok)
    return RoutingCounts(
        within_capacity(experts, num_experts, capacity), jnp.minimum(asked, capacity), asked, wrong, ok
    )


@jax.named_scope("at_homes")
def permute_to_homes(
    counted: RoutingCounts, weights: RoutingWeights, homes: Int[Array, "E"] | None, on_fault: OnFault
) -> tuple[Routed, Bool[Array, ""]]:
    """Renumbers experts and counts by place; the router keeps its own numbers, so ties, groups and losses stay.

    Args:
        counted: what `count` returned.
        weights: `[T, K]`, the router's, which stay as they are.
        homes: `[E]` int32, the place of each expert, a permutation; `None`: expert `e` is at place `e`.
        on_fault: what to do about other values. Under "record" experts then stay where they were at first, which are
            others, so `moe` makes outputs NaN.

    Returns:
        Both by place, and whether `homes` is a permutation.
    """
    if homes is None:
        return Routed(counted.experts, counted.counts, weights), jnp.bool_(True)
    # A permutation sorts to 0, 1, 2, ...; anything else would give two experts one place.
    ok = (jnp.sort(homes) == iota(homes.shape[0])).all()
    safe = jnp.where(ok, homes, iota(homes.shape[0]))
    counts = counted.counts[:, jnp.argsort(safe)]
    if on_fault == "raise":
        counts = counts + ensure(ok, check_homes, homes)
    places = jnp.where(counted.experts < 0, NO_EXPERT, safe[jnp.maximum(counted.experts, 0)])
    return Routed(places, counts, weights), ok


def vary_like_tokens(experts: Experts, topology: Topology) -> Experts:
    """Returns the experts as different values on each data shard: the transpose sums their gradients over the shards.

    Args:
        experts: the home experts of this rank, which are equal on all data shards.
        topology: its data axes are the shards.
    """

    def vary(leaf: Array) -> Array:
        # Gathered over some of these axes, they already differ over them.
        axes = tuple(axis for axis in topology.data_axes if axis not in varying_axes(leaf))
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return jax.tree.map(vary, experts)


def _served(
    x: Tokens,
    routed: Routed,
    experts: Experts,
    start: Plan,
    state: State,
    system: System,
    topology: Topology,
    on_fault: OnFault,
) -> tuple[Served, State]:
    x, weights, experts = on_tensor_shards(x, routed.weights, vary_like_tokens(experts, topology), topology)
    return system.dispatch.serve(
        x,
        routed._replace(weights=weights),
        experts,
        start,
        state,
        balancer=system.balancer.sized(_facts(x, weights, experts)),
        replicate=system.replicate,
        topology=topology,
        on_fault=on_fault,
    )


def _facts(x: Tokens, weights: RoutingWeights, experts: Experts) -> LayerCost:
    # All of it is static: shapes and dtypes.
    expert_bytes = experts.nbytes // experts.up.shape[0]
    return LayerCost(
        num_copies=weights.size,
        expert_bytes=expert_bytes,
        gradient_bytes=expert_bytes,
        token_bytes=x.shape[1] * x.dtype.itemsize,
        token_flops=2 * expert_bytes // experts.up.dtype.itemsize,
    )


def _outputs(
    served: Served,
    homes: Int[Array, "E"] | None,
    is_homed: Bool[Array, ""],
    max_rounds: int | None,
    topology: Topology,
    on_fault: OnFault,
) -> Tokens:
    # Every tensor shard has served all copies by its part of the hidden activations. Outputs are summed where they are
    # fewest, after a token's copies have become one.
    y = jax.lax.psum(served.outputs, topology.tensor_axes) if topology.tensor_axes else served.outputs
    if on_fault == "record" and (homes is not None or max_rounds is not None):
        # Copies that were not served, or by other experts, are no outputs, and nobody shall take them for such.
        y = jnp.where(served.is_whole & is_homed, y, jnp.nan)
    return y


def on_tensor_shards(
    x: Tokens, weights: RoutingWeights, experts: Experts, topology: Topology
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Returns what a tensor shard serves by: the transpose sums gradients of tokens and weights over the shards.

    Args:
        x: `[T, H]`, the tokens, equal on all tensor shards.
        weights: `[T, K]`, likewise.
        experts: this shard's part of the home experts.
        topology: its tensor axes are the shards.
    """
    if not topology.tensor_axes:
        return x, weights, experts
    if experts.down_bias is not None:
        # Outputs are summed over the shards, and their bias shall be in the sum once.
        first = jax.lax.axis_index(topology.tensor_axes) == 0
        experts = replace(experts, down_bias=jnp.where(first, experts.down_bias, 0))
    x, weights = (jax.lax.pcast(array, topology.tensor_axes, to="varying") for array in (x, weights))
    return x, weights, experts


def _stats(
    counts: Counts,
    dropped: Int[Array, ""],
    before: Plan,
    after: Plan,
    rounds: Int[Array, ""],
    experts: Experts,
    loss: Float[Array, ""],
    fault: Fault,
) -> Stats:
    moved = traffic(after, counts)
    load_before, load_after = load(before), load(after)
    expert_bytes = experts.nbytes // after.num_home
    return Stats(
        counts=counts,
        dropped=dropped,
        quota=after.quota,
        load_before=load_before,
        load_after=load_after,
        imbalance_before=imbalance(load_before),
        imbalance_after=imbalance(load_after),
        straggler_before=straggler(load_before),
        straggler_after=straggler(load_after),
        rounds=rounds,
        rows_moved=moved.rows,
        # In floating point, since a rack moves more than 2^31 bytes.
        weight_bytes_moved=moved.replicas.astype(jnp.float32) * expert_bytes,
        loss=loss,
        fault=fault,
    )


def _fault(
    counted: RoutingCounts,
    counts: Counts,
    homes: Int[Array, "E"] | None,
    is_homed: Bool[Array, ""],
    served: Served,
    max_rounds: int | None,
) -> Fault:
    return Fault(
        code=fault_code(counted.ok, is_homed, served.is_legal, served.is_whole),
        counts=counts,
        routed=counted.wrong,
        homes=homes,
        plan=served.made,
        dynamic=served.dynamic,
        rounds=served.rounds,
        max_rounds=None if max_rounds is None else jnp.int32(max_rounds),
    )


def _check_arguments(x: Tokens, params: MoEParams, experts: Experts, options: Router, topology: Topology) -> None:
    if not topology.expert_axes:
        raise ValueError("topology has no expert_axes; expected one made by Topology.from_mesh")
    if x.dtype not in TOKEN_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; expected bfloat16, float32 or float64")
    for name in ("logit_bias", "selection_bias"):
        if getattr(options, name) and getattr(params, name) is None:
            raise ValueError(f"params.{name} is None; expected [E], as router.{name} is True")
    width, num_experts = params.router.shape
    home, experts_width, _ = experts.up.shape
    if home * topology.num_ranks != num_experts:
        raise ValueError(
            f"experts holds {home} experts on each of {topology.num_ranks} ranks; "
            f"expected {num_experts} in all, those of the router's kernel"
        )
    if x.shape[-1] != width or experts_width != width:
        raise ValueError(
            f"x has width {x.shape[-1]} and experts.up {experts_width}; expected that of the router's kernel, {width}"
        )
