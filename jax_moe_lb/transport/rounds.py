"""`in_rounds` serves in as many rounds as the plan needs, forward and backward, in the memory of one.

The order of copies has its own two functions here, `to_sending_order` and `combine`.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb.experts import Experts
from jax_moe_lb.ops.grouped_ffn import grouped_ffn, grouped_ffn_gradients
from jax_moe_lb.plan import Plan
from jax_moe_lb.topology import Topology
from jax_moe_lb.transport.exchange import Copies, Exchange, Receipt, unwritten
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.types import DType, Tokens, wide_dtype

Carry = TypeVar("Carry")


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def in_rounds(
    copies: Copies,
    experts: Experts,
    plan: Plan,
    receipt: Receipt,
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
) -> Copies:
    """Brings every token copy to its expert, wherever the plan put it, and the outputs back.

    `Dispatch.serve` calls it; use it in a `serve` of your own that has plan and receipt before it sends anything.

    The loop's length is known only at run time, so reverse mode cannot look into it: the
    backward pass runs the same rounds again. Each sends the copies and the gradients of
    their outputs, and returns the gradients of the copies. The number of rounds is
    equal on all ranks, so the exchanges inside the loop always find their partners.
    Replicas are not kept for the backward pass either, but copied again by the same plan.

    Args:
        copies: `[C, H]`, the token copies of this rank in the sending order of `receipt`.
        experts: the `L` home experts of this rank.
        plan: the plan, equal on all ranks; it says what the slots hold.
        receipt: what `exchange.address` returned for this plan.
        replicate: how weights travel.
        exchange: how copies travel.
        topology: its expert axes are the ranks that copies and weights travel between.

    Returns:
        `[C, H]`, the experts' outputs in the same order; copies that go nowhere have anything, even NaN.
    """

    # Where microbatches are mapped over, one follows the other: each takes as many rounds as its own plan needs.
    @jax.custom_batching.sequential_vmap
    def serve(copies: Copies, experts: Experts, plan: Plan, receipt: Receipt) -> Copies:
        slots = replicate(experts, plan, topology)

        def one_round(i: Array, out: Copies) -> Copies:
            rows, group_sizes = exchange.send(copies, receipt, i, topology)
            return exchange.send_back(grouped_ffn(rows, slots, group_sizes), receipt, i, out, topology)

        out = one_round(jnp.int32(0), unwritten(copies, copies.shape[0]))
        return further_rounds(receipt, exchange, one_round, out)

    return serve(copies, experts, plan, receipt)


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
    if exchange.max_rounds is None:
        return jax.lax.fori_loop(1, receipt.rounds, one_round, carry)
    for i in range(1, exchange.max_rounds):
        carry = one_round(jnp.int32(i), carry)
    return carry


def _save(
    copies: Copies,
    experts: Experts,
    plan: Plan,
    receipt: Receipt,
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
) -> tuple[Copies, tuple[Copies, Experts, Plan, Receipt]]:
    return in_rounds(copies, experts, plan, receipt, replicate, exchange, topology), (copies, experts, plan, receipt)


def _backward(
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
    saved: tuple[Copies, Experts, Plan, Receipt],
    upstream: Copies,
) -> tuple[Copies, Experts, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: tuple[Copies, Experts, Plan, Receipt], upstream: Copies) -> tuple[Copies, Experts]:
        return _gradients(replicate, exchange, topology, saved, upstream)

    return *pull_back(saved, upstream), None, None


def _gradients(
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
    saved: tuple[Copies, Experts, Plan, Receipt],
    upstream: Copies,
) -> tuple[Copies, Experts]:
    """Computes the gradients of the copies and of the home experts, in the same rounds again."""
    copies, experts, plan, receipt = saved
    # Without the barrier XLA sees that the forward pass made the same replicas and sent the same rows, and keeps those
    # until now instead. It ties them to the gradients, which do not exist before the backward pass has come here.
    copies, experts, upstream = jax.lax.optimization_barrier((copies, experts, upstream))
    again = replicate.again()
    slots, sum_at_home = jax.vjp(lambda experts: again(experts, plan, topology), experts)

    def gradients_of(i: Array, copy_gradients: Copies) -> tuple[Copies, Experts]:
        rows, group_sizes = exchange.send(copies, receipt, i, topology)
        row_upstream, _ = exchange.send(upstream, receipt, i, topology)
        row_gradients, gradients = grouped_ffn_gradients(rows, slots, group_sizes, row_upstream)
        return exchange.send_back(row_gradients, receipt, i, copy_gradients, topology), gradients

    def one_round(i: Array, carry: tuple[Copies, Experts]) -> tuple[Copies, Experts]:
        copy_gradients, gradients = gradients_of(i, carry[0])
        # Sums over rounds are kept in float32 at least, and rounded once: small addends would be lost in bfloat16.
        return copy_gradients, jax.tree.map(jnp.add, carry[1], gradients)

    first = gradients_of(jnp.int32(0), unwritten(copies, copies.shape[0]))
    copy_gradients, totals = further_rounds(receipt, exchange, one_round, first)
    slot_gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), totals, slots)
    return copy_gradients, *sum_at_home(slot_gradients)


in_rounds.defvjp(_save, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def to_sending_order(tokens: Tokens, receipt: Receipt, per_tok: int) -> Copies:
    """Makes the `K` copies of each token, in the order in which they are sent.

    It is a gather, and so is its transpose, for which autodiff would write a scatter.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        receipt: it says which copy stands where.
        per_tok: `K`, the experts of each token.

    Returns:
        `[T * K, H]`.
    """
    return tokens[receipt.order // per_tok]


def _save_receipt(tokens: Tokens, receipt: Receipt, per_tok: int) -> tuple[Copies, Receipt]:
    return to_sending_order(tokens, receipt, per_tok), receipt


def _sum_copies(per_tok: int, receipt: Receipt, upstream: Copies) -> tuple[Tokens, None]:
    # `place` puts the copies of a token side by side again, so their gradients are added along an axis, in the order of
    # choices and in float32 at least: a scatter would add in no fixed order.
    place = receipt.place.reshape(-1, per_tok)
    total = sum(_of_choice(upstream, receipt, place[:, k], wide_dtype(upstream)) for k in range(per_tok))
    return jnp.asarray(total).astype(upstream.dtype), None


to_sending_order.defvjp(_save_receipt, _sum_copies)


@jax.custom_vjp
def combine(copies: Copies, weights: Float[Array, "T K"], receipt: Receipt) -> Tokens:
    """Computes the weighted sum of each token's expert outputs: the last step of a layer.

    It takes one gather per choice, added as it comes: XLA:CPU then never writes the `[T, K, H]`
    products, nor the copies in token order. The transpose gathers too.

    Args:
        copies: `[T * K, H]`, the experts' outputs in the sending order of `receipt`.
        weights: `[T, K]`, the router's, in float32 at least; sums are kept in their dtype.
        receipt: what the dispatch returned; it says where each copy stands.

    Returns:
        `[T, H]` in the dtype of `copies`.
    """
    place = receipt.place.reshape(weights.shape)
    total = jnp.zeros((weights.shape[0], copies.shape[1]), weights.dtype)
    # Unrolled over the few choices, in their order, so that equal inputs give equal bits.
    for k in range(weights.shape[1]):
        total = total + _of_choice(copies, receipt, place[:, k], weights.dtype) * weights[:, k, None]
    return total.astype(copies.dtype)


def _of_choice(copies: Copies, receipt: Receipt, place: Int[Array, "T"], dtype: DType) -> Tokens:
    """The copy of each token at one place; 0 for one that goes nowhere, which nobody wrote."""
    # Widened after the gather, so that it reads narrow copies.
    return jnp.where((place < receipt.num_going)[:, None], copies[place], 0).astype(dtype)


def _save_copies(
    copies: Copies, weights: Float[Array, "T K"], receipt: Receipt
) -> tuple[Tokens, tuple[Copies, Array, Receipt]]:
    return combine(copies, weights, receipt), (copies, weights, receipt)


def _spread(saved: tuple[Copies, Array, Receipt], upstream: Tokens) -> tuple[Copies, Array, None]:
    copies, weights, receipt = saved
    place, wide = receipt.place.reshape(weights.shape), weights.dtype
    of_copy = weights.reshape(-1)[receipt.order][:, None]
    copy_gradients = (upstream[receipt.order // weights.shape[1]].astype(wide) * of_copy).astype(copies.dtype)
    per_choice = [
        (_of_choice(copies, receipt, place[:, k], wide) * upstream.astype(wide)).sum(1) for k in range(weights.shape[1])
    ]
    return copy_gradients, jnp.stack(per_choice, 1), None


combine.defvjp(_save_copies, _spread)
