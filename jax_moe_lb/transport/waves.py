"""`serve_in_waves` runs both waves of `Staged`, forward and backward, beside what plans and copies.

The order in which things depend on each other: `post` and wave 1 need the load alone; then `plan_and_copy`, which
passes on wave 1; then, with the plan, `address`; then `join` and wave 2.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.balancers.base import Balancer
from jax_moe_lb.experts import Experts
from jax_moe_lb.faults import Checks
from jax_moe_lb.ops._peer import Route
from jax_moe_lb.ops.grouped_ffn import grouped_ffn, grouped_ffn_gradients
from jax_moe_lb.ops.plan_and_copy import plan_and_copy, post
from jax_moe_lb.ops.ragged_all_to_all import unwritten
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.native import NativePlanner
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.copies import Weights, combine, sum_of_copies, weights_by_token
from jax_moe_lb.transport.direct import Direct, DirectReceipt
from jax_moe_lb.transport.dispatch import Routed, served_plan
from jax_moe_lb.transport.exchange import Copies
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import Batch, RowWeights, gradient_rounds, no_gradients, serve_rounds
from jax_moe_lb.transport.wave_receipts import Dynamic, Waves, address_dynamic, address_static
from jax_moe_lb.types import GroupSizes, Rows, Tokens, iota, wide_dtype


class Ways(NamedTuple):
    """Says how things travel and how the plan is made: the static arguments of `serve_in_waves`, which are hashable.

    Args:
        direct: the dispatch by which tokens travel.
        replicate: the replication by which weights travel.
        planner: what makes the plan when wave 1 is on its way, and between whom weights are then copied; `None` where
            the plan is there already.
        topology: its expert axes are the ranks that both travel between.
        checks: what to do about a plan that is not legal, or needs more rounds than there are.
    """

    direct: Direct
    replicate: Replicate
    planner: tuple[NativePlanner, Route] | None
    topology: Topology
    checks: Checks

    @classmethod
    def of(
        cls,
        direct: Direct,
        balancer: Balancer,
        replicate: Replicate,
        plan: Plan,
        topology: Topology,
        checks: Checks,
    ) -> "Ways":
        """Chooses the ways, with a planner where one can run beside wave 1.

        That is so where it is all that the balancer does, copies may follow at once, and there are slots to fill.

        Args:
            direct: the dispatch by which tokens travel.
            balancer: it edits the plan.
            replicate: the replication by which weights travel.
            plan: the plan from which the planner starts.
            topology: its expert axes are the ranks that both travel between.
            checks: what to do about a bad plan.
        """
        planner, route = balancer.native_planner(plan.domain), replicate.route(topology)
        if planner is None or route is None or plan.slots == plan.num_home or route.domain is not None:
            return cls(direct, replicate, None, topology, checks)
        return cls(direct, replicate, (planner, route), topology, checks)


class Outcome(NamedTuple):
    """Holds what `serve_in_waves` did, beside the outputs.

    Args:
        plan: the plan that was served, which is legal.
        made: the plan that was made.
        waves: who sent what where.
        is_legal: whether the two are one.
        is_whole: whether all rounds that the plan needs were served.
    """

    plan: Plan
    made: Plan
    waves: Waves
    is_legal: Bool[Array, ""]
    is_whole: Bool[Array, ""]


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def serve_in_waves(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: Ways
) -> tuple[Tokens, Outcome]:
    """Brings every copy of every token to its expert, wherever the plan puts it, and sums the outputs of each token.

    Kept for the backward pass are tokens, home weights, plan and receipts. It makes no plan but replays this one, in
    the same two waves: weights are copied again, beside the first, and gradients of replicas are added at home.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        experts: the `L` home experts of this rank.
        routed: which experts the tokens go to, with what weights, and the counts of all ranks.
        dynamic: `[E]`, which experts the plan may take from home; equal on all ranks.
        plan: the plan, or with a planner the plan that it starts from.
        ways: how all of them travel.

    Returns:
        `[T, H]`, the weighted sums of the experts' outputs; how they came about.
    """

    # Where microbatches are mapped over, one follows the other: `post`, the copies that it began and `join` belong
    # together.
    @jax.custom_batching.sequential_vmap
    def serve(tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan) -> tuple[Tokens, Outcome]:
        return _serve(tokens, experts, routed, dynamic, plan, ways)

    return serve(tokens, experts, routed, dynamic, plan)


def _serve(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: Ways
) -> tuple[Tokens, Outcome]:
    direct, replicate, _, topology, checks = ways
    static = address_static(direct, routed.experts, routed.counts, dynamic, topology)
    static, static_is_whole = direct.within_rounds(static, checks)
    pending: Any
    if ways.planner is not None:
        planner, route = ways.planner
        # Every exchange of wave 1 reads this, so `post` comes before them.
        first, posted = post(plan.placement, plan.quota, experts, static.first_sent, planner=planner, route=route)
        out = _first_wave(tokens, experts, replace(static, first_sent=first), routed.experts, ways)
        # It takes the outputs of wave 1 so that it is launched after it; the plan is made from what `post` had.
        out, tables, pending = plan_and_copy(posted, out)
        made = replace(plan, placement=tables[0], quota=tables[1])
        plan, is_legal = served_plan(made, routed.counts, dynamic, checks)
    else:
        made = plan
        plan, is_legal = served_plan(made, routed.counts, dynamic, checks)
        # Started before wave 1 is computed, and joined after it, so that copy engines can work beside its products.
        pending = _start(experts, plan, ways)
        out = _first_wave(tokens, experts, static, routed.experts, ways)
    waves = address_dynamic(direct, routed.experts, routed.counts, dynamic, plan, static, topology)
    moving, is_whole = direct.within_rounds(waves.dynamic, checks)
    waves = replace(waves, dynamic=moving)
    slots = None if pending is None else replicate.join(pending, out)
    with jax.named_scope("dynamic_wave"):
        anywhere = partial(_by_home_and_slots, experts, slots)
        out = serve_rounds(tokens, routed.experts.shape[1], waves.dynamic, anywhere, out, direct, topology)
    return combine(out, routed.weights, waves.dynamic), Outcome(plan, made, waves, is_legal, is_whole & static_is_whole)


def _first_wave(
    tokens: Tokens, experts: Experts, receipt: DirectReceipt, chosen: Int[Array, "T K"], ways: Ways
) -> Copies:
    """Computes the outputs of the static copies, which need home weights alone."""
    with jax.named_scope("static_wave"):
        nothing = unwritten(tokens, chosen.size)
        at_home = partial(_by_home_and_slots, experts, None)
        return serve_rounds(tokens, chosen.shape[1], receipt, at_home, nothing, ways.direct, ways.topology)


def _by_home_and_slots(home: Experts, slots: Experts | None, rows: Rows, group_sizes: GroupSizes) -> Rows:
    """Applies home experts and then replicas to their rows, without a copy of the home weights beside the replicas."""
    num_home = home.up.shape[0]
    out = grouped_ffn(rows, home, group_sizes[:num_home])
    if slots is None:
        return out
    shift = group_sizes[:num_home].sum(dtype=jnp.int32)
    # Groups must start at row 0, so the rows of replicas are rolled there and back.
    moved = _rolled(grouped_ffn(_rolled(rows, shift), slots, group_sizes[num_home:]), -shift)
    return _before(shift, out, moved)


def _before(shift: Int[Array, ""], first: Rows, second: Rows) -> Rows:
    """Returns the first's rows before `shift`, and from there on the second's."""
    return jnp.where((iota(first.shape[0]) < shift)[:, None], first, second)


def _rolled(rows: Rows, shift: Int[Array, ""]) -> Rows:
    """Returns the rows from `shift` on, then those before."""
    return rows[(iota(rows.shape[0]) + shift) % rows.shape[0]]


def _start(experts: Experts, plan: Plan, ways: Ways) -> Any:
    return None if plan.slots == plan.num_home else ways.replicate.start(experts, plan, ways.topology)


# ---- backward ----------------------------------------------------------------------


Saved = tuple[Tokens, Weights, Experts, Plan, Waves]


def _save(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: Ways
) -> tuple[tuple[Tokens, Outcome], Saved]:
    out, outcome = serve_in_waves(tokens, experts, routed, dynamic, plan, ways)
    return (out, outcome), (tokens, routed.weights, experts, outcome.plan, outcome.waves)


def _backward(ways: Ways, saved: Saved, gradients: tuple[Tokens, Any]) -> tuple[Tokens, Experts, Routed, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: Saved, upstream: Tokens) -> tuple[Tokens, Weights, Experts]:
        return _gradients(ways, saved, upstream)

    of_tokens, of_weights, of_experts = pull_back(saved, gradients[0])
    none: Any = None  # Choices and counts are integers, which have no gradients.
    return of_tokens, of_experts, Routed(none, none, of_weights), None, None


def _gradients(ways: Ways, saved: Saved, upstream: Tokens) -> tuple[Tokens, Weights, Experts]:
    """Computes the gradients of tokens, their weights and the home experts, in the same two waves again."""
    tokens, weights, experts, plan, waves = saved
    ways = ways._replace(replicate=ways.replicate.again())
    # Without the barrier XLA sees that the forward pass made the same replicas and sent the same rows, and keeps those
    # until now instead. It ties them to the gradients, which do not exist before the backward pass has come here.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    pending = _start(experts, plan, ways)
    # Both waves stand in one order.
    rounds = partial(gradient_rounds, Batch(tokens, weights, upstream), waves.dynamic)
    how = ways.direct, ways.topology
    with jax.named_scope("static_wave"):
        at_home = partial(_gradients_by_home_and_slots, experts, None)
        first = rounds(waves.static, at_home, no_gradients(tokens, weights), *how)
    slots = None if pending is None else ways.replicate.join(pending, first)
    with jax.named_scope("dynamic_wave"):
        anywhere = partial(_gradients_by_home_and_slots, experts, slots)
        (of_copies, of_weights), (home, moved) = rounds(waves.dynamic, anywhere, first[0], *how)
    home = jax.tree.map(jnp.add, first[1][0], home)
    if moved is not None:
        home = ways.replicate.add_at_home(home, moved, plan, ways.topology)
    per_token, home = weights.shape[1], jax.tree.map(lambda g, w: g.astype(w.dtype), home, experts)
    of_tokens = sum_of_copies(of_copies, waves.dynamic, per_token)
    return of_tokens, weights_by_token(of_weights, waves.dynamic, per_token), home


serve_in_waves.defvjp(_save, _backward)


def _gradients_by_home_and_slots(
    home: Experts,
    slots: Experts | None,
    rows: Rows,
    weights: RowWeights,
    group_sizes: GroupSizes,
    upstream: Rows,
) -> tuple[Rows, RowWeights, tuple[Experts, Experts | None]]:
    """Computes the gradients of `_by_home_and_slots`, in the same two parts."""
    num_home, wide = home.up.shape[0], wide_dtype(rows)
    out, of_weights, of_home = grouped_ffn_gradients(rows, weights, home, group_sizes[:num_home], upstream, wide)
    if slots is None:
        return out, of_weights, (of_home, None)
    shift = group_sizes[:num_home].sum(dtype=jnp.int32)
    rows, weights, upstream = (_rolled(array, shift) for array in (rows, weights, upstream))
    moved, of_moved, of_slots = grouped_ffn_gradients(rows, weights, slots, group_sizes[num_home:], upstream, wide)
    out, of_weights = _before(shift, out, _rolled(moved, -shift)), _before(shift, of_weights, _rolled(of_moved, -shift))
    return out, of_weights, (of_home, of_slots)
