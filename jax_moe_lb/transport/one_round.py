"""One round: copies to the ranks, the experts' products, and results back.

On NVIDIA GPUs XLA runs one exchange at a time, beside products that do not read its result. The order of the exchanges
is therefore part of the design. A forward round may have several chunks. Chunk `c + 1` then travels beside the products
of chunk `c`, and arrives before the outputs of chunk `c` return. In a backward round routing weights arrive first, then
the rows. Gradients of the outputs travel beside the products that rematerialize the hidden activations. Gradients of
routing weights return first, and gradients of rows beside the products for gradients of weights.

With saved hidden activations, the gradients of outputs arrive first, and the rows travel beside the products that need
no rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, empty_buffer_now
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.schedule import in_order, in_order_on_cuda, in_order_on_tpu
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import GroupSizes, Rows, Tokens
from jax_moe_lb.kernels.grouped_ffn import Products
from jax_moe_lb.kernels.operands import BackwardRows
from jax_moe_lb.transport.compression import packed, unpacked
from jax_moe_lb.transport.exchange import (
    Copies,
    CopyWeights,
    Exchange,
    Receipt,
    RoutingWeights,
    to_sending_order,
    weights_in_order,
)

SumsT = TypeVar("SumsT")

TravellingRows = Float[Array, "C W"]
"""Copies as transferred; narrower than tokens with a `QuantizedTransfer`."""

ArrivedRows = Float[Array, "_ W"]
"""Received rows, as transferred."""

OfCopies = tuple[Copies, CopyWeights]
"""Gradients of copies and of the weights, in sending order."""

FirstOfCopies = tuple[None, CopyWeights]
"""The same before the first round, which allocates the array of copies."""

RowWeights = Float[Array, "A 1"]
"""Factor of the output per row."""

PullBack = Callable[[BackwardRows, GroupSizes, Any], tuple[Rows, RowWeights, Any]]
"""Backward function of the rows of one round.

It takes the rows, group sizes, and gradient sums of the experts (`None` at first). It returns gradients of the rows and
of the weights, and the new sums."""


class Batch(NamedTuple):
    """Layer inputs and the gradients of the outputs."""

    tokens: Tokens  # tokens of this rank
    weights: RoutingWeights  # weights of the outputs of a token's copies
    upstream: Tokens  # gradients of the layer outputs


class Kept(NamedTuple):
    """Arrays saved for the backward pass by `Saved`; `None` if it transfers or computes them again."""

    rows: Any = None  # rows received in the first round, in transfer format; by chunk in `serve_lists`
    replicas: Experts | None = None  # weights of the replica slots
    products: Any = None  # products of these rows with `up` and gate; by chunk in `serve_lists`

    def of_chunk(self, number: int) -> "Kept":
        """Return the rows and the products of one chunk."""
        rows = None if self.rows is None else self.rows[number]
        return Kept(rows, products=None if self.products is None else self.products[number])


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

    def send(self, copies: Copies, chunk: int) -> tuple[Rows, GroupSizes]:
        """Send the copies of a chunk; see `Exchange.send`."""
        return self.exchange.send(copies, self.receipt, self._index(chunk), self.topology)

    def send_back(self, rows: Rows, chunk: int, out: Copies) -> Copies:
        """Write results of a chunk into `out`; see `Exchange.send_back`."""
        return self.exchange.send_back(rows, self.receipt, self._index(chunk), out, self.topology)

    def decoded(self, words: ArrivedRows) -> Rows:
        """Return received rows in the dtype of tokens."""
        return unpacked(self.exchange.transfer, words, self.like)

    def _index(self, chunk: int) -> Array:
        return self.i * len(self.chunks) + chunk


def serve_round(
    one: Round,
    copies: TravellingRows,
    ffn: Callable[[Rows, GroupSizes], tuple[Rows, Products]],
    out: TravellingRows | None,
) -> tuple[TravellingRows, ArrivedRows, Products]:
    """Write the outputs of the copies of a round into `out`, or into a new array."""
    with jax.named_scope("dispatch"):
        arrived = [one.send(copies, chunk) for chunk in one.chunks]
    products = []
    for chunk in one.chunks:
        words, group_sizes = arrived[chunk]
        outputs, of_chunk = ffn(one.decoded(words), group_sizes)
        products.append(of_chunk)
        with jax.named_scope("combine"):
            if chunk + 1 < len(arrived):
                arrived[chunk + 1], outputs = in_order_on_cuda(arrived[chunk + 1], outputs)
            words = packed(one.exchange.transfer, outputs)
            out = one.send_back(words, chunk, empty_buffer_now(words, copies.shape[0]) if out is None else out)
    assert out is not None
    # Without `Saved`, these arrays are not used, and XLA removes them.
    order = one.exchange.order_in_one_chunk(one.receipt, one.i) if len(one.chunks) > 1 else None
    in_one = partial(_in_one, order=order)
    return out, in_one(*(words for words, _ in arrived)), jax.tree.map(in_one, *products)


def _in_one(*parts: Array, order: Int[Array, "A"] | None) -> Array:
    """Return the rows of all chunks as one chunk, which is that of the backward pass."""
    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return rows if order is None else rows[order]


def gradient_round(
    one: Round,
    batch: Batch,
    pull_back: PullBack,
    carry: tuple[OfCopies | FirstOfCopies, SumsT],
    saved: Kept,
    before: PyTree,
) -> tuple[OfCopies, SumsT]:
    """Write the gradients of the copies of a round."""
    with jax.named_scope("dispatch"):
        row_weights, group_sizes = one.send(weights_in_order(batch.weights, one.receipt), 0)
        words, row_weights, row_upstream = _received(one, batch, row_weights, saved, before)
    (of_copies, of_weights), sums = carry
    rows = BackwardRows(one.decoded(words), row_weights, as_words(row_upstream), saved.products)
    of_rows, of_row_weights, sums = pull_back(rows, group_sizes, sums)
    with jax.named_scope("combine"):
        # The barrier sets the layout of the rows, which is that of exchanges.
        of_weights, travelling = in_order(one.send_back(of_row_weights, 0, of_weights), as_words(of_rows))
        of_rows = as_rows(travelling)
        if of_copies is None:
            of_copies = empty_buffer_now(of_rows, batch.weights.size)
        of_copies = one.send_back(of_rows, 0, of_copies)
    return (of_copies, of_weights), sums


def _received(
    one: Round, batch: Batch, row_weights: RowWeights, saved: Kept, before: PyTree
) -> tuple[ArrivedRows, RowWeights, Rows]:
    """Return the rows of a backward round, their weights, and the output gradients."""
    per_token, words, upstream = batch.weights.shape[1], saved.rows, batch.upstream
    if saved.rows is None and saved.products is None:
        row_weights, tokens = in_order_on_tpu(row_weights, batch.tokens)
        copies = to_sending_order(tokens, one.receipt, per_token)
        row_weights, copies = in_order_on_cuda(row_weights, copies)
        words, _ = one.send(copies, 0)
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
    row_upstream, _ = one.send(of_outputs, 0)
    if words is None:
        row_upstream, tokens = in_order(row_upstream, batch.tokens)
        words, _ = one.send(to_sending_order(tokens, one.receipt, per_token), 0)
    return words, row_weights, row_upstream
