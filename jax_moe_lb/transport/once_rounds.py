"""`serve_lists`: expert computation in rounds of lists, forward and backward, in the memory of one round.

It is `in_rounds` for dispatches whose rows are entries instead of copies: `Once` and `Forward`. The residuals are the
layer inputs, the plan, the lists, which are integers, and the arrays of `Saved`. Each backward round sends the entries
again, unless they are saved, and the gradients of their outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jax_moe_lb.collectives.ragged_all_to_all import Group, as_rows, as_words, empty_buffer
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.manual_axes import first_order
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.schedule import in_order, in_order_on_tpu
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Rows, Tokens, pytree
from jax_moe_lb.kernels.operands import BackwardRows
from jax_moe_lb.kernels.slot_places import SlotPlaces, slot_places, sum_rows, take_rows
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import Buffers, DispatchOptions, RoundsReceipt, RoutingWeights, Saved, rows_at
from jax_moe_lb.transport.lists import Lists, Step, rows_with_padding
from jax_moe_lb.transport.one_round import Kept, SumsT
from jax_moe_lb.transport.replicate import Replicate
from jax_moe_lb.transport.rounds import InputGradients, backward_pass, named, overflow_rounds
from jax_moe_lb.transport.slot_weights import Slots, optimization_barrier, widened

Inputs = tuple[Tokens, RoutingWeights, Experts, Plan, "ListReceipt"]
"""Inputs of `serve_lists`."""

Residuals = tuple[Tokens, RoutingWeights, Experts, Plan, "ListReceipt", Kept]

Entries = tuple[Float[Array, "_ W"], ...]
"""Entries of a rank by chunk; one chunk without a first hop."""


@pytree
class ListReceipt(RoundsReceipt):
    """Lists of a rank, as returned by the `address` of `Once` and `Forward`."""

    lists: Lists  # lists for the ranks that serve copies
    # Lists for the nodes of a first hop, whose received rows are the entries of `lists`; `None` if tokens are the
    # entries
    between: Lists | None


def chunks_between(lists: Lists, buffers: Buffers, group: Group) -> tuple[Step, ...]:
    """Return the chunks of a first hop, each with an equal part of the tokens."""
    num_tokens, num_rows = lists.row.shape[0], lists.entry.shape[0]
    part = -(-num_tokens // buffers.chunks)
    # Without empty chunks, if there are few tokens.
    number = -(-num_tokens // max(part, 1)) or 1
    num_sent = part * (num_rows // max(num_tokens, 1))
    return lists.step(0, num_rows, group).chunks(number, num_sent, in_one_buffer=False)


def _of_step(entries: Float[Array, "N W"], step: Step) -> Float[Array, "_ W"]:
    return entries if step.entries is None else entries[slice(*step.entries)]


class Route(NamedTuple):
    """Static description of the hops of `serve_lists`."""

    options: DispatchOptions  # buffers and quantization
    group: Group  # ranks of the last hop
    between: Group | None  # ranks of the first hop, one in each node; `None` for a single hop

    def to_entries(self, tokens: Float[Array, "T W"], receipt: ListReceipt) -> Entries:
        """Return the entries of this rank by chunk: its tokens, or those forwarded to it by other nodes."""
        if (steps := self.first_hop(receipt)) is None:
            return (tokens,)
        site, rows = "dispatch, between nodes", receipt.lists.row.shape[0] // len(steps)
        return tuple(step.send(_of_step(tokens, step), empty_buffer(tokens, rows), site) for step in steps)

    def choices_to_entries(self, values: Shaped[Array, "T K"], receipt: ListReceipt) -> Shaped[Array, "N K"]:
        """Return one number per choice of the entries."""
        if (steps := self.first_hop(receipt)) is None:
            return values
        site, rows = "dispatch of weights, between nodes", receipt.lists.row.shape[0] // len(steps)
        return jnp.concatenate([step.exchange(step.of_rows(values), rows, site) for step in steps])

    def to_tokens(self, entries: Entries, receipt: ListReceipt, like: Tokens) -> Tokens:
        """Sum values of the entries per token, in the dtype of the tokens; the transpose of `to_entries`."""
        entries = tuple(part.astype(like.dtype) for part in entries)
        if (steps := self.first_hop(receipt)) is None:
            return entries[0]
        parts = [step.sum_back(part, "combine, between nodes") for step, part in zip(steps, entries, strict=True)]
        return jnp.concatenate([part.astype(like.dtype) for part in parts])

    def choices_to_tokens(self, values: Float[Array, "N K"], receipt: ListReceipt) -> RoutingWeights:
        """Return one number per choice of the tokens; the transpose of `choices_to_entries`."""
        if (steps := self.first_hop(receipt)) is None:
            return values
        site, parts = "combine of weights, between nodes", jnp.split(values, len(steps))
        back = [step.choices_back(part, site) for step, part in zip(steps, parts, strict=True)]
        # A choice is in one chunk, and 0 in the others.
        return sum(back[1:], start=back[0])

    def first_hop(self, receipt: ListReceipt) -> tuple[Step, ...] | None:
        """Return the chunks of the hop between nodes; `None` without such a hop."""
        if receipt.between is None or self.between is None:
            return None
        return chunks_between(receipt.between, self.options.buffers, self.between)

    def room(self, weights: RoutingWeights) -> int:
        """Return the rows of a rank's buffers; see `rows_with_padding`."""
        num_sources = jax.lax.axis_size(self.group.axes)
        return rows_with_padding(self.options.buffers, weights.size, weights.shape[1], num_sources)


@dataclass(frozen=True)
class _Round:
    """Exchange of a round, and the copies that it brings."""

    steps: tuple[Step, ...]  # rows of the round, by chunk of entries
    places: SlotPlaces  # copies of the received rows in the order of slots
    weights: RoutingWeights  # weights of the choices of each received row; those of other ranks have no place
    whole: Step  # rows of all chunks

    @classmethod
    @jax.named_scope("dispatch")
    def of(
        cls,
        i: Int[Array, ""] | int,
        entry_weights: RoutingWeights,
        slots: int,
        room: int,
        lists: Lists,
        route: Route,
        chunks: int,
    ) -> "_Round":
        # The rounds of a single hop bound the received rows only: as many rows as all lists have may leave at once.
        step = lists.step(i, lists.entry.shape[0] if route.between is None else room, route.group)
        # Codes and weights take one exchange: codes are small integers, exact in the dtype of the weights.
        tail = jnp.concatenate([step.codes().astype(entry_weights.dtype), step.of_rows(entry_weights)], 1)
        codes, weights = jnp.split(step.exchange(tail, room, "dispatch of weights"), 2, 1)
        part = lists.row.shape[0] // chunks * min(lists.row.shape[1], lists.copies.shape[0])
        steps = step.chunks(chunks, min(room, part), in_one_buffer=True)
        return cls(steps, slot_places(step.clear(codes).astype(jnp.int32), slots, room), weights, step)

    @jax.named_scope("dispatch")
    def send(self, entries: Entries) -> Float[Array, "A W"]:
        rows = empty_buffer(entries[0], self.weights.shape[0])
        # The chunks of a source land one after the other, as in one exchange.
        for step, part in zip(self.steps, entries, strict=True):
            rows = step.send(part, rows, "dispatch")
        return rows

    def copies(self, rows: Float[Array, "A H"]) -> Rows:
        """Return the copies of received rows, in the order of slots."""
        return take_rows(rows, self.places.copy // self.weights.shape[1], rows_at)

    def copy_weights(self) -> Float[Array, "A 1"]:
        return self.weights.reshape(-1, 1)[self.places.copy]

    @jax.named_scope("combine")
    def sum_back(self, outputs: Rows, weights: RoutingWeights | None) -> Entries:
        """Sum the outputs of each row, then those of each entry."""
        sums = sum_rows(outputs, self.places.place, weights, self.places.owners(weights)).astype(outputs.dtype)
        return tuple(step.sum_back(sums, "combine") for step in self.steps)

    @jax.named_scope("combine")
    def weights_back(self, of_copies: Float[Array, "A 1"]) -> Float[Array, "N K"]:
        of_rows = of_copies[:, 0].at[self.places.place].get(mode="fill", fill_value=0)
        return self.whole.choices_back(of_rows, "combine of weights")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def serve_lists(inputs: Inputs, replicate: Replicate, route: Route, topology: Topology) -> Tokens:
    """Send every token once to each rank that serves it, apply its experts there, and sum their weighted outputs."""
    # Reverse mode runs the same rounds, by a handwritten backward pass, as in `in_rounds`.
    route = route._replace(options=replace(route.options, saved=Saved()))
    return _served(inputs, replicate, route, topology)[0]


def _served(inputs: Inputs, replicate: Replicate, route: Route, topology: Topology) -> tuple[Tokens, Kept]:
    """Compute `serve_lists`; also return the arrays to save."""

    # Under `vmap`, microbatches run sequentially, each with the number of rounds of its own plan.
    @jax.custom_batching.sequential_vmap
    def serve(inputs: Inputs) -> tuple[Tokens, Kept]:
        tokens, weights, experts, plan, receipt = inputs
        transfer, saved = route.options.transfer, route.options.saved
        slots = Slots.of(experts, plan, replicate, topology)
        with jax.named_scope("dispatch"):
            # Encode tokens before the first hop, once per token.
            entries = route.to_entries(packed(transfer, tokens), receipt)
            entry_weights = route.choices_to_entries(weights, receipt)

        def one_round(i: Array | int, total: Entries | None, saved: Saved = Saved()) -> tuple[Entries, Kept]:
            # The barrier makes every round gather its rows, as in `in_rounds`. A chunk does not wait for the others.
            now = tuple(optimization_barrier(jnp.int32(i), part) for part in entries)
            one = _Round.of(i, entry_weights, plan.slots, route.room(weights), receipt.lists, route, len(entries))
            words = one.send(now)
            rows = one.copies(unpacked(transfer, words, tokens))
            outputs, products = slots.ffn(rows, one.places.group_sizes, keeps_products=saved.hidden)
            sums = one.sum_back(outputs, one.weights)
            kept = Kept(rows=words if saved.rows else None, products=products if saved.hidden else None)
            return (sums if total is None else jax.tree.map(jnp.add, total, sums)), kept

        # The first round has the static index 0: the sizes of its lists are known.
        first, kept = one_round(0, None, saved)
        kept = kept._replace(replicas=slots.replicas if saved.replicas else None)
        total = _further_rounds(receipt, route, lambda i, total: one_round(i, total)[0], first)
        with jax.named_scope("combine"):
            return route.to_tokens(total, receipt, tokens), kept

    return serve(inputs)


def _further_rounds(
    receipt: ListReceipt,
    route: Route,
    one_round: Callable[[Array, SumsT], SumsT],
    first: SumsT,
    wide: Callable[[SumsT], SumsT] | None = None,
) -> SumsT:
    """Run the rounds after the first one, from round index and sums to sums."""

    def further(i: Array, carry: tuple[None, SumsT]) -> tuple[None, SumsT]:
        return None, one_round(i, carry[1])

    return overflow_rounds(receipt, route.options, further, (None, first), wide)[1]


def _save(inputs: Inputs, replicate: Replicate, route: Route, topology: Topology) -> tuple[Tokens, Residuals]:
    # A second derivative differentiates this pass, too.
    outputs, kept = first_order(partial(_served, replicate=replicate, route=route, topology=topology))(inputs)
    return outputs, (*inputs, named(kept))


def _backward(
    replicate: Replicate, route: Route, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[InputGradients]:
    return backward_pass(partial(_gradients, replicate, route, topology), saved, upstream)


@jax.named_scope("backward")
def _gradients(
    replicate: Replicate, route: Route, topology: Topology, saved: Residuals, upstream: Tokens
) -> tuple[Tokens, RoutingWeights, Experts]:
    """Compute the gradients of tokens, weights and home experts, in the rounds of the forward pass."""
    tokens, weights, experts, plan, receipt, kept = saved
    # As in `rounds._gradients`: rematerialize replicas and rows in the backward pass.
    tokens, weights, experts, upstream = jax.lax.optimization_barrier((tokens, weights, experts, upstream))
    again, transfer = replicate.again(), route.options.transfer
    is_saved = route.options.saved
    slots = Slots.of(experts, plan, again, topology, kept.replicas)

    def to_entries() -> Entries:
        return route.to_entries(packed(transfer, tokens), receipt)

    with jax.named_scope("dispatch"):
        # Saved rows replace the first round only; further rounds, usually none, then send their entries again.
        entries = None if is_saved.rows else to_entries()
        upstreams = route.to_entries(upstream, receipt)
        entry_weights = route.choices_to_entries(weights, receipt)

    def one_round(
        i: Array | int, sums: tuple[Entries, Array, Any] | None, kept: Kept = Kept()
    ) -> tuple[Entries, Array, Any]:
        sent = () if kept.rows is not None else (to_entries() if entries is None else entries,)
        parts = [optimization_barrier(jnp.int32(i), part) for part in zip(upstreams, *sent, strict=True)]
        now = [tuple(part) for part in zip(*parts, strict=True)]
        one = _Round.of(i, entry_weights, plan.slots, route.room(weights), receipt.lists, route, len(upstreams))
        rows, row_upstream = _received(one, now, kept, lambda words: unpacked(transfer, words, tokens), slots.replicas)
        before = None if sums is None else sums[2]
        batch = BackwardRows(rows, one.copy_weights(), row_upstream, kept.products)
        of_rows, of_weights, of_slots = slots.pull_back(batch, one.places.group_sizes, before, route.options)
        # Gradients of routing weights travel beside the products for gradients of rows. These travel beside the
        # products for gradients of experts.
        of_choices, of_rows = in_order(one.weights_back(of_weights), of_rows)
        of_entries = one.sum_back(of_rows, None)
        if sums is not None:
            of_entries, of_choices = jax.tree.map(jnp.add, sums[:2], (of_entries, of_choices))
        return of_entries, of_choices, of_slots

    def wide(sums: tuple[Entries, Array, Any]) -> tuple[Entries, Array, Any]:
        return *sums[:2], widened(sums[2])

    of_entries, of_choices, of_slots = _further_rounds(receipt, route, one_round, one_round(0, None, kept), wide)
    # Gradients of replicas otherwise travel first, beside the products that hide those of rows.
    words, of_slots = in_order_on_tpu(jax.tree.map(as_words, of_entries), of_slots)
    of_entries = jax.tree.map(as_rows, words)
    of_experts = slots.gradients_at_home(of_slots, plan, again, topology)
    with jax.named_scope("combine"):
        of_tokens = route.to_tokens(of_entries, receipt, tokens)
        return of_tokens, route.choices_to_tokens(of_choices, receipt), of_experts


def _received(
    one: _Round,
    upstream_and_sent: Sequence[tuple[Array, ...]],
    kept: Kept,
    decode: Callable[[Array], Array],
    replicas: Experts | None,
) -> tuple[Rows, Rows]:
    """Return the copies of a backward round, and the gradients of the outputs."""
    upstream, *sent = upstream_and_sent
    if kept.rows is not None:
        return one.copies(decode(kept.rows)), one.copies(one.send(upstream))
    if kept.products is not None:
        row_upstream = one.copies(one.send(upstream))
        # The rows then travel beside the products that read none of them.
        row_upstream, sent = in_order(row_upstream, sent)
        return one.copies(decode(one.send(sent[0]))), row_upstream
    rows = one.copies(decode(one.send(sent[0])))
    # The upstream gradients then travel beside the products that rematerialize the hidden activations. Replicas would
    # otherwise travel beside these on TPUs.
    rows, upstream = in_order(rows, upstream)
    _, upstream = in_order_on_tpu(replicas, upstream)
    return rows, one.copies(one.send(upstream))


serve_lists.defvjp(_save, _backward)
