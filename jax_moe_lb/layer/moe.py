"""The executor `moe`: routing, counts, plan, replication, dispatch, expert networks and combine, in this order."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import vary_like, varying_axes
from jax_moe_lb.core.plan import Plan, imbalance, load, plain_plan, straggler, traffic
from jax_moe_lb.core.stats import Fault, Stats, fault_code
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, State, Tokens, as_int32, iota, pytree
from jax_moe_lb.layer.arguments import check_arguments, check_axes, check_types
from jax_moe_lb.layer.facts import layer_facts
from jax_moe_lb.layer.route import rank_tokens, route
from jax_moe_lb.layer.systems import System
from jax_moe_lb.routing.capacity import capacity, within_capacity
from jax_moe_lb.routing.losses import Losses
from jax_moe_lb.routing.routers import (
    NO_EXPERT,
    ROUTING_NAME,
    RouterFunction,
    Routing,
    TokenInfo,
    TopK,
    router_options,
    scale_inputs,
    tokens_per_expert,
)
from jax_moe_lb.transport.dispatch import Routed, Served
from jax_moe_lb.transport.exchange import RoutingWeights

CHECKPOINT_NAMES = (ROUTING_NAME, "moe_plan")
"""Names of intermediates for `jax.checkpoint_policies`: the routing, and the plan with the destination per copy.

Pass these names to `save_only_these_names` to save a few integers per token. A layer inside `jax.checkpoint` then
neither routes nor plans again. The layer saves no expert outputs. With `Saved` it also saves token copies, replicas or
hidden activations: add the names "moe_dispatched_rows", "moe_replicas" and "moe_hidden" to the policy. `Once` and
`Forward` save the slots and weights of the choices that a rank receives, named "moe_choices".
"""


@pytree
class MoEParams:
    """Parameters of `moe`.

    Args:
        router: `[H, E]`, router kernel from tokens to logits, equal on all ranks.
        experts: the `L` home experts of this rank; on each shard of the topology's `tensor_axes` a part of their inner
            width.
        logit_bias: `[E]`, learned bias of the router logits; `None` (default) for none.
        selection_bias: `[E]`, bias of the router scores for expert selection, not learned; `None` (default) for none.
            `routing.updated_bias` computes its next value.

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


@overload
def moe(
    x: Tokens,
    params: MoEParams,
    router: RouterFunction,
    system: System,
    topology: Topology,
    state: MoEState = ...,
    tokens: TokenInfo = ...,
    losses: Losses = ...,
    return_routing: Literal[False] = ...,
) -> tuple[Tokens, Stats, MoEState]: ...


@overload
def moe(
    x: Tokens,
    params: MoEParams,
    router: RouterFunction,
    system: System,
    topology: Topology,
    state: MoEState = ...,
    tokens: TokenInfo = ...,
    losses: Losses = ...,
    *,
    return_routing: Literal[True],
) -> tuple[Tokens, Stats, MoEState, Int[Array, "T K"]]: ...


@overload
def moe(
    x: Tokens,
    params: MoEParams,
    router: RouterFunction,
    system: System,
    topology: Topology,
    state: MoEState = ...,
    tokens: TokenInfo = ...,
    losses: Losses = ...,
    return_routing: bool = ...,
) -> tuple[Any, ...]: ...


def moe(
    x: Tokens,
    params: MoEParams,
    router: RouterFunction,
    system: System,
    topology: Topology,
    state: MoEState = MoEState(),
    tokens: TokenInfo = TokenInfo(),
    losses: Losses = Losses(),
    return_routing: bool = False,
) -> tuple[Tokens, Stats, MoEState] | tuple[Tokens, Stats, MoEState, Int[Array, "T K"]]:
    """Compute a mixture-of-experts layer on one rank; call it inside `jax.shard_map`.

    Values and gradients equal those of a dense mixture of experts, for any plan. `nn.MoE` calls it for a whole mesh.

    Args:
        x: `[T, H]`, tokens of this rank; bfloat16, float32 or float64.
        params: weights of the router and of this rank's home experts.
        router: `TopK`, another router of `jax_moe_lb.routing`, or a function like them.
        system: balancer, weight transport and token dispatch, such as `exact()`. `dispatch_by_rule` replaces
            `AutoDispatch`, the default dispatch. If the system has `migrate`, `moe` gathers the experts of the expert
            domain from `params.experts` first.
        topology: return value of `Topology.from_mesh`, with the mesh axes over which `x` varies.
        state: initial state, or the state returned by the last call.
        tokens: mask, ids, random key, segments and given experts of the tokens.
        losses: coefficients of the router losses; 0 by default.
        return_routing: if True, also return the experts per token, for `TokenInfo.experts`; False by default.

    Returns:
        Outputs `[T, H]`, statistics and the state for the next call; with `return_routing` also the experts `[T, K]`
        int32 chosen by the router or given, -1 for none. No value stops the program. After a fault, such as
        a logit that is not finite or an illegal plan, the layer computes the valid part, and `raise_on_fault` of the
        statistics raises on the host; see `docs/pipeline.md`.

    Raises:
        ValueError: shapes do not match, the call is outside of `jax.shard_map`, or a required bias is missing.
        TypeError: an argument has another type.

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
    check_types(x=(x, Array), params=(params, MoEParams), system=(system, System), topology=(topology, Topology))
    check_types(state=(state, MoEState), tokens=(tokens, TokenInfo), losses=(losses, Losses))
    check_axes(x, topology)
    check_arguments(x, params, router, system.migrate, topology, state.homes, tokens)
    kernel, homes = params.router, None if state.homes is None else as_int32(state.homes)
    experts = params.experts if system.migrate is None else system.migrate(params.experts)
    options = router_options(router)
    info = rank_tokens(tokens, x.shape[0], topology)
    routing = route(x, kernel, router, info, params.selection_bias, params.logit_bias)
    if options.scale_inputs:
        x, routing = scale_inputs(x, routing)
    # Here, because the routing of a function gives `K`.
    per_token, factor = getattr(router, "num_experts_per_tok", routing.experts.shape[1]), options.capacity_factor
    limit = None if factor is None else capacity(factor, x.shape[0] * per_token, kernel.shape[1])
    system = system.by_rule(topology, kernel.shape[1], per_token, jax.ShapeDtypeStruct(x.shape, x.dtype))
    system = _for_router(system, router, homes, kernel.shape[1], topology)
    excess = system.dispatch.excess_nodes(_places(routing.experts, homes), kernel.shape[1], topology)
    counted = count(routing, kernel.shape[1], topology, limit, excess)
    routed, is_homed = permute_to_homes(counted, homes)
    # One rank alone has all experts at home.
    num_slots = experts.up.shape[0] + (system.replica_slots if topology.num_ranks > 1 else 0)
    start = plain_plan(routed.counts, topology, num_slots)
    served, balancer = _served(x, routed, experts, start, state.balancer, system, topology)
    max_rounds = system.dispatch.buffers.max_rounds
    y = _outputs(served, homes, is_homed, max_rounds, topology)
    loss = losses.with_z(routing, counted.asked, topology, tokens)
    fault = _fault(counted, routed.counts, homes, is_homed, served, system)
    stats = _stats(counted, routed.counts, start, served, experts, loss=loss, fault=fault)
    # All leaves vary over the same mesh axes: one entry of `out_specs` fits all.
    stats = vary_like(stats, stats)
    after = MoEState(balancer, state.homes)
    return (y, stats, after, routing.experts) if return_routing else (y, stats, after)


class RoutingCounts(NamedTuple):
    """Valid routing of a microbatch, and errors of the rest."""

    experts: Int[Array, "T K"]  # expert of each copy of this rank; `NO_EXPERT` for copies with invalid routing
    # Weights of the router; not finite for copies with invalid routing, so that their outputs are not finite
    weights: RoutingWeights
    counts: Counts  # copies by source rank and expert; equal on all ranks
    asked: Counts  # counts before the capacity limit
    wrong: Int[Array, "R 5"]  # errors of each rank for `validation.check_routed`; equal on all ranks
    ok: Bool[Array, ""]  # whether the routing of all ranks is valid


@jax.named_scope("count")
def count(
    routing: Routing,
    num_experts: int,
    topology: Topology,
    capacity: int | None = None,
    excess: Int[Array, "T"] | None = None,
) -> RoutingCounts:
    """Gather the counts of this microbatch, equal on all ranks, with the routing errors per rank."""
    valid = (routing.experts >= NO_EXPERT) & (routing.experts < num_experts)
    finite = jnp.isfinite(routing.weights)
    excess = jnp.zeros_like(routing.experts[:, 0]) if excess is None else excess
    fits = (excess == 0)[:, None]
    experts = jnp.where(valid & finite & fits, routing.experts, NO_EXPERT)
    # An output of 0 would be a silent loss of the token.
    weights = jnp.where(valid & fits, routing.weights, jnp.nan)
    # The range of invalid ids has a fixed size and suffices for a message. Valid ids count as 0, which is never
    # invalid.
    bad_ids = jnp.where(valid, 0, routing.experts).reshape(-1)
    lowest, highest = bad_ids.min(initial=0), bad_ids.max(initial=0)
    num_bad, not_finite = (~valid).sum(dtype=jnp.int32), (~finite.all()).astype(jnp.int32)
    wrong = jnp.stack([num_bad, lowest, highest, not_finite, excess.max(initial=0)])
    mine = jnp.concatenate([tokens_per_expert(experts.reshape(1, -1), num_experts)[0], wrong])
    # One all-gather for counts and errors: a second collective would cost as much for five integers.
    table = jax.lax.all_gather(mine, topology.expert_axes, to="invarying")
    asked, wrong = table[:, :num_experts], table[:, num_experts:]
    ok = (wrong[:, (0, 3, 4)] == 0).all()
    if capacity is None:
        return RoutingCounts(experts, weights, asked, asked, wrong, ok)
    experts = within_capacity(experts, num_experts, capacity)
    return RoutingCounts(experts, weights, jnp.minimum(asked, capacity), asked, wrong, ok)


def _for_router(
    system: System, router: RouterFunction, homes: Int[Array, "E"] | None, num_experts: int, topology: Topology
) -> System:
    """Return the system with a dispatch for the groups of the router, if these are at home in order."""
    # Other routers may choose experts outside of the groups, such as `ForceBalanced`.
    limit = router.group_limit if type(router) is TopK and homes is None else None
    if limit is None:
        return system
    nodes = topology.num_ranks // topology.levels[-1].size
    return replace(system, dispatch=system.dispatch.limited_to(limit.max_nodes(num_experts, nodes)))


def _places(experts: Int[Array, "T K"], homes: Int[Array, "E"] | None) -> Int[Array, "T K"]:
    """Return the place per expert; invalid ids stay so."""
    if homes is None:
        return experts
    valid = (experts >= 0) & (experts < homes.shape[0])
    return jnp.where(valid, homes[jnp.where(valid, experts, 0)], NO_EXPERT)


@jax.named_scope("at_homes")
def permute_to_homes(counted: RoutingCounts, homes: Int[Array, "E"] | None) -> tuple[Routed, Bool[Array, ""]]:
    """Renumber experts and counts from expert to place; the router keeps expert numbers for ties, groups and losses."""
    # Returns routing and counts by place, and whether `homes` is a permutation. Otherwise experts are at their initial
    # places, and `moe` sets the outputs to NaN.
    if homes is None:
        return Routed(counted.experts, counted.counts, counted.weights), jnp.bool_(True)
    # A sorted permutation is 0, 1, 2, ...; otherwise two experts would share a place.
    ok = (jnp.sort(homes) == iota(homes.shape[0])).all()
    safe = jnp.where(ok, homes, iota(homes.shape[0]))
    counts = counted.counts[:, jnp.argsort(safe)]
    places = jnp.where(counted.experts < 0, NO_EXPERT, safe[jnp.maximum(counted.experts, 0)])
    return Routed(places, counts, counted.weights), ok


def vary_like_tokens(experts: Experts, topology: Topology) -> Experts:
    """Mark the experts as varying over data and tensor shards; the transpose sums their gradients over the shards."""

    def vary(leaf: Array) -> Array:
        # Experts gathered over or sharded by some of these axes already vary over them.
        axes = tuple(axis for axis in topology.data_axes + topology.tensor_axes if axis not in varying_axes(leaf))
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
) -> tuple[Served, State]:
    x, weights, experts = on_tensor_shards(x, routed.weights, vary_like_tokens(experts, topology), topology)
    return system.dispatch.serve(
        x,
        routed._replace(weights=weights),
        experts,
        start,
        state,
        balancer=system.balancer.sized(layer_facts(x, weights, experts, start.slots, system, topology)),
        replicate=system.replicate,
        topology=topology,
    )


def _outputs(
    served: Served,
    homes: Int[Array, "E"] | None,
    is_homed: Bool[Array, ""],
    max_rounds: int | None,
    topology: Topology,
) -> Tokens:
    # Each tensor shard computes with its part of the inner width. Sum over shards after combine: one row per token is
    # less than `K` copies.
    y = jax.lax.psum(served.outputs, topology.tensor_axes) if topology.tensor_axes else served.outputs
    if homes is not None or max_rounds is not None:
        # Replace outputs of unserved copies or wrong experts by NaN.
        y = jnp.where(served.is_whole & is_homed, y, jnp.nan)
    return y


def on_tensor_shards(
    x: Tokens, weights: RoutingWeights, experts: Experts, topology: Topology
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Mark tokens and weights as varying over the tensor shards; the transpose sums their gradients over the shards."""
    if not topology.tensor_axes:
        return x, weights, experts
    if experts.down_bias is not None:
        # The outputs are summed over the shards, so only one shard may add the bias.
        first = jax.lax.axis_index(topology.tensor_axes) == 0
        experts = replace(experts, down_bias=jnp.where(first, experts.down_bias, 0))
    x, weights = (jax.lax.pcast(array, topology.tensor_axes, to="varying") for array in (x, weights))
    return x, weights, experts


def _stats(
    counted: RoutingCounts,
    counts: Counts,
    before: Plan,
    served: Served,
    experts: Experts,
    *,
    loss: tuple[Float[Array, ""], Float[Array, ""] | None],
    fault: Fault,
) -> Stats:
    after = served.plan
    moved = traffic(after, counts)
    load_before, load_after = load(before), load(after)
    expert_bytes = experts.nbytes // after.num_home
    return Stats(
        counts=counts,
        dropped=(counted.asked - counted.counts).sum(dtype=jnp.int32),
        quota=after.quota,
        load_before=load_before,
        load_after=load_after,
        imbalance_before=imbalance(load_before),
        imbalance_after=imbalance(load_after),
        straggler_before=straggler(load_before),
        straggler_after=straggler(load_after),
        rounds=served.rounds,
        rows_moved=moved.rows,
        # In float32: a rack moves more than 2^31 bytes, and one expert may have as many.
        weight_bytes_moved=moved.replicas.astype(jnp.float32) * float(expert_bytes),
        loss=loss[0],
        fault=fault,
        z_loss=loss[1],
    )


def _fault(
    counted: RoutingCounts,
    counts: Counts,
    homes: Int[Array, "E"] | None,
    is_homed: Bool[Array, ""],
    served: Served,
    system: System,
) -> Fault:
    max_rounds = system.dispatch.buffers.max_rounds
    return Fault(
        code=fault_code(counted.ok, is_homed, served.is_legal, served.is_whole),
        counts=counts,
        routed=counted.wrong,
        homes=homes,
        plan=served.made,
        dynamic=served.dynamic,
        rounds=served.rounds,
        max_rounds=None if max_rounds is None else jnp.int32(max_rounds),
        host_errors=system.balancer.host_errors,
    )
