"""`in_rounds`: expert computation in the rounds of a plan, forward and backward, in the memory of one round."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, empty_buffer
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import first_order
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.schedule import in_order_on_tpu
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Carry, DType, Tokens
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import (
    DispatchOptions,
    Exchange,
    Receipt,
    RoundsReceipt,
    RoutingWeights,
    Saved,
    combine,
    sum_of_copies,
    to_sending_order,
    weights_by_token,
)
from jax_moe_lb.transport.one_round import (
    Batch,
    FirstOfCopies,
    Kept,
    OfCopies,
    PullBack,
    Round,
    SumsT,
    TravellingRows,
    gradient_round,
    serve_round,
)
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.slot_weights import Slots, narrowed, optimization_barrier, widened

ResidualsT = TypeVar("ResidualsT")

Inputs = tuple[Tokens, RoutingWeights, Experts, Plan, Receipt]

InputGradients = tuple[Tokens, RoutingWeights, Experts, None, None]

Residuals = tuple[Tokens, RoutingWeights, Experts, Plan, Receipt, Kept]

KEPT_NAMES = ("moe_dispatched_rows", "moe_replicas", "moe_hidden", "moe_choices")
"""Names of the fields of `Kept` for policies of `jax.checkpoint`."""


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def in_rounds(inputs: Inputs, replicate: Replicate, exchange: Exchange, topology: Topology) -> Tokens:
    """Send every token copy to the serving rank, apply its expert, and sum the outputs per token."""
    # `Dispatch.serve` calls it. A custom `serve` can call it if plan and receipt exist before the first transfer.
    # Reverse mode cannot differentiate a loop of unknown length, so the backward pass is handwritten and runs the same
    # rounds. Each round sends the copies and the gradients of their outputs, and returns the gradients of the copies.
    # The number of rounds is equal on all ranks, so the exchanges inside the loop stay paired.
    # The residuals are the inputs and the arrays chosen by `exchange.saved`. Outputs, and arrays that are not saved,
    # are rematerialized by the same plan. The rank of the expert computes the gradient of a copy's weight, because the
    # output is not saved.
    return _served(inputs, replicate, replace(exchange, saved=Saved()), topology)[0]


def _served(inputs: Inputs, replicate: Replicate, exchange: Exchange, topology: Topology) -> tuple[Tokens, Kept]:
    """Compute `in_rounds`; also return the arrays to save."""

    # Under `vmap`, microbatches run sequentially, each with the number of rounds of its own plan.
    @jax.custom_batching.sequential_vmap
    def serve(inputs: Inputs) -> tuple[Tokens, Kept]:
        tokens, weights, experts, plan, receipt = inputs
        slots = Slots.of(experts, plan, replicate, topology)
        out, kept = serve_rounds(tokens, weights.shape[1], receipt, slots, exchange, topology)
        kept = kept._replace(replicas=slots.replicas if exchange.saved.replicas else None)
        with jax.named_scope("combine"):
            return combine(unpacked(exchange.transfer, out, tokens), weights, receipt), kept

    return serve(inputs)


def serve_rounds(
    tokens: Tokens,
    per_token: int,
    receipt: Receipt,
    slots: Slots,
    exchange: Exchange,
    topology: Topology,
) -> tuple[TravellingRows, Kept]:
    """Return the outputs of all copies of a receipt, computed round by round."""
    # Encode tokens before the gather of their copies, once per token.
    travelling = packed(exchange.transfer, tokens)

    saved = exchange.saved

    def one_round(i: Array, out: TravellingRows | None, keeps_products: bool) -> tuple[TravellingRows, Kept]:
        # The barrier makes every round gather its copies. Otherwise XLA hoists the gather, and the copies stay in
        # memory.
        now = optimization_barrier(i, travelling)
        with jax.named_scope("dispatch"):
            copies = to_sending_order(now, receipt, per_token)
        one = Round(i, receipt, exchange, topology, tokens)
        return serve_round(one, copies, lambda rows, sizes: slots.ffn(rows, sizes, keeps_products), out)

    def further(i: Array, carry: tuple[TravellingRows, None]) -> tuple[TravellingRows, None]:
        return one_round(i, carry[0], False)[0], None

    out, kept = one_round(jnp.int32(0), None, saved.hidden)
    if _backward_exchange(exchange, tokens, per_token, slots) != exchange:
        kept = _in_one_chunk(kept, exchange, receipt)
    kept = Kept(kept.rows if saved.rows else None, products=kept.products if saved.hidden else None)
    return overflow_rounds(receipt, exchange, further, (out, None))[0], kept


def _backward_exchange(exchange: Exchange, tokens: Tokens, per_token: int, slots: Slots) -> Exchange:
    """Return the exchange of the backward pass."""
    # Sums over chunks take longer than they hide, unless kernels add in place.
    num_copies = tokens.shape[0] * per_token
    rows = jax.ShapeDtypeStruct((exchange.buffers.chunk_rows(num_copies), tokens.shape[1]), tokens.dtype)
    in_one = exchange.buffers.chunks > 1 and not slots.adds_chunks(rows)
    return replace(exchange, buffers=exchange.buffers.in_one_chunk(num_copies)) if in_one else exchange


def _in_one_chunk(kept: Kept, exchange: Exchange, receipt: Receipt) -> Kept:
    """Return the arrays of the first round as those of one chunk."""
    order = exchange.order_in_one_chunk(receipt, jnp.int32(0))

    def in_one(*parts: Array) -> Array:
        rows = jnp.concatenate(parts)
        return rows if order is None else rows[order]

    return Kept((in_one(*kept.rows),), products=(jax.tree.map(in_one, *kept.products),))


def gradient_rounds(
    batch: Batch,
    receipt: Receipt,
    slots: PullBack,
    exchange: Exchange,
    topology: Topology,
    saved: Kept = Kept(),
    before: PyTree = (),
) -> tuple[OfCopies, Any]:
    """Return the gradients of all copies of a receipt, in the rounds of the forward pass."""
    # Each round sends the copies again, unless they are saved, and the gradients of their outputs.
    tokens, weights, upstream = batch
    # The backward pass rounds the tokens as the forward pass did.
    travelling = packed(exchange.transfer, tokens)

    def one_round(i: Array, carry: tuple[OfCopies | FirstOfCopies, Any], saved: Kept = Kept()) -> tuple[OfCopies, Any]:
        now, upstream_now = optimization_barrier(i, (travelling, upstream))
        one = Round(i, receipt, exchange, topology, tokens)
        return gradient_round(one, Batch(now, weights, upstream_now), slots, carry, saved, before)

    of_weights = empty_buffer(weights.reshape(-1, 1), weights.size)
    first = one_round(jnp.int32(0), ((None, of_weights), None), saved)
    return overflow_rounds(receipt, exchange, one_round, first, widened)


def overflow_rounds(
    receipt: RoundsReceipt,
    exchange: DispatchOptions,
    one_round: Callable[[Array, tuple[Carry, SumsT]], tuple[Carry, SumsT]],
    carry: tuple[Carry, SumsT],
    wide: Callable[[SumsT], SumsT] | None = None,
) -> tuple[Carry, SumsT]:
    """Run the rounds after the first one, usually none."""
    # The first round is outside the loop for three reasons. Its results need no buffer initialized before the loop. The
    # compiler can overlap it with other work. The host of a GPU waits before each iteration of a loop of unknown
    # length.
    # The loop carries exchange outputs `as_words`: as rows, the TPU compiler would change their layout even if the loop
    # does not run.

    def in_words(i: Array, carry: tuple[Carry, SumsT]) -> tuple[Carry, SumsT]:
        words, sums = carry
        rows, sums = one_round(i, (jax.tree.map(as_rows, words), sums))
        return jax.tree.map(as_words, rows), sums

    # `aot/execution_counts.py` finds these rounds by this name: a balanced step runs none of them.
    with jax.named_scope("further_rounds"):
        if exchange.buffers.max_rounds is None:
            rows, sums = carry
            words, sums = _loop(receipt, in_words, (jax.tree.map(as_words, rows), sums), wide)
            return jax.tree.map(as_rows, words), sums
        for i in range(1, exchange.buffers.max_rounds):
            carry = one_round(jnp.int32(i), carry)
    return carry


def _loop(
    receipt: RoundsReceipt,
    one_round: Callable[[Array, tuple[Carry, SumsT]], tuple[Carry, SumsT]],
    carry: tuple[Carry, SumsT],
    wide: Callable[[SumsT], SumsT] | None,
) -> tuple[Carry, SumsT]:
    def rounds(carry: tuple[Carry, SumsT]) -> tuple[Carry, SumsT]:
        return jax.lax.fori_loop(1, receipt.rounds, one_round, carry)

    def with_wide_sums(_: Array, carry: tuple[Carry, SumsT]) -> tuple[Carry, SumsT]:
        assert wide is not None
        rows, sums = rounds((carry[0], wide(carry[1])))
        return rows, narrowed(sums, carry[1])

    if wide is None or _dtypes(jax.eval_shape(wide, carry[1])) == _dtypes(carry[1]):
        return rounds(carry)
    # A loop of one step or none: without a second round, no sums are converted or copied.
    return jax.lax.fori_loop(0, (receipt.rounds > 1).astype(jnp.int32), with_wide_sums, carry)


def _dtypes(tree: PyTree) -> list[DType]:
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def _save(inputs: Inputs, replicate: Replicate, exchange: Exchange, topology: Topology) -> tuple[Tokens, Residuals]:
    # A second derivative differentiates this pass, too.
    outputs, kept = first_order(partial(_served, replicate=replicate, exchange=exchange, topology=topology))(inputs)
    return outputs, (*inputs, named(kept))


def named(kept: Kept) -> Kept:
    """Name saved arrays for policies of `jax.checkpoint`."""
    # If a policy does not save a name, the forward pass runs again for its array.
    return Kept(*map(checkpoint_name, kept, KEPT_NAMES))


def _backward(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[InputGradients]:
    return backward_pass(partial(_gradients, replicate, exchange, topology), saved, upstream)


def backward_pass(
    gradients: Callable[[ResidualsT, Tokens], tuple[Tokens, RoutingWeights, Experts]],
    saved: ResidualsT,
    upstream: Tokens,
) -> tuple[InputGradients]:
    """Run a handwritten backward pass of tokens, weights, experts, plan and receipt."""
    # Under `vmap`, microbatches run sequentially. The pass itself is not differentiated.
    pull_back = first_order(jax.custom_batching.sequential_vmap(gradients))
    return ((*pull_back(saved, upstream), None, None),)


@jax.named_scope("backward")
def _gradients(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Compute the gradients of tokens, weights and home experts, in the rounds of the forward pass."""
    tokens, weights, experts, plan, receipt, kept = saved
    # Without the barrier, XLA merges these replicas and rows with the equal ones of the forward pass and keeps them
    # until now. The barrier ties them to the gradients, which exist only in the backward pass.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    per_token, again = weights.shape[1], replicate.again()
    slots = Slots.of(experts, plan, again, topology, kept.replicas)
    batch = Batch(tokens, weights, upstream)
    before = () if replicate.uses_copy_engines else slots.replicas
    exchange = _backward_exchange(exchange, tokens, per_token, slots)
    (of_copies, of_weights), of_slots = gradient_rounds(batch, receipt, slots, exchange, topology, kept, before)
    # Gradients of replicas otherwise travel first, beside the products that hide those of rows. The barrier sets the
    # layout of its arrays, so copies pass in that of exchanges.
    words, of_slots = in_order_on_tpu(as_words(of_copies), of_slots)
    of_copies = as_rows(words)
    of_experts = slots.gradients_at_home(of_slots, plan, again, topology)
    with jax.named_scope("combine"):
        of_tokens = sum_of_copies(of_copies, receipt, per_token)
        return of_tokens, weights_by_token(of_weights, receipt, per_token), of_experts


in_rounds.defvjp(_save, _backward)
