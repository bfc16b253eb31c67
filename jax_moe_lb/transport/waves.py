"""`serve_in_waves` runs both waves of `Staged`, forward and backward, beside what plans and copies.

The order in which things depend on each other: `post` and wave 1 need the load alone; then `plan_and_copy`, which
passes on wave 1; then, with the plan, `address`; then `join` and wave 2.
"""

from collections.abc import Callable
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
from jax_moe_lb.plan import Plan
from jax_moe_lb.planners.native import NativePlanner
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.direct import Direct, DirectReceipt
from jax_moe_lb.transport.dispatch import Routed, served_plan
from jax_moe_lb.transport.exchange import Copies, unwritten
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import further_rounds, to_sending_order
from jax_moe_lb.transport.wave_receipts import Dynamic, Waves, address_dynamic, address_static
from jax_moe_lb.types import GroupSizes, Rows, Tokens, iota


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
        if planner is None or route is None or plan.slots == plan.num_home:
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
) -> tuple[Copies, Outcome]:
    """Brings every copy of every token to its expert, wherever the plan puts it, and the outputs back.

    Kept for the backward pass are tokens, home weights, plan and receipts. It makes no plan but replays this one, in
    the same two waves: weights are copied again, beside the first, and gradients of replicas are added at home.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        experts: the `L` home experts of this rank.
        routed: which experts the tokens go to, and the counts of all ranks.
        dynamic: `[E]`, which experts the plan may take from home; equal on all ranks.
        plan: the plan, or with a planner the plan that it starts from.
        ways: how all of them travel.

    Returns:
        The experts' outputs in the sending order of both waves, anything for copies that go nowhere; how they came
        about.
    """

    # Where microbatches are mapped over, one follows the other: `post`, the copies that it began and `join` belong
    # together.
    @jax.custom_batching.sequential_vmap
    def serve(tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan) -> tuple[Copies, Outcome]:
        return _serve(tokens, experts, routed, dynamic, plan, ways)

    return serve(tokens, experts, routed, dynamic, plan)


def _serve(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: Ways
) -> tuple[Copies, Outcome]:
    direct, replicate, _, topology, checks = ways
    static = address_static(direct, *routed, dynamic, topology)
    static, static_is_whole = direct.within_rounds(static, checks)
    pending: Any
    if ways.planner is not None:
        planner, route = ways.planner
        # Every exchange of wave 1 reads this, so `post` comes before them.
        first, posted = post(plan.placement, plan.quota, experts, static.first_sent, route=route)
        out = _first_wave(tokens, experts, replace(static, first_sent=first), ways)
        # It takes the outputs of wave 1 so that it is launched after it; it plans from what `post` had.
        out, tables, pending = plan_and_copy(posted, out, planner=planner)
        made = replace(plan, placement=tables[0], quota=tables[1])
        plan, is_legal = served_plan(made, routed.counts, dynamic, checks)
    else:
        made = plan
        plan, is_legal = served_plan(made, routed.counts, dynamic, checks)
        # Started before wave 1 is computed, and joined after it, so that copy engines can work beside its products.
        pending = _start(experts, plan, ways)
        out = _first_wave(tokens, experts, static, ways)
    waves = address_dynamic(direct, *routed, dynamic, plan, static, topology)
    moving, is_whole = direct.within_rounds(waves.dynamic, checks)
    waves = replace(waves, dynamic=moving)
    slots = None if pending is None else replicate.join(pending, out)
    with jax.named_scope("dynamic_wave"):
        copies = to_sending_order(tokens, waves.dynamic, routed.experts.shape[1])
        out = _rounds(copies, waves.dynamic, partial(_by_home_and_slots, experts, slots), out, ways)
    return out, Outcome(plan, made, waves, is_legal, is_whole & static_is_whole)


def _per_tok(receipt: DirectReceipt, tokens: Tokens) -> int:
    """`K`; where there is no token any number will do."""
    return receipt.order.size // max(tokens.shape[0], 1) or 1


def _first_wave(tokens: Tokens, experts: Experts, receipt: DirectReceipt, ways: Ways) -> Copies:
    """Computes the outputs of the static copies, which need home weights alone."""
    with jax.named_scope("static_wave"):
        copies = to_sending_order(tokens, receipt, _per_tok(receipt, tokens))
        nothing = unwritten(copies, copies.shape[0])
        return _rounds(copies, receipt, lambda rows, sizes: grouped_ffn(rows, experts, sizes), nothing, ways)


def _rounds(
    copies: Copies, receipt: DirectReceipt, ffn: Callable[[Rows, GroupSizes], Rows], out: Copies, ways: Ways
) -> Copies:
    """Writes the outputs of one wave into `out`."""
    direct, topology = ways.direct, ways.topology

    def one_round(i: Array, out: Copies) -> Copies:
        rows, group_sizes = direct.send(copies, receipt, i, topology)
        return direct.send_back(ffn(rows, group_sizes), receipt, i, out, topology)

    return further_rounds(receipt, direct, one_round, one_round(jnp.int32(0), out))


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


Saved = tuple[Tokens, Experts, Plan, Waves]


def _save(
    tokens: Tokens, experts: Experts, routed: Routed, dynamic: Dynamic, plan: Plan, ways: Ways
) -> tuple[tuple[Copies, Outcome], Saved]:
    out, outcome = serve_in_waves(tokens, experts, routed, dynamic, plan, ways)
    return (out, outcome), (tokens, experts, outcome.plan, outcome.waves)


def _backward(ways: Ways, saved: Saved, gradients: tuple[Copies, Any]) -> tuple[Tokens, Experts, None, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: Saved, upstream: Copies) -> tuple[Tokens, Experts]:
        return _gradients(ways, saved, upstream)

    return *pull_back(saved, gradients[0]), None, None, None


def _gradients(ways: Ways, saved: Saved, upstream: Copies) -> tuple[Tokens, Experts]:
    """Computes the gradients of the tokens and of the home experts, in the same two waves again."""
    tokens, experts, plan, waves = saved
    ways = ways._replace(replicate=ways.replicate.again())
    # Without the barrier XLA sees that the forward pass made the same replicas and sent the same rows, and keeps those
    # until now instead. It ties them to the gradients, which do not exist before the backward pass has come here.
    tokens, experts, upstream = jax.lax.optimization_barrier((tokens, experts, upstream))
    per_tok = _per_tok(waves.dynamic, tokens)
    copies, by_token = jax.vjp(lambda tokens: to_sending_order(tokens, waves.dynamic, per_tok), tokens)
    pending = _start(experts, plan, ways)

    def at_home(rows: Rows, group_sizes: GroupSizes, upstream: Rows) -> tuple[Rows, Experts]:
        return grouped_ffn_gradients(rows, experts, group_sizes, upstream)

    with jax.named_scope("static_wave"):
        first = _gradient_rounds(copies, upstream, waves.static, at_home, unwritten(copies, copies.shape[0]), ways)
    slots = None if pending is None else ways.replicate.join(pending, first)
    with jax.named_scope("dynamic_wave"):
        anywhere = partial(_gradients_by_home_and_slots, experts, slots)
        copy_gradients, (home, moved) = _gradient_rounds(copies, upstream, waves.dynamic, anywhere, first[0], ways)
    home = jax.tree.map(jnp.add, first[1], home)
    if moved is not None:
        home = jax.tree.map(jnp.add, home, ways.replicate.sum_at_home(moved, plan, ways.topology))
    return *by_token(copy_gradients), jax.tree.map(lambda g, w: g.astype(w.dtype), home, experts)


serve_in_waves.defvjp(_save, _backward)


def _gradient_rounds(
    copies: Copies,
    upstream: Copies,
    receipt: DirectReceipt,
    pull_back: Callable[[Rows, GroupSizes, Rows], tuple[Rows, Any]],
    copy_gradients: Copies,
    ways: Ways,
) -> tuple[Copies, Any]:
    """Writes the gradients of one wave's copies into `copy_gradients`, and returns with them those of its experts.

    Every round sends the copies again, and the gradients of their outputs.
    """
    direct, topology = ways.direct, ways.topology

    def gradients_of(i: Array, copy_gradients: Copies) -> tuple[Copies, Any]:
        rows, group_sizes = direct.send(copies, receipt, i, topology)
        row_upstream, _ = direct.send(upstream, receipt, i, topology)
        row_gradients, gradients = pull_back(rows, group_sizes, row_upstream)
        return direct.send_back(row_gradients, receipt, i, copy_gradients, topology), gradients

    def one_round(i: Array, carry: tuple[Copies, Any]) -> tuple[Copies, Any]:
        copy_gradients, gradients = gradients_of(i, carry[0])
        # In float32 at least: sums over rounds, and over replicas, would lose small addends in bfloat16.
        return copy_gradients, jax.tree.map(jnp.add, carry[1], gradients)

    return further_rounds(receipt, direct, one_round, gradients_of(jnp.int32(0), copy_gradients))


def _gradients_by_home_and_slots(
    home: Experts, slots: Experts | None, rows: Rows, group_sizes: GroupSizes, upstream: Rows
) -> tuple[Rows, tuple[Experts, Experts | None]]:
    """Computes the gradients of `_by_home_and_slots`, in the same two parts."""
    num_home = home.up.shape[0]
    out, of_home = grouped_ffn_gradients(rows, home, group_sizes[:num_home], upstream)
    if slots is None:
        return out, (of_home, None)
    shift = group_sizes[:num_home].sum(dtype=jnp.int32)
    moved, of_slots = grouped_ffn_gradients(
        _rolled(rows, shift), slots, group_sizes[num_home:], _rolled(upstream, shift)
    )
    return _before(shift, out, _rolled(moved, -shift)), (of_home, of_slots)
