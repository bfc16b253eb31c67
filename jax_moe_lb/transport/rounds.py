"""`in_rounds` serves in as many rounds as the plan needs, forward and backward, in the memory of one."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, empty_buffer, empty_buffer_after
from jax_moe_lb.core.manual_axes import first_order
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Carry, DType, GroupSizes, Rows, Tokens, wide_dtype
from jax_moe_lb.kernels.backends import has_hopper_kernels
from jax_moe_lb.kernels.experts import Experts
from jax_moe_lb.kernels.grouped_ffn import ExpertParts, grouped_ffn, grouped_ffn_gradients
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import (
    Copies,
    CopyWeights,
    Exchange,
    Kernels,
    Receipt,
    RoutingWeights,
    combine,
    sum_of_copies,
    to_sending_order,
    weights_by_token,
    weights_in_order,
)
from jax_moe_lb.transport.replicate import Replicate, joined

SumsT = TypeVar("SumsT")

Residuals = tuple[Tokens, RoutingWeights, Experts, Plan, Receipt]

TravellingRows = Float[Array, "C W"]
"""Copies as they travel, which are narrower than tokens where there is a `QuantizedTransfer`."""

OfCopies = tuple[Copies, CopyWeights]
"""The gradients of copies and of their weights, in the sending order."""

RowWeights = Float[Array, "A 1"]
"""What the output of each row is multiplied with."""

PullBack = Callable[[Rows, RowWeights, GroupSizes, Rows, Any], tuple[Rows, RowWeights, Any]]
"""Given the gradients of outputs and the sums of those of experts (`None` at first), it returns those of rows, of their
weights, and the new sums."""


class Batch(NamedTuple):
    """Holds what was served, and the gradients of its outputs.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        weights: `[T, K]`, by which the outputs of a token's copies were summed.
        upstream: `[T, H]`, the gradients of the sums.
    """

    tokens: Tokens
    weights: RoutingWeights
    upstream: Tokens


class Slots(NamedTuple):
    """Holds the weights of a rank's slots, in two parts.

    Args:
        home: the `L` home experts.
        replicas: the `S - L` others; `None` without such slots.
        stay_apart: whether products take both where they are.
    """

    home: Experts
    replicas: Experts | None
    stay_apart: bool

    @classmethod
    @jax.named_scope("replicate")
    def of(cls, experts: Experts, plan: Plan, replicate: Replicate, exchange: Exchange, topology: Topology) -> "Slots":
        """Fills the slots of a plan; see `Replicate`."""
        stay_apart = takes_parts(exchange)
        # Without replica slots there is no exchange that all ranks would have to take part in.
        if plan.slots == plan.num_home:
            return cls(experts, None, stay_apart)
        return cls(experts, replicate.join(replicate.start(experts, plan, topology), ()), stay_apart)

    def weights(self, group_sizes: Array) -> Experts | ExpertParts:
        """Returns the weights of all slots, for a product of rows of these groups."""
        if self.stay_apart:
            return (self.home,) if self.replicas is None else (self.home, self.replicas)
        if self.replicas is None:
            return self.home
        # Products want one array. It is made in each round and given up after its product: for a loop that may have no
        # round all kinds would have to be kept.
        return joined(*optimization_barrier(group_sizes, (self.home, self.replicas)))

    def again(self, after: Array) -> Experts | ExpertParts:
        """Returns the same for a product that comes after this array was computed."""
        home, replicas = optimization_barrier(after, (self.home, self.replicas))
        return Slots(home, replicas, self.stay_apart).weights(after)


def takes_parts(exchange: Exchange) -> bool:
    """Says whether products take experts in parts: those of our own kernels do.

    Args:
        exchange: it says whether to use them where there are any.
    """
    return exchange.kernels is Kernels.OWN and has_hopper_kernels()


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def in_rounds(
    tokens: Tokens,
    weights: RoutingWeights,
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
    def serve(tokens: Tokens, weights: RoutingWeights, experts: Experts, plan: Plan, receipt: Receipt) -> Tokens:
        slots = Slots.of(experts, plan, replicate, exchange, topology)

        @jax.named_scope("experts")
        def ffn(rows: Rows, group_sizes: GroupSizes) -> Rows:
            return grouped_ffn(rows, slots.weights(group_sizes), group_sizes)

        nothing = empty_buffer_after(packed(exchange.transfer, tokens), weights.size)
        out = serve_rounds(tokens, weights.shape[1], receipt, ffn, nothing, exchange, topology)
        with jax.named_scope("combine"):
            return combine(unpacked(exchange.transfer, out, tokens), weights, receipt)

    return serve(tokens, weights, experts, plan, receipt)


def serve_rounds(
    tokens: Tokens,
    per_token: int,
    receipt: Receipt,
    ffn: Callable[[Rows, GroupSizes], Rows],
    out: TravellingRows,
    exchange: Exchange,
    topology: Topology,
) -> TravellingRows:
    """Writes the outputs of all copies that a receipt addresses into `out`, round by round.

    Args:
        tokens: `[T, H]`, the tokens of this rank.
        per_token: `K`, the experts of each token.
        receipt: what `exchange.address` returned.
        ffn: sends the rows of a round through their experts.
        out: `[T * K, H]`, in the sending order, as they travel; copies that the receipt does not address stay as they
            are.
        exchange: how copies travel.
        topology: its expert axes are the ranks that copies travel between.
    """
    transfer = exchange.transfer
    # Encoded once, before there are several copies of a token.
    travelling = packed(transfer, tokens)

    def one_round(i: Array, carry: tuple[TravellingRows, None]) -> tuple[TravellingRows, None]:
        # Gathered again in every round: kept, they would be there beside the rows all the time.
        now = optimization_barrier(i, travelling)
        with jax.named_scope("dispatch"):
            rows, group_sizes = exchange.send(to_sending_order(now, receipt, per_token), receipt, i, topology)
            rows = unpacked(transfer, rows, tokens)
        outputs = ffn(rows, group_sizes)
        with jax.named_scope("combine"):
            return exchange.send_back(packed(transfer, outputs), receipt, i, carry[0], topology), None

    return overflow_rounds(receipt, exchange, one_round, one_round(jnp.int32(0), (out, None)))[0]


def gradient_rounds(
    batch: Batch,
    order: Receipt,
    receipt: Receipt,
    pull_back: PullBack,
    of_copies: OfCopies,
    exchange: Exchange,
    topology: Topology,
) -> tuple[OfCopies, Any]:
    """Writes the gradients of all copies that a receipt addresses into `of_copies`, in the rounds of the forward pass.

    Every round sends the copies again, and the gradients of their outputs.

    Args:
        batch: what was served, and the gradients of its outputs.
        order: the receipt that says which copy stands where in the sending order.
        receipt: what `exchange.address` returned; of its order only the places of copies that it addresses count.
        pull_back: computes the gradients of the rows of a round.
        of_copies: what `no_gradients` returns, or earlier waves have written.
        exchange: how copies travel.
        topology: its expert axes are the ranks that copies travel between.

    Returns:
        Those of copies, and the sums over rounds of those of experts.
    """
    tokens, weights, upstream = batch
    per_token = weights.shape[1]
    # As the experts had them in the forward pass: rounded in the same way again.
    travelling = packed(exchange.transfer, tokens)

    def one_round(i: Array, carry: tuple[OfCopies, Any]) -> tuple[OfCopies, Any]:
        of_copies, sums = carry
        now, upstream_now = optimization_barrier(i, (travelling, upstream))
        with jax.named_scope("dispatch"):
            words, group_sizes = exchange.send(to_sending_order(now, order, per_token), receipt, i, topology)
            rows = unpacked(exchange.transfer, words, tokens)
            row_upstream, _ = exchange.send(to_sending_order(upstream_now, order, per_token), receipt, i, topology)
            row_weights, _ = exchange.send(weights_in_order(weights, order), receipt, i, topology)
        *of_rows, sums = pull_back(rows, row_weights, group_sizes, row_upstream, sums)
        with jax.named_scope("combine"):
            both = zip(of_rows, of_copies, strict=True)
            copies, copy_weights = (exchange.send_back(part, receipt, i, out, topology) for part, out in both)
        return (copies, copy_weights), sums

    return overflow_rounds(receipt, exchange, one_round, one_round(jnp.int32(0), (of_copies, None)))


def no_gradients(tokens: Tokens, weights: RoutingWeights) -> OfCopies:
    """Makes room for the gradients of all copies and of their weights, which holds anything."""
    return empty_buffer_after(tokens, weights.size), empty_buffer(weights.reshape(-1, 1), weights.size)


def optimization_barrier(other: Array, tree: Carry) -> Carry:
    """Ties arrays to another: what is made of them alone a compiler would take out of a loop, or make once, and keep.

    Args:
        other: the number of a round, or what is computed before.
        tree: what copies are made of.
    """
    return jax.lax.optimization_barrier((other, tree))[1]


def overflow_rounds(
    receipt: Receipt,
    exchange: Exchange,
    one_round: Callable[[Array, tuple[Carry, SumsT]], tuple[Carry, SumsT]],
    carry: tuple[Carry, SumsT],
) -> tuple[Carry, SumsT]:
    """Runs the rounds after the first, which is usually the only one.

    The first stands outside of the loop: its results need no room that was cleared before, a compiler can run other
    work beside it, and with a loop of unknown length a GPU's host waits before each of its rounds. What exchanges write
    into is carried `as_words`: as rows, all of it was turned around on TPUs in case that the loop runs.

    Args:
        receipt: of the exchange; it says how many rounds there are.
        exchange: it says whether their number is known before.
        one_round: takes the number of a round and the carry, and returns the new carry.
        carry: what the first round has made: rows, `[C, W]` each, that exchanges write into, and sums of anything.
    """

    def in_words(i: Array, carry: tuple[Carry, SumsT]) -> tuple[Carry, SumsT]:
        words, sums = carry
        rows, sums = one_round(i, (jax.tree.map(as_rows, words), sums))
        return jax.tree.map(as_words, rows), sums

    # `aot/execution_counts.py` knows by this name that a balanced step runs none of them.
    with jax.named_scope("further_rounds"):
        if exchange.buffers.max_rounds is None:
            rows, sums = carry
            words, sums = jax.lax.fori_loop(1, receipt.rounds, in_words, (jax.tree.map(as_words, rows), sums))
            return jax.tree.map(as_rows, words), sums
        for i in range(1, exchange.buffers.max_rounds):
            carry = one_round(jnp.int32(i), carry)
    return carry


def _save(
    tokens: Tokens,
    weights: RoutingWeights,
    experts: Experts,
    plan: Plan,
    receipt: Receipt,
    replicate: Replicate,
    exchange: Exchange,
    topology: Topology,
) -> tuple[Tokens, Residuals]:
    saved = tokens, weights, experts, plan, receipt
    return in_rounds(*saved, replicate, exchange, topology), saved


def _backward(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts, None, None]:
    @jax.custom_batching.sequential_vmap
    def pull_back(saved: Residuals, upstream: Tokens) -> tuple[Tokens, RoutingWeights, Experts]:
        return _gradients(replicate, exchange, topology, saved, upstream)

    return *first_order(pull_back)(saved, upstream), None, None


@jax.named_scope("backward")
def _gradients(
    replicate: Replicate, exchange: Exchange, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Computes the gradients of the tokens, their weights and the home experts, in the same rounds again."""
    tokens, weights, experts, plan, receipt = saved
    # Without the barrier XLA sees that the forward pass made the same replicas and sent the same rows, and keeps those
    # until now instead. It ties them to the gradients, which do not exist before the backward pass has come here.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    per_token, again = weights.shape[1], replicate.again()
    slots = Slots.of(experts, plan, again, exchange, topology)
    sums_dtype = dtype_of_sums(experts, exchange)

    @jax.named_scope("experts")
    def pull_back(rows: Rows, row_weights: RowWeights, group_sizes: GroupSizes, upstream: Rows, sums: Any) -> Any:
        at = slots.weights(group_sizes)
        fused = fuse_gate_up(experts, rows, are_joined=slots.replicas is not None and not slots.stay_apart)
        return gradients_of_round(
            rows, row_weights, at, slots.again, group_sizes, upstream, sums_dtype, sums, fused=fused
        )

    batch = Batch(tokens, weights, upstream)
    (of_copies, of_weights), of_slots = gradient_rounds(
        batch, receipt, receipt, pull_back, no_gradients(tokens, weights), exchange, topology
    )
    of_home, of_replicas = _apart(of_slots, plan.num_home)
    if slots.replicas is not None:
        of_replicas = jax.tree.map(lambda g: g.astype(experts.up.dtype), of_replicas)
        with jax.named_scope("replicate"):
            of_home = again.add_at_home(of_home, of_replicas, plan, topology)
    of_home = in_form_of(experts, of_home)
    of_experts = jax.tree.map(lambda g, w: g[: plan.num_home].astype(w.dtype), of_home, experts)
    with jax.named_scope("combine"):
        of_tokens = sum_of_copies(of_copies, receipt, per_token)
        return of_tokens, weights_by_token(of_weights, receipt, per_token), of_experts


def _apart(of_slots: Experts | ExpertParts, num_home: int) -> tuple[Experts, Experts | None]:
    """The gradients of home experts, which others may follow, and those of replicas."""
    if isinstance(of_slots, tuple):
        return of_slots[0], of_slots[1] if len(of_slots) > 1 else None
    return of_slots, jax.tree.map(lambda g: g[num_home:], of_slots)


def fuse_gate_up(experts: Experts, rows: Rows, *, are_joined: bool) -> bool:
    """Says whether a round of a backward pass has the gate in `up`: on accelerators, where less is moved so.

    Forward passes go without, as both kinds at once would be their peak of memory.

    Args:
        experts: the home experts.
        rows: `[A, H]`.
        are_joined: whether the experts are a copy already, so that a gate in `up` costs no other.
    """
    if experts.gate is None or _platform() not in ("gpu", "tpu"):
        return False
    copied_bytes = 0 if are_joined else 2 * (experts.up.nbytes + experts.gate.nbytes)
    # Apart, rows are read once more for the products with each and for the gradients of each, and what each adds to the
    # gradients of rows is written and read, and their sum written.
    return copied_bytes <= 5 * rows.nbytes


def gradients_of_round(
    rows: Rows,
    row_weights: RowWeights,
    experts: Experts | ExpertParts,
    again: Callable[[Array], Experts | ExpertParts],
    group_sizes: GroupSizes,
    upstream: Rows,
    sums_dtype: DType,
    sums: Experts | ExpertParts | None = None,
    *,
    fused: bool,
) -> tuple[Rows, RowWeights, Experts | ExpertParts]:
    """Computes `grouped_ffn_gradients` with the gate in `up`, or as experts are.

    On GPUs the last products take weights that are made again. A program for TPUs moves more with that.

    Args:
        rows: `[A, H]`; for these and the others see there.
        row_weights: `[A, 1]`.
        experts: the weights of the `S` groups, or parts of them.
        again: makes the same weights again, after the array that it is given.
        group_sizes: `[S]`.
        upstream: `[A, H]`.
        sums_dtype: that of the gradients of the experts.
        sums: what they are added to.
        fused: what `fuse_gate_up` says.

    Returns:
        What `grouped_ffn_gradients` does; `in_form_of` brings gradients of experts into the form of `experts`.
    """

    def in_form(experts: Experts | ExpertParts) -> Experts | ExpertParts:
        return jax.tree.map(Experts.fused, experts, is_leaf=_are_experts) if fused else experts

    def of_last_products(after: Array) -> Experts | ExpertParts:
        return in_form(again(after))

    at, last = in_form(experts), of_last_products if _platform() == "gpu" else None
    return grouped_ffn_gradients(rows, row_weights, at, group_sizes, upstream, sums_dtype, sums, last)


def _are_experts(node: Any) -> bool:
    return isinstance(node, Experts)


def _platform() -> Literal["cpu", "tpu", "gpu"] | None:
    # No device is known where a program is traced for a mesh without any.
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return None
    if device.device_kind.startswith("cpu"):
        return "cpu"
    return "tpu" if device.device_kind.startswith("TPU") else "gpu"


def in_form_of(experts: Experts, sums: Experts) -> Experts:
    """Brings gradients of experts into the form that these were given in, with the gate beside `up` or in it.

    Args:
        experts: as they were given.
        sums: the gradients, in that form or with the gate in `up`.
    """
    return sums if experts.is_fused else sums.apart()


def dtype_of_sums(experts: Experts, exchange: Exchange) -> DType:
    """Chooses the dtype in which gradients of experts are summed over rounds.

    It is float32 at least, rounded once: small addends would be lost in bfloat16. A single round rounds as it writes
    them.

    Args:
        experts: the home experts.
        exchange: it says whether there is one round.
    """
    return experts.up.dtype if exchange.buffers.max_rounds == 1 else wide_dtype(experts.up)


in_rounds.defvjp(_save, _backward)
