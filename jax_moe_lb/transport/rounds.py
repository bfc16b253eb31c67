"""`in_rounds` serves in as many rounds as the plan needs, forward and backward, in the memory of one."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.grouped_ffn import grouped_ffn, grouped_ffn_gradients
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.copies import (
    CopyWeights,
    Weights,
    combine,
    sum_of_copies,
    to_sending_order,
    weights_by_token,
    weights_in_order,
)
from jax_moe_lb.transport.exchange import Copies, Exchange, Receipt, unwritten
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.types import Tokens, wide_dtype

Carry = TypeVar("Carry")

Saved = tuple[Tokens, Weights, Experts, Plan, Receipt]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def in_rounds(
    tokens: Tokens,
    weights: Weights,
    experts: Experts,
    plan: Plan,
    receipt: Receipt,
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
) -> Tokens:
    """Brings every token copy to its expert, wherever the plan put it, and sums the outputs of each token.

    `Dispatch.serve` calls it; use it in a `serve` of your own that has plan and receipt before it sends anything.

    The loop's length is known only at run time, so reverse mode cannot look into it: the
    backward pass runs the same rounds again. Each sends the copies and the gradients of
    their outputs, and returns the gradients of the copies. The number of rounds is
    equal on all ranks, so the exchanges inside the loop always find their partners.
    Only what it is given is kept for the backward pass: no copies, no outputs and no replicas, which all are made again
    by the same plan. The gradient of a copy's weight is computed where its expert is, since its output is gone.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        weights: `[T, K]`, by which the outputs of a token's copies are summed.
        experts: the `L` home experts of this rank.
        plan: the plan, equal on all ranks; it says what the slots hold.
        receipt: what `exchange.address` returned for this plan.
        replicate: how weights travel.
        exchange: how copies travel.
        topology: its expert axes are the ranks that copies and weights travel between.

    Returns:
        `[T, H]`, the weighted sums; copies that go nowhere count as 0.
    """

    # Where microbatches are mapped over, one follows the other: each takes as many rounds as its own plan needs.
    @jax.custom_batching.sequential_vmap
    def serve(tokens: Tokens, weights: Weights, experts: Experts, plan: Plan, receipt: Receipt) -> Tokens:
        slots = replicate(experts, plan, topology)

        def one_round(i: Array, out: Copies) -> Copies:
            # Gathered again in every round: kept, they would be there beside the rows all the time.
            copies = to_sending_order(tokens, receipt, weights.shape[1])
            rows, group_sizes = exchange.send(copies, receipt, i, topology)
            return exchange.send_back(grouped_ffn(rows, slots, group_sizes), receipt, i, out, topology)

        out = one_round(jnp.int32(0), unwritten(tokens, weights.size))
        return combine(further_rounds(receipt, exchange, one_round, out), weights, receipt)

    return serve(tokens, weights, experts, plan, receipt)


def further_rounds(
    receipt: Receipt, exchange: Exchange, one_round: Callable[[Array, Carry], Carry], carry: Carry
) -> Carry:
    """Runs the rounds after the first, which is usually the only one.

    The first stands outside of the loop: its results need no room that was cleared before, a compiler can run other
    work beside it, and with a loop of unknown length a GPU's host waits before each of its rounds.

    Args:
        receipt: of the exchange; it says how many rounds there are.
        exchange: it says whether their number is known before.
        one_round: takes the number of a round and the carry, and returns the new carry.
        carry: what the first round has made.
    """
    # `compiled/executed.py` knows by this name that a balanced step runs none of them.
    with jax.named_scope("further_rounds"):
        if exchange.max_rounds is None:
            return jax.lax.fori_loop(1, receipt.rounds, one_round, carry)
        for i in range(1, exchange.max_rounds):
            carry = one_round(jnp.int32(i), carry)
    return carry


def _save(
    tokens: Tokens,
    weights: Weights,
    experts: Experts,
    plan: Plan,
    receipt: Receipt,
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
) -> tuple[Tokens, Saved]:
    saved = tokens, weights, experts, plan, receipt
    return in_rounds(*saved, replicate, exchange, topology), saved


def _backward(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Saved, upstream: Tokens
) -> tuple[Tokens, Weights, Experts, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: Saved, upstream: Tokens) -> tuple[Tokens, Weights, Experts]:
        return _gradients(replicate, exchange, topology, saved, upstream)

    return *pull_back(saved, upstream), None, None


def _gradients(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Saved, upstream: Tokens
) -> tuple[Tokens, Weights, Experts]:
    """Computes the gradients of the tokens, their weights and the home experts, in the same rounds again."""
    tokens, weights, experts, plan, receipt = saved
    # Without the barrier XLA sees that the forward pass made the same replicas and sent the same rows, and keeps those
    # until now instead. It ties them to the gradients, which do not exist before the backward pass has come here.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    per_token, again = weights.shape[1], replicate.again()
    slots, sum_at_home = jax.vjp(lambda experts: again(experts, plan, topology), experts)
    # Sums over rounds are kept in float32 at least, and rounded once: small addends would be lost in bfloat16. A single
    # round rounds as it writes them.
    sums_dtype = slots.up.dtype if exchange.max_rounds == 1 else wide_dtype(slots.up)

    def gradients_of(i: Array, of_copies: tuple[Copies, CopyWeights]) -> tuple[tuple[Copies, CopyWeights], Experts]:
        rows, group_sizes = exchange.send(to_sending_order(tokens, receipt, per_token), receipt, i, topology)
        row_upstream, _ = exchange.send(to_sending_order(upstream, receipt, per_token), receipt, i, topology)
        row_weights, _ = exchange.send(weights_in_order(weights, receipt), receipt, i, topology)
        *of_rows, of_slots = grouped_ffn_gradients(rows, row_weights, slots, group_sizes, row_upstream, sums_dtype)
        copies, copy_weights = (
            exchange.send_back(part, receipt, i, out, topology) for part, out in zip(of_rows, of_copies, strict=True)
        )
        return (copies, copy_weights), of_slots

    def one_round(
        i: Array, carry: tuple[tuple[Copies, CopyWeights], Experts]
    ) -> tuple[tuple[Copies, CopyWeights], Experts]:
        of_copies, of_slots = gradients_of(i, carry[0])
        return of_copies, jax.tree.map(jnp.add, carry[1], of_slots)

    nothing = unwritten(tokens, weights.size), unwritten(weights.reshape(-1, 1), weights.size)
    first = gradients_of(jnp.int32(0), nothing)
    (of_copies, of_weights), of_slots = further_rounds(receipt, exchange, one_round, first)
    (of_experts,) = sum_at_home(jax.tree.map(lambda g, w: g.astype(w.dtype), of_slots, slots))
    return sum_of_copies(of_copies, receipt, per_token), weights_by_token(of_weights, receipt, per_token), of_experts


in_rounds.defvjp(_save, _backward)
