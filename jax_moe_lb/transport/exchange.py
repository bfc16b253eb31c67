"""Interface of exchanges: token copies to the serving ranks, and outputs back.

An exchange moves at most one receive buffer of rows per round. This module also contains the sending order of a rank's
copies, and the gathers between tokens and copies. All of these are gathers and sums along an axis: the scatters of
autodiff would add in an undefined order.
"""

import abc
import math
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, concatenated, starts
from jax_moe_lb.core.checks import Count, Positive, checked_fields
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import arrivals
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, DType, GroupSizes, Rows, Tokens, iota, pytree, wide_dtype
from jax_moe_lb.transport.compression import QuantizedTransfer

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in sending order."""


@pytree
class RoundsReceipt:
    """Rounds of a plan, made by `Exchange.address`."""

    # Each exchange adds addresses in a subclass.

    # Number of rounds, by the load of the busiest rank. If several groups share an exchange, it is the maximum over
    # these groups.
    rounds: Int[Array, ""]
    # False if the plan contains impossible rails and rows take other ones; `None` if the exchange reads no such part of
    # the plan. Equal on all ranks.
    follows_plan: Bool[Array, ""] | None


@pytree
class Receipt(RoundsReceipt):
    """Addresses of the copies of a rank."""

    order: Int[Array, "C"]  # copy `token * K + k` at each position of the sending order
    place: Int[Array, "C"]  # position of each copy in the sending order, the inverse of `order`
    # Number of routed copies. They come first; the rows of the others, as of padding tokens, are never written.
    num_going: Int[Array, ""]


ReceiptT = TypeVar("ReceiptT", bound=RoundsReceipt)

TILE_ROWS = 128
"""Row multiple of large receive buffers, the tile of accelerator kernels; small buffers have any size."""


@dataclass(frozen=True)
@checked_fields
class Buffers:
    """Size of a rank's receive buffer, and the number of times that a layer fills it.

    The buffer has `A = ceil(headroom * T * K)` rows, rounded up to a multiple of 128 if it has 1,024 rows or more. Rows
    beyond `A` travel in further rounds; none are dropped. With several chunks, each of them is rounded up.

    Args:
        headroom: rows per round of a rank, relative to the mean load; 1.05 (default) fits balanced loads. More headroom
            takes more memory and saves rounds.
        max_rounds: number of rounds. `None` (default) runs as many as the plan needs, in a loop; the host of a GPU
            waits before each iteration. A number runs exactly that many without a loop, and a plan with more rounds is
            a fault. 1 is usual with balancers that guarantee a load below the headroom.
        chunks: parts of the buffer with exchanges of their own, in both passes of `Once` and `Direct`, but on GPUs in
            the forward pass of `Direct` alone; 1 by default. With 2, the exchange of one part overlaps with products of
            the other. Values are equal, but gradients of experts are sums over the chunks. Chunks of `Forward` are
            parts of the tokens.

    Raises:
        ValueError: `headroom` is not positive and finite, or `max_rounds` or `chunks` is below 1.

    Examples:
        >>> from jax_moe_lb import Buffers
        >>> Buffers(headroom=1.05).rows(4096 * 8)  # for 4096 tokens of 8 experts each
        34432
    """

    headroom: Positive = 1.05
    max_rounds: Count | None = None
    chunks: Count = 1

    def rows(self, num_copies: int) -> int:
        """Return `A`, the rows of a rank in one round.

        Args:
            num_copies: `T * K`, token copies of a rank, equal to the mean load.
        """
        return self.chunks * self.chunk_rows(num_copies)

    def in_one_chunk(self, num_copies: int) -> "Buffers":
        """Return a buffer of one chunk with as many rows.

        Args:
            num_copies: `T * K`, token copies of a rank.
        """
        if self.chunks == 1:
            return self
        # Half a row less, so that the product with the number of copies, which is rounded, has the same ceiling.
        return Buffers((self.rows(num_copies) - 0.5) / max(1, num_copies), self.max_rounds)

    def chunk_rows(self, num_copies: int) -> int:
        """Return the rows of a rank in one exchange, `A` divided by the number of chunks.

        Args:
            num_copies: `T * K`, token copies of a rank, equal to the mean load.
        """
        # At least 1: the number of rounds is a quotient by this, also for a rank without tokens.
        rows = math.ceil(self.headroom * max(1, num_copies) / self.chunks)
        return rows if self.chunks * rows < 8 * TILE_ROWS else math.ceil(rows / TILE_ROWS) * TILE_ROWS


@dataclass(frozen=True)
class Saved:
    """Arrays that a layer saves for the backward pass, instead of transferring or computing them again.

    Inside `jax.checkpoint`, they are saved if the policy contains their names, and transferred or computed again
    otherwise.

    Args:
        replicas: save the weights of the replica slots, `S - L` experts per layer; named "moe_replicas". False by
            default.
        rows: save the rows received in the first round, `A` rows of width `H` in transfer format per layer; named
            "moe_dispatched_rows". Further rounds send their copies again. On GPUs `Direct` copies chunks into one
            array. False by default.
        hidden: save the hidden activations of these rows, as their products with `up` and gate: two arrays of `A` rows
            of width `F` in the dtype of the tokens per layer, one without a gate; named "moe_hidden". The backward pass
            then has 12 instead of 16 units of operations, of 6 in the forward pass. Further rounds compute them again.
            False by default.

    Examples:
        >>> from jax_moe_lb import exact
        >>> exact(2).replace(saved=Saved(replicas=True)).dispatch.saved
        Saved(replicas=True, rows=False, hidden=False)
    """

    replicas: bool = False
    rows: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class DispatchOptions(abc.ABC, Generic[ReceiptT]):
    """Options of a dispatch, and the addresses of the rows."""

    # Base class of `Exchange` and `Dispatch`.

    buffers: Buffers = field(default_factory=Buffers)  # size of the receive buffer and number of rounds; see `Buffers`
    # Quantization of forward rows during transfers; `None` (default) keeps their dtype
    transfer: QuantizedTransfer | None = None
    saved: Saved = Saved()  # arrays saved for the backward pass; none by default, see `Saved`

    takes_chunks: ClassVar[bool] = False
    """True if a round may consist of several exchanges, numbered `round * chunks + chunk`."""

    takes_saved: ClassVar[bool] = False
    """True if the rounds are those of `in_rounds`, which saves arrays."""

    def __post_init__(self) -> None:
        if not isinstance(self.buffers, Buffers):
            raise TypeError(f"buffers is {self.buffers!r}; expected Buffers(headroom=..., max_rounds=...)")
        name = type(self).__name__
        if self.buffers.chunks > 1 and not self.takes_chunks:
            raise ValueError(f"buffers.chunks is {self.buffers.chunks}; expected 1 for {name}")
        if self.saved != Saved() and not self.takes_saved:
            raise ValueError(f"saved is {self.saved}; expected Saved() for {name}")

    @abc.abstractmethod
    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ReceiptT:
        """Compute the destination of every copy of this rank.

        Args:
            experts: `[T, K]` int32, expert per copy; `NO_EXPERT` for unrouted copies.
            counts: `[R, E]` int32, copies by source rank and expert.
            plan: plan, legal for `counts` and equal on all ranks.
            topology: topology of the layer; copies travel between the ranks of the expert axes.

        Returns:
            A receipt of this exchange, for `send` and `send_back`.

        Raises:
            ValueError: the exchange does not support the plan.
        """


@dataclass(frozen=True)
class Exchange(DispatchOptions[ReceiptT]):
    """Interface for moving token copies, used by `in_rounds`."""

    # `send` and `send_back` are transposes of each other; the gradients rely on it. Subclass `CopyDispatch`, which adds
    # `serve`.

    @abc.abstractmethod
    def send(self, copies: Copies, receipt: ReceiptT, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Send the copies of round `i`.

        Args:
            copies: `[C, H]`, copies of this rank in sending order, or output gradients.
            receipt: return value of `address`.
            i: int32, index of the round, from 0; with chunks, index of the exchange.
            topology: the topology passed to `address`.

        Returns:
            Rows `[A, H]` of this rank, sorted by slot, and rows per slot `[S]` int32. Rows after the last slot are
            uninitialized and may contain NaN.
        """

    @abc.abstractmethod
    def send_back(self, rows: Rows, receipt: ReceiptT, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """Write the outputs of round `i` into `out`, in sending order; the transpose of `send`.

        Args:
            rows: `[A, H]`, output per row returned by `send` in this round.
            receipt: return value of `address`.
            i: int32, index of the round, from 0.
            out: `[C, H]`, outputs of earlier rounds; rows of other rounds are unchanged.
            topology: the topology passed to `address`.

        Returns:
            `out` with the outputs of this round.
        """

    def order_in_one_chunk(self, receipt: ReceiptT, i: Int[Array, ""]) -> Int[Array, "A"] | None:
        """Return the index in the chunks of round `i` of each row of one chunk; `None` (default) for the same order."""
        del receipt, i
        return None


def sending_order(experts: Int[Array, "C"], going: Int[Array, "E R"], plan: Plan) -> Int[Array, "C"]:
    """Sort copies by destination rank and slot; unrouted copies come last."""
    # In expert order, the first copies of an expert go to rank 0, the next to rank 1, and so on, by the counts of
    # `going`. The function then orders these runs by rank and slot.
    num_copies, num_experts = experts.shape[0], going.shape[0]
    # Stable: copies of one expert keep the order of their tokens on every device and in every run.
    by_expert = jnp.argsort(jnp.where(experts < 0, num_experts, experts), stable=True).astype(jnp.int32)
    run_start = starts(going.reshape(-1)).reshape(going.shape)
    held = _held(plan)
    return by_expert[concatenated(run_start[held], sent_to_slots(going, plan), num_copies)]


def inverse_order(order: Int[Array, "C"]) -> Int[Array, "C"]:
    """Return the position per copy in an order, by one scatter, which is cheaper than a sort."""
    return jnp.zeros_like(order).at[order].set(iota(order.shape[0]), unique_indices=True)


def sent_to_slots(going: Int[Array, "E R"], plan: Plan) -> Int[Array, "R S"]:
    """Count the copies of this rank per receiving rank and slot, `[R, S]` int32."""
    return jnp.where(plan.placement >= 0, going[_held(plan)], 0)


def _held(plan: Plan) -> tuple[Int[Array, "R S"], Int[Array, "R 1"]]:
    """Return the indices of a table `[E, R]` by slot."""
    # Empty slots read expert 0; mask their values afterwards.
    return jnp.maximum(plan.placement, 0), iota(plan.num_ranks)[:, None]


def arriving_rows(counts: Counts, plan: Plan, me: Int[Array, ""]) -> Int[Array, "R S"]:
    """Count the copies to this rank per sending rank and slot, `[R, S]` int32."""
    # Every rank computes its own counts from the shared counts and plan, for the experts in its slots only.
    slots = plan.placement[me]
    # Empty slots read expert 0; their counts are masked below.
    held = jnp.maximum(slots, 0)
    by_slot = arrivals(counts[:, held], plan.quota[held], me, plan.domain, plan.split)
    return jnp.where((slots >= 0)[:, None], by_slot, 0).T


def landings(arriving: Int[Array, "R S"], i: Int[Array, ""], capacity: int) -> Int[Array, "R S"]:
    """Count the copies of round `i` per sending rank and slot, `[R, S]` int32."""
    sizes = arriving.reshape(-1)
    ends = sizes.cumsum(dtype=jnp.int32)
    # Intersect each block of the stream with the round by clipping both of its ends.
    first, last = i * capacity, (i + 1) * capacity
    return (jnp.clip(ends, first, last) - jnp.clip(ends - sizes, first, last)).reshape(arriving.shape)


def by_slot(coming: Int[Array, "R S"], num_rows: int) -> Int[Array, "A"]:
    """Return the permutation of rows from (source, slot) order to (slot, source) order."""
    return concatenated(starts(coming.reshape(-1)).reshape(coming.shape).T, coming.T, num_rows)


RoutingWeights = Float[Array, "T K"]
"""Router weight per token and choice, float32 or wider."""

CopyWeights = Float[Array, "C 1"]
"""Router weights in sending order, as rows of width 1, which travel like copies."""


def to_sending_order(tokens: Tokens, receipt: Receipt, per_token: int) -> Copies:
    """Gather the `K` copies per token, in sending order."""
    # Unsigned: a signed quotient and a signed index have 20 more operations, which a gather on GPUs repeats for every
    # few entries of a row.
    return rows_at(tokens, receipt.order.astype(jnp.uint32) // per_token)


def sum_of_copies(copies: Copies, receipt: Receipt, per_token: int) -> Tokens:
    """Sum the copies per token; the transpose of `to_sending_order`."""
    # The sum is in the order of choices, in float32 or wider.
    place = receipt.place.reshape(-1, per_token)
    total = sum(_of_choice(copies, receipt, place[:, k], wide_dtype(copies)) for k in range(per_token))
    return jnp.asarray(total).astype(copies.dtype)


def combine(copies: Copies, weights: RoutingWeights, receipt: Receipt) -> Tokens:
    """Compute the weighted sum of each token's expert outputs, the last step of a layer."""
    # It adds one gather per choice to the sum. XLA:CPU then materializes neither the `[T, K, H]` products nor the
    # copies in token order.
    place = receipt.place.reshape(weights.shape)
    total = jnp.zeros((weights.shape[0], copies.shape[1]), weights.dtype)
    # Unrolled over the few choices, in their order: equal inputs give equal bits.
    for k in range(weights.shape[1]):
        total = total + _of_choice(copies, receipt, place[:, k], weights.dtype) * weights[:, k, None]
    return total.astype(copies.dtype)


def weights_in_order(weights: RoutingWeights, receipt: Receipt) -> CopyWeights:
    """Return the weight per copy in sending order."""
    return weights.reshape(-1, 1)[receipt.order]


def weights_by_token(values: CopyWeights, receipt: Receipt, per_token: int) -> RoutingWeights:
    """Return values of copies by token and choice; the transpose of `weights_in_order`."""
    return _of_choice(values, receipt, receipt.place, values.dtype).reshape(-1, per_token)


def _of_choice(copies: Copies, receipt: Receipt, place: Int[Array, "T"], dtype: DType) -> Tokens:
    """Return the copies at these positions; 0 for unrouted copies, whose rows are uninitialized."""
    # Cast after the gather, which then reads the narrower dtype.
    rows = rows_at(copies, place.astype(jnp.uint32))
    return jnp.where((place < receipt.num_going)[:, None], rows, 0).astype(dtype)


def rows_at(rows: Float[Array, "A H"], at: Integer[Array, "B"]) -> Float[Array, "B H"]:
    """Return `rows[at]`, on TPUs in the layout of exchanges."""
    return jax.lax.platform_dependent(
        rows,
        at,
        tpu=lambda rows, at: rows_by_words(rows, at.astype(jnp.int32)),
        default=lambda rows, at: rows[at],
    )


def rows_by_words(rows: Float[Array, "A H"], at: Int[Array, "B"]) -> Float[Array, "B H"]:
    """Return `rows[at]`, gathered in the layout of exchanges on TPUs."""
    # This avoids a layout change of the rows before or after an exchange.
    return as_rows(as_words(rows)[at])
