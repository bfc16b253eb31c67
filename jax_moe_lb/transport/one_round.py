"""One round: copies to the ranks, the experts' products, and results back.

On NVIDIA GPUs XLA runs one exchange at a time, beside products that do not read its result. The order of the exchanges
is therefore part of the design. A round may have several chunks. Chunk `c + 1` then travels beside the products of
chunk `c`, and forward it arrives before the outputs of chunk `c` return. In a backward round routing weights arrive
first, then the rows. Gradients of the outputs travel beside the products that rematerialize the hidden activations.
Gradients of routing weights return first, and gradients of rows beside the products for gradients of weights.

With saved hidden activations, the gradients of outputs arrive first, and the rows travel beside the products that need
no rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jaxtyping import Array, Float, PyTree

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, empty_buffer_now
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.schedule import in_order, in_order_on_cuda, in_order_on_tpu
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import GroupSizes, ReceivedRows, Rows, Tokens
from jax_moe_lb.kernels.grouped_ffn import Products
from jax_moe_lb.kernels.operands import BackwardRows
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import (
    Copies,
    CopyWeights,
    DispatchOptions,
    Exchange,
    Receipt,
    RoutingWeights,
    to_sending_order,
    weights_in_order,
)

SumsT = TypeVar("SumsT")

TravellingRows = Float[Array, "C W"]
"""Copies as transferred; narrower than tokens with a `QuantizedTransfer`."""

ArrivedRows = Float[Array, "_ *W"]
"""Received rows, as transferred and in the layout of exchanges; see `as_words`."""

OfCopies = tuple[Copies, CopyWeights]
"""Gradients of copies and of the weights, in sending order."""

FirstOfCopies = tuple[None, CopyWeights]
"""The same before the first round, which allocates the array of copies."""

RowWeights = Float[Array, "A 1"]
"""Factor of the output per row."""


@runtime_checkable
class PullBack(Protocol):
    """Backward functions of the rows of a chunk; see `Slots`."""

    def inner_products(self, rows: ReceivedRows, group_sizes: GroupSizes) -> Products | None:
        """Return the products of rows before the activation, for exchanges that follow them; else `None`."""

    def pull_back(
        self,
        batch: BackwardRows,
        group_sizes: GroupSizes,
        sums: Any,
        exchange: DispatchOptions,
        of_chunks: Any = None,
        *,
        is_last: bool = True,
    ) -> tuple[Rows, RowWeights, Any]:
        """Return the gradients of rows and of the weights, and the new sums of those of experts."""


class Batch(NamedTuple):
    """Layer inputs and the gradients of the outputs."""

    tokens: Tokens  # tokens of this rank
    weights: RoutingWeights  # weights of the outputs of a token's copies
    upstream: Tokens  # gradients of the layer outputs


class Kept(NamedTuple):
    """Arrays saved for the backward pass by `Saved`; `None` if it transfers or computes them again."""

    rows: Any = None  # rows received in the first round, as transferred, by chunk
    replicas: Experts | None = None  # weights of the replica slots
    products: Any = None  # products of these rows with `up` and gate, by chunk
    choices: Any = None  # slots and weights of the choices of these rows, by chunk; of `serve_lists` alone, and always

    def of_chunk(self, number: int) -> "Kept":
        """Return the rows, the products and the choices of one chunk."""
        rows, products, choices = (
            None if of_chunks is None else of_chunks[number] for of_chunks in (self.rows, self.products, self.choices)
        )
        return Kept(rows, None, products, choices)


class Round(NamedTuple):
    """A round of an exchange."""

    i: Array  # index of the round, from 0
    receipt: Receipt  # return value of `exchange.address`
    exchange: Exchange  # transport of copies
    topology: Topology  # topology of the layer; copies travel between the ranks of its expert axes
    like: Tokens  # array with the shape and dtype of decoded tokens

    @property
    def chunks(self) -> range:
        """Numbers of the chunks of this round."""
        return range(self.exchange.buffers.chunks)

    def send(self, copies: Copies, chunk: int) -> tuple[ArrivedRows, GroupSizes]:
        """Send the copies of a chunk; see `Exchange.send`."""
        rows, group_sizes = self.exchange.send(copies, self.receipt, self._index(chunk), self.topology)
        return as_words(rows), group_sizes

    def send_back(self, rows: Rows, chunk: int, out: Copies) -> Copies:
        """Write results of a chunk into `out`; see `Exchange.send_back`."""
        return self.exchange.send_back(rows, self.receipt, self._index(chunk), out, self.topology)

    def received(self, words: ArrivedRows) -> ReceivedRows:
        """Return received rows in the dtype of tokens, and in the layout of exchanges unless they are decoded."""
        transfer = self.exchange.transfer
        return words if transfer is None else unpacked(transfer, as_rows(words), self.like)

    def _index(self, chunk: int) -> Array:
        return self.i * len(self.chunks) + chunk


def serve_round(
    one: Round,
    copies: TravellingRows,
    ffn: Callable[[ReceivedRows, GroupSizes], tuple[Rows, Products]],
    out: TravellingRows | None,
) -> tuple[TravellingRows, Kept]:
    """Write the outputs of the copies of a round into `out`, or into a new array; also return rows and products."""
    with jax.named_scope("dispatch"):
        arrived = [one.send(copies, chunk) for chunk in one.chunks]
    products = []
    for chunk in one.chunks:
        words, group_sizes = arrived[chunk]
        outputs, of_chunk = ffn(one.received(words), group_sizes)
        products.append(of_chunk)
        with jax.named_scope("combine"):
            if chunk + 1 < len(arrived):
                arrived[chunk + 1], outputs = in_order_on_cuda(arrived[chunk + 1], outputs)
            words = packed(one.exchange.transfer, outputs)
            out = one.send_back(words, chunk, empty_buffer_now(words, copies.shape[0]) if out is None else out)
    assert out is not None
    # Without `Saved`, these arrays are not used, and XLA removes them.
    return out, Kept(tuple(words for words, _ in arrived), products=tuple(products))


def gradient_round(
    one: Round,
    batch: Batch,
    slots: PullBack,
    carry: tuple[OfCopies | FirstOfCopies, SumsT],
    saved: Kept,
    before: PyTree,
) -> tuple[OfCopies, Any]:
    """Write the gradients of the copies of a round."""
    (of, sums), of_slots = carry, None
    done: tuple[Array, RowWeights] | None = None
    for chunk in one.chunks:
        kept, is_last = saved.of_chunk(chunk), chunk + 1 == len(one.chunks)
        with jax.named_scope("dispatch"):
            row_weights, group_sizes = one.send(weights_in_order(batch.weights, one.receipt), chunk)
            words, row_weights, row_upstream = _received(one, chunk, batch, row_weights, kept, before)
        rows, upstream, products = one.received(words), row_upstream, kept.products
        if len(one.chunks) > 1:
            # The next chunk travels after these products, and gradients of the last one return after them: the compiler
            # would run most products beside the last exchange.
            products = products or slots.inner_products(rows, group_sizes)
            (upstream, products), (batch, done) = in_order_on_tpu((upstream, products), (batch, done))
        of = of if done is None else _returned(one, chunk - 1, *done, of)
        of_chunk = BackwardRows(rows, row_weights, upstream, products)
        of_rows, of_row_weights, of_slots = slots.pull_back(
            of_chunk, group_sizes, sums, one.exchange, of_slots, is_last=is_last
        )
        done = as_words(of_rows), of_row_weights
        if not is_last:
            # Rows of the next chunk travel beside the products above, and gradients of its outputs beside its own.
            done, next_upstream = in_order_on_tpu(done, batch.upstream)
            batch = batch._replace(upstream=next_upstream)
    assert done is not None
    return _returned(one, one.chunks[-1], *done, of), of_slots


@jax.named_scope("combine")
def _returned(
    one: Round, chunk: int, words: Array, of_row_weights: RowWeights, of: OfCopies | FirstOfCopies
) -> OfCopies:
    """Write the gradients of the rows of a chunk, in the layout of exchanges, and of their weights into `of`."""
    of_copies, of_weights = of
    # On TPUs this order would raise temporaries in all chunks but the last one.
    ordered = in_order if chunk + 1 == len(one.chunks) else in_order_on_cuda
    of_weights, words = ordered(one.send_back(of_row_weights, chunk, of_weights), words)
    of_rows = as_rows(words)
    if of_copies is None:
        of_copies = empty_buffer_now(of_rows, of_weights.shape[0])
    return one.send_back(of_rows, chunk, of_copies), of_weights


def _received(
    one: Round, chunk: int, batch: Batch, row_weights: RowWeights, saved: Kept, before: PyTree
) -> tuple[ArrivedRows, RowWeights, ReceivedRows]:
    """Return the rows of a chunk of a backward round, their weights, and the output gradients."""
    per_token, words, upstream = batch.weights.shape[1], saved.rows, batch.upstream
    if saved.rows is None and saved.products is None:
        row_weights, tokens = in_order_on_tpu(row_weights, batch.tokens)
        copies = to_sending_order(tokens, one.receipt, per_token)
        row_weights, copies = in_order_on_cuda(row_weights, copies)
        words, _ = one.send(copies, chunk)
    # The gradients are gathered after the copies are sent, into the same memory.
    (words, before), upstream = in_order((words, before), upstream)
    is_saved = saved.rows is not None or saved.products is not None
    # Otherwise the weights travel beside the products of the saved rows, and the gradients beside none. The barrier is
    # before the gather on TPUs: it would set the layout of the copies, which then would change for the exchange.
    if is_saved:
        row_weights, upstream = in_order_on_tpu(row_weights, upstream)
    of_outputs = to_sending_order(upstream, one.receipt, per_token)
    if is_saved:
        row_weights, of_outputs = in_order_on_cuda(row_weights, of_outputs)
    row_upstream, _ = one.send(of_outputs, chunk)
    if words is None:
        row_upstream, tokens = in_order(row_upstream, batch.tokens)
        words, _ = one.send(to_sending_order(tokens, one.receipt, per_token), chunk)
    return words, row_weights, row_upstream
