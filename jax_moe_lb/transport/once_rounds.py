"""`serve_lists`: expert computation in rounds of lists, forward and backward, in the memory of one round.

It is `in_rounds` for dispatches whose rows are entries instead of copies: `Once` and `Forward`. The residuals are the
layer inputs, the plan, the lists, which are integers, the slots and weights of received choices in the first round, and
the arrays of `Saved`. Each backward round sends the entries again, unless they are saved, and the gradients of their
outputs.
"""

import math
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
from jax_moe_lb.core.schedule import in_order, in_order_on_cuda, in_order_on_tpu
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Rows, Tokens, pytree
from jax_moe_lb.kernels.operands import BackwardRows
from jax_moe_lb.kernels.slot_places import SlotPlaces, slot_places, sum_rows, take_rows
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import Buffers, DispatchOptions, RoundsReceipt, RoutingWeights, Saved, rows_at
from jax_moe_lb.transport.lists import Lists, Step, rows_of_chunk, rows_with_padding
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
    return lists.round(0, num_rows, group).chunks(number, num_sent, in_one_buffer=False)


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

    @property
    def chunks(self) -> int:
        """Parts of a round with products of their own; 1 with a first hop, whose chunks are parts of the tokens."""
        return 1 if self.between else self.options.buffers.chunks

    def room(self, num_tokens: int, per_token: int, *, in_chunks: bool = False) -> int:
        """Return the rows of a rank's buffer for a round, or for one of its chunks; see `rows_with_padding`."""
        buffers, num_copies = self.options.buffers, num_tokens * per_token
        num_rows = buffers.chunk_rows(num_copies) if in_chunks and self.chunks > 1 else buffers.rows(num_copies)
        return rows_with_padding(num_rows, per_token, jax.lax.axis_size(self.group.axes))


@dataclass(frozen=True)
class _Part:
    """Exchange of a round or of one of its chunks, and the copies that it brings."""

    steps: tuple[Step, ...]  # rows of the exchange, by chunk of entries
    places: SlotPlaces  # copies of the received rows in the order of slots
    whole: Step  # rows of all chunks of entries
    # Slots plus 1, then weights, of the choices of each received row; `J = 2 K`. Narrow rows would fill tiles on TPUs.
    choices: Float[Array, "J B"]

    @classmethod
    @jax.named_scope("dispatch")
    def of(
        cls,
        step: Step,
        steps: tuple[Step, ...],
        entry_weights: Float[Array, "N K"],
        slots: int,
        room: int,
        choices: Float[Array, "J B"] | None,
    ) -> "_Part":
        if choices is None:
            # Codes and weights take one exchange: codes are small integers, exact in the dtype of the weights.
            tail = jnp.concatenate([step.codes().astype(entry_weights.dtype), step.of_rows(entry_weights)], 1)
            choices = step.exchange(tail, room, "dispatch of weights").T
        # Slots of the choices plus 1; 0 for those of other ranks.
        codes = step.clear(choices[: choices.shape[0] // 2].T).astype(jnp.int32)
        return cls(steps, slot_places(codes, slots, room), step, choices)

    @property
    def weights(self) -> RoutingWeights:
        """Weights of the choices of each received row; those of other ranks have no place."""
        return self.choices[self.choices.shape[0] // 2 :].T

    @jax.named_scope("dispatch")
    def send(self, entries: Entries) -> Float[Array, "A W"]:
        rows = empty_buffer(entries[0], self.choices.shape[1])
        # The chunks of a source land one after the other, as in one exchange.
        for step, part in zip(self.steps, entries, strict=True):
            rows = step.send(part, rows, "dispatch")
        return rows

    def copies(self, rows: Float[Array, "_ H"]) -> Rows:
        """Return the copies of received rows, in the order of slots."""
        return take_rows(rows, self.places.copy // self.places.place.shape[1], rows_at)

    def copy_weights(self) -> Float[Array, "A 1"]:
        return self.weights.reshape(-1, 1)[self.places.copy]

    @jax.named_scope("combine")
    def sums(self, outputs: Rows, weights: RoutingWeights | None) -> Float[Array, "A H"]:
        """Sum the outputs of each received row."""
        return sum_rows(outputs, self.places.place, weights, self.places.owners(weights)).astype(outputs.dtype)

    @jax.named_scope("combine")
    def weights_back(self, of_copies: Float[Array, "A 1"], into: Float[Array, "B K"]) -> Float[Array, "B K"]:
        of_rows = of_copies[:, 0].at[self.places.place].get(mode="fill", fill_value=0)
        return self.whole.back(of_rows, into, "combine of weights")


@dataclass(frozen=True)
class _Round:
    """Exchanges of a round, one of each chunk."""

    of_chunks: tuple[tuple[Step, tuple[Step, ...]], ...]  # rows of each chunk, and the same by chunk of entries
    steps: tuple[Step, ...]  # rows of all chunks, by chunk of entries
    whole: Step  # rows of all chunks
    slots: int  # slots of a rank
    room: int  # rows of the buffer of a chunk

    @classmethod
    @jax.named_scope("dispatch")
    def of(
        cls,
        i: Int[Array, ""] | int,
        shape: tuple[int, ...],
        slots: int,
        lists: Lists,
        route: Route,
        entries: int,
    ) -> "_Round":
        # `shape` has the numbers of tokens and of choices.
        num_entries, per_token = lists.row.shape
        num_ranks, room = lists.copies.shape[0], route.room(*shape)
        # The rounds of a single hop bound the received rows only: as many rows as all lists have may leave at once.
        whole = lists.round(i, room if route.between else lists.entry.shape[0], route.group)
        if route.chunks == 1:
            of_part = num_entries // entries * min(per_token, num_ranks)
            steps = whole.chunks(entries, min(room, of_part), in_one_buffer=True)
            return cls(((whole, steps),), steps, whole, slots, room)
        num_sent = rows_of_chunk(math.prod(shape), per_token, num_ranks, route.chunks)
        of_chunks = tuple((step, (step,)) for step in lists.steps_of_round(i, num_sent, route.group))
        return cls(of_chunks, (whole,), whole, slots, route.room(*shape, in_chunks=True))

    def part(self, number: int, entry_weights: Float[Array, "N K"], choices: Array | None = None) -> _Part:
        """Return a chunk, after an exchange of the choices of its rows unless they are saved."""
        return _Part.of(*self.of_chunks[number], entry_weights, self.slots, self.room, choices)

    @jax.named_scope("combine")
    def back(self, part: _Part, sums: Float[Array, "A H"], returned: Entries | None) -> Entries:
        """Return the sums of a part to the sources, into the array of all parts."""
        returned = tuple(step.returned(sums) for step in self.steps) if returned is None else returned
        sent = zip(part.steps, returned, strict=True)
        return tuple(step.back(sums, into, "combine") for step, into in sent)

    def given_back(
        self,
        part: _Part,
        of_weights: Float[Array, "A 1"],
        words: Array,
        of_choices: Float[Array, "B K"],
        returned: Entries | None,
    ) -> tuple[Float[Array, "B K"], Entries]:
        """Return the gradients of the weights of a part and of its rows, which are in the shape of exchanges."""
        # On GPUs those of weights travel beside the products for gradients of rows, and these beside the products for
        # gradients of experts.
        of_choices, words = in_order_on_cuda(part.weights_back(of_weights, of_choices), words)
        return of_choices, self.back(part, as_rows(words), returned)

    @jax.named_scope("combine")
    def entry_sums(self, returned: Entries) -> Entries:
        """Sum the returned rows of each entry."""
        return tuple(step.sums(rows) for step, rows in zip(self.steps, returned, strict=True))


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
            one = _Round.of(i, weights.shape, plan.slots, receipt.lists, route, len(entries))
            parts, words, weights_now = list[_Part](), list[Array](), entry_weights
            for number in range(len(one.of_chunks)):
                parts.append(one.part(number, weights_now))
                arrived = as_words(parts[number].send(now))
                # Weights of the next chunk travel beside the products of this one.
                arrived, weights_now = in_order_on_tpu(arrived, weights_now)
                words.append(as_rows(arrived))
            products, returned = [], None
            for number, part in enumerate(parts):
                rows = part.copies(unpacked(transfer, words[number], tokens))
                outputs, of_part = slots.ffn(rows, part.places.group_sizes, keeps_products=saved.hidden)
                products.append(of_part)
                sums = part.sums(outputs, part.weights)
                if number + 1 < len(words):
                    # The rows of a chunk arrive before the sums of the last one return, as in `serve_round`.
                    words[number + 1], sums = in_order_on_cuda(words[number + 1], sums)
                returned = one.back(part, sums, returned)
            assert returned is not None
            sums_of_entries = one.entry_sums(returned)
            kept = Kept(
                rows=tuple(words) if saved.rows else None,
                products=tuple(products) if saved.hidden else None,
                choices=tuple(part.choices for part in parts),
            )
            return (sums_of_entries if total is None else jax.tree.map(jnp.add, total, sums_of_entries)), kept

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
    slots = Slots.of(experts, plan, again, topology, kept.replicas)

    def to_entries() -> Entries:
        return route.to_entries(packed(transfer, tokens), receipt)

    def unpack(words: Array) -> Rows:
        return unpacked(transfer, words, tokens)

    with jax.named_scope("dispatch"):
        # Saved rows replace the first round only; further rounds, usually none, then send their entries again.
        entries = None if route.options.saved.rows else to_entries()
        upstreams = route.to_entries(upstream, receipt)
        entry_weights = route.choices_to_entries(weights, receipt)

    def one_round(
        i: Array | int, sums: tuple[Entries, Array, Any] | None, kept: Kept = Kept()
    ) -> tuple[Entries, Array, Any]:
        sent = () if kept.rows is not None else (to_entries() if entries is None else entries,)
        parts = [optimization_barrier(jnp.int32(i), part) for part in zip(upstreams, *sent, strict=True)]
        now = [tuple(part) for part in zip(*parts, strict=True)]
        one = _Round.of(i, weights.shape, plan.slots, receipt.lists, route, len(upstreams))
        before, of_slots, returned = None if sums is None else sums[2], None, None
        of_choices, weights_now = one.whole.returned(entry_weights), entry_weights
        last: _Part | None = None
        done: tuple[Array, Array] | None = None
        for number in range(len(one.of_chunks)):
            saved, is_last = kept.of_chunk(number), number + 1 == len(one.of_chunks)
            part = one.part(number, weights_now, saved.choices)
            sizes = part.places.group_sizes
            words, of_outputs = _received(part, now, saved, slots.replicas)
            rows = part.copies(unpack(as_rows(words)))
            products = saved.products or slots.inner_products(rows, sizes)
            # The next chunk travels after these products, and gradients of the last one return after them: the compiler
            # would run most products beside the last exchange.
            inner, (now, weights_now, done) = in_order_on_tpu((of_outputs, products), (now, weights_now, done))
            of_outputs, products = inner
            if last is not None and done is not None:
                of_choices, returned = one.given_back(last, *done, of_choices, returned)
            batch = BackwardRows(rows, part.copy_weights(), part.copies(as_rows(of_outputs)), products)
            of_rows, of_weights, of_slots = slots.pull_back(
                batch, sizes, before, route.options, of_slots, is_last=is_last
            )
            last, done = part, (of_weights, as_words(part.sums(of_rows, None)))
            if not is_last:
                # Rows of the next chunk travel beside the products above, and gradients of its outputs beside its own.
                done, now[0] = in_order_on_tpu(done, now[0])
        assert last is not None
        assert done is not None
        of_choices, returned = one.given_back(last, *done, of_choices, returned)
        # Gradients of replicas otherwise travel first, beside the products that hide those of rows.
        words, of_slots = in_order_on_tpu(jax.tree.map(as_words, returned), of_slots)
        of_entries = one.entry_sums(jax.tree.map(as_rows, words))
        # These sums then run beside the last exchanges: the compiler would run them at the end.
        of_entries, of_choices = in_order_on_tpu(of_entries, of_choices)
        total = of_entries, one.whole.choices(of_choices)
        return *(total if sums is None else jax.tree.map(jnp.add, sums[:2], total)), of_slots

    def wide(sums: tuple[Entries, Array, Any]) -> tuple[Entries, Array, Any]:
        return *sums[:2], widened(sums[2])

    of_entries, of_choices, of_slots = _further_rounds(receipt, route, one_round, one_round(0, None, kept), wide)
    of_experts = slots.gradients_at_home(of_slots, plan, again, topology)
    with jax.named_scope("combine"):
        of_tokens = route.to_tokens(of_entries, receipt, tokens)
        return of_tokens, route.choices_to_tokens(of_choices, receipt), of_experts


def _received(
    one: _Part, upstream_and_sent: Sequence[tuple[Array, ...]], kept: Kept, replicas: Experts | None
) -> tuple[Array, Array]:
    """Return the rows of a chunk of a backward round, as transferred, and the gradients of their outputs."""
    upstream, *sent = upstream_and_sent
    if kept.rows is not None:
        return as_words(kept.rows), as_words(one.send(upstream))
    if kept.products is not None:
        of_outputs = as_words(one.send(upstream))
        # The rows then travel beside the products that read none of them.
        of_outputs, sent = in_order(of_outputs, sent)
        return as_words(one.send(sent[0])), of_outputs
    # The upstream gradients then travel beside the products that rematerialize the hidden activations. Replicas would
    # otherwise travel beside these on TPUs. The barrier has this effect although its replicas are not read.
    words, upstream = in_order(as_words(one.send(sent[0])), upstream)
    _, upstream = in_order_on_tpu(replicas, upstream)
    return words, as_words(one.send(upstream))


serve_lists.defvjp(_save, _backward)
