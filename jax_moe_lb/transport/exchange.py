"""The interface of exchanges: token copies to the ranks that serve them, and outputs back.

An exchange moves as many rows a round as a rank can receive. This module also has the sending order of a rank's copies,
and the gathers between its tokens and their copies. All of these are gathers and sums along an axis: a scatter, which
autodiff would generate, adds in no fixed order.
"""

import abc
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.collectives.ragged_all_to_all import as_rows, as_words, concatenated, starts
from jax_moe_lb.core.plan import Plan
from jax_moe_lb.core.split import arrivals
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, DType, GroupSizes, Rows, Tokens, iota, pytree, wide_dtype
from jax_moe_lb.transport.compression import QuantizedTransfer

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in the order in which it sends them."""


@pytree
class Receipt:
    """Says which copies go where. `Exchange.address` returns it; each exchange adds what it needs in a subclass.

    Args:
        order: `[C]` int32, the copy, `token * K + k`, that stands at each place of the sending order.
        place: `[C]` int32, the inverse of `order`: the place of each copy.
        num_going: int32, how many copies go somewhere. They stand first; nothing is ever written for the others, which
            padding tokens have.
        rounds: int32, how often `A` rows are needed by the rank with the highest load. Where all groups must take part
            in an exchange, it is the highest number of any group.
        follows_plan: false where the plan says of the way of rows what cannot be, and they take another; `None` where
            it says nothing that this exchange would have to look at. Equal on all ranks.
    """

    order: Int[Array, "C"]
    place: Int[Array, "C"]
    num_going: Int[Array, ""]
    rounds: Int[Array, ""]
    follows_plan: Bool[Array, ""] | None


ReceiptT = TypeVar("ReceiptT", bound=Receipt)

TILE_ROWS = 128
"""Large receive buffers are a multiple of this, as kernels of accelerators take them; small ones need not be."""


@dataclass(frozen=True)
class Buffers:
    """Size of a rank's receive buffer, and the number of times that a layer fills it.

    The buffer has `A = ceil(headroom * T * K)` rows, rounded up to whole tiles of 128 rows from 1,024 rows on. Rows
    that do not fit travel in another round; none are dropped.

    Args:
        headroom: rows that a rank can receive in one round, over the mean load; 1.05 (default) fits balanced loads.
            More headroom costs memory and saves rounds.
        max_rounds: rounds of a program. `None` (default) runs as many as a plan needs, in a loop, and the host of a GPU
            waits before each iteration. A number runs exactly that many, without a loop; a plan that needs more is a
            fault. 1 is usual behind balancers that promise a load below the headroom.

    Raises:
        ValueError: `headroom` is not positive and finite, or `max_rounds` is below 1.

    Examples:
        >>> from jax_moe_lb import Buffers
        >>> Buffers(headroom=1.05).rows(4096 * 8)  # for 4096 tokens of 8 experts each
        34432
    """

    headroom: float = 1.05
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.headroom < math.inf:
            raise ValueError(f"headroom is {self.headroom}; expected a finite number above 0")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ValueError(f"max_rounds is {self.max_rounds}; expected at least 1, or None for as many as are needed")

    def rows(self, num_copies: int) -> int:
        """Return `A`, the rows that a rank can receive in one round.

        Args:
            num_copies: `T * K`, the token copies of every rank and so the mean load.
        """
        # At least 1, so that a rank without tokens does not divide by 0 when it counts rounds.
        rows = max(1, math.ceil(self.headroom * num_copies))
        return rows if rows < 8 * TILE_ROWS else math.ceil(rows / TILE_ROWS) * TILE_ROWS


class Kernels(Enum):
    """Implementation of the grouped matrix products on NVIDIA Hopper GPUs; other devices have one implementation.

    Examples:
        >>> from jax_moe_lb import exact
        >>> from jax_moe_lb.transport import Kernels
        >>> exact(2).replace(kernels=Kernels.OWN).dispatch.kernels
        <Kernels.OWN: 'own'>
    """

    LIBRARY = "library"
    """Kernels of tokamax (default). They need home experts and replicas in one array, which costs copies."""
    OWN = "own"
    """Kernels of this package, for the shapes that they support. They read home experts and replicas in place, which
    saves memory and traffic (`docs/how-to/gpu.md`). **They have not run on a GPU yet**, so compare losses first."""


@dataclass(frozen=True)
class Exchange(abc.ABC, Generic[ReceiptT]):
    """Moves token copies. `send` and `send_back` are each other's transposes, and gradients rely on it.

    Derive from `Dispatch`, which serves by it; this class alone says what `in_rounds` needs.

    Args:
        buffers: size of the receive buffer and number of rounds; see `Buffers`.
        transfer: quantization of rows while they travel forward; `None` (default) keeps their dtype.
        kernels: implementation of the experts' products on Hopper; `Kernels.LIBRARY` by default.
    """

    buffers: Buffers = field(default_factory=Buffers)
    transfer: QuantizedTransfer | None = None
    kernels: Kernels = Kernels.LIBRARY

    def __post_init__(self) -> None:
        if not isinstance(self.buffers, Buffers):
            raise TypeError(f"buffers is {self.buffers!r}; expected Buffers(headroom=..., max_rounds=...)")

    @abc.abstractmethod
    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> ReceiptT:
        """Decides for every copy of this rank where it goes.

        Args:
            experts: `[T, K]` int32, the expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]` int32, the copies that each rank routes to each expert.
            plan: the plan, legal for `counts` and equal on all ranks.
            topology: its expert axes are the ranks that copies travel between.

        Returns:
            A receipt of this exchange's own kind, which `send` and `send_back` read.

        Raises:
            ValueError: the plan says something that this exchange does not do.
        """

    @abc.abstractmethod
    def send(self, copies: Copies, receipt: ReceiptT, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Makes round `i`: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group hold anything, even NaN.

        Args:
            copies: `[C, H]`, what this rank sends, in the sending order: copies, or gradients of their outputs.
            receipt: what `address` returned.
            i: int32, the number of the round, from 0.
            topology: that of `address`.

        Returns:
            `[A, H]`, and `[S]` int32.
        """

    @abc.abstractmethod
    def send_back(self, rows: Rows, receipt: ReceiptT, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """Writes the outputs of round `i` into `out`, in the sending order: the transpose of `send`.

        Args:
            rows: `[A, H]`, one output for each row that `send` returned in this round.
            receipt: what `address` returned.
            i: int32, the number of the round, from 0.
            out: `[C, H]`, the outputs of earlier rounds; rows of other rounds stay as they are.
            topology: that of `address`.
        """


def sending_order(experts: Int[Array, "C"], going: Int[Array, "E R"], plan: Plan) -> Int[Array, "C"]:
    """Sorts copies by destination rank and slot; those that go nowhere come last.

    Sorted by expert, the first copies of an expert go to rank 0, the next to rank 1, and so on, as `going` counts them.
    What is left is to put these runs in order of rank and slot.

    Args:
        experts: `[C]` int32, the expert of each copy of this rank, negative for one that goes nowhere.
        going: `[E, R]` int32, how many of this rank's copies of each expert go to each rank.
        plan: its placement says in which slot a rank holds an expert.

    Returns:
        `[C]` int32, the copy that stands at each place of the order.
    """
    num_copies, num_experts = experts.shape[0], going.shape[0]
    # Stable, so that copies of one expert keep the order of their tokens on every device and in every run.
    by_expert = jnp.argsort(jnp.where(experts < 0, num_experts, experts), stable=True).astype(jnp.int32)
    run_start = starts(going.reshape(-1)).reshape(going.shape)
    held = _held(plan)
    return by_expert[concatenated(run_start[held], sent_to_slots(going, plan), num_copies)]


def inverse_order(order: Int[Array, "C"]) -> Int[Array, "C"]:
    """Returns the place of each copy in an order: a permutation is inverted by one scatter, cheaper than by a sort.

    Args:
        order: `[C]` int32, the copy at each place.
    """
    return jnp.zeros_like(order).at[order].set(iota(order.shape[0]), unique_indices=True)


def sent_to_slots(going: Int[Array, "E R"], plan: Plan) -> Int[Array, "R S"]:
    """Counts the copies that this rank sends to each slot of each rank, `[R, S]` int32.

    Args:
        going: `[E, R]` int32, how many of this rank's copies of each expert go to each rank.
        plan: its placement says in which slot a rank holds an expert.
    """
    return jnp.where(plan.placement >= 0, going[_held(plan)], 0)


def _held(plan: Plan) -> tuple[Int[Array, "R S"], Int[Array, "R 1"]]:
    """Indexes tables `[E, R]` by slot. An empty slot reads expert 0; what that gives must be replaced by 0."""
    return jnp.maximum(plan.placement, 0), iota(plan.num_ranks)[:, None]


def arriving_rows(counts: Counts, plan: Plan, me: Int[Array, ""]) -> Int[Array, "R S"]:
    """Counts the copies from each rank for each slot of this one, `[R, S]` int32.

    Every rank can do so for itself, since all know counts and plan; only the experts that it holds matter.

    Args:
        counts: `[R, E]` int32, the load of all ranks.
        plan: equal on all ranks.
        me: the number of this rank.
    """
    slots = plan.placement[me]
    # An empty slot reads expert 0, and its rows are then set to 0.
    held = jnp.maximum(slots, 0)
    by_slot = arrivals(counts[:, held], plan.quota[held], me, plan.domain, plan.split)
    return jnp.where((slots >= 0)[:, None], by_slot, 0).T


def landings(arriving: Int[Array, "R S"], i: Int[Array, ""], capacity: int) -> Int[Array, "R S"]:
    """Counts the copies from each rank for each slot that arrive in round `i`, `[R, S]` int32.

    Args:
        arriving: `[R, S]` int32, as `arriving_rows` counts them for all rounds.
        i: the round.
        capacity: `A`, the rows of a round.
    """
    sizes = arriving.reshape(-1)
    ends = sizes.cumsum(dtype=jnp.int32)
    # The part of each block of the stream that lies in the round: both of its ends, clipped to the round.
    first, last = i * capacity, (i + 1) * capacity
    return (jnp.clip(ends, first, last) - jnp.clip(ends - sizes, first, last)).reshape(arriving.shape)


def by_slot(coming: Int[Array, "R S"], num_rows: int) -> Int[Array, "A"]:
    """Returns, for rows that stand by source, then slot, and are to stand by slot, then source, the old row of each.

    Args:
        coming: `[R, S]` int32, the rows from each source for each slot.
        num_rows: `A`; rows beyond those that come keep their number.
    """
    return concatenated(starts(coming.reshape(-1)).reshape(coming.shape).T, coming.T, num_rows)


RoutingWeights = Float[Array, "T K"]
"""The router's weight of each token's choices, in float32 at least."""

CopyWeights = Float[Array, "C 1"]
"""The same in the sending order, as rows of width 1, which travel as copies do."""


def to_sending_order(tokens: Tokens, receipt: Receipt, per_token: int) -> Copies:
    """Makes the `K` copies of each token, in the order in which they are sent.

    Args:
        tokens: `[T, H]`, the tokens of this rank, or the gradients of their outputs.
        receipt: it says which copy stands where.
        per_token: `K`, the experts of each token.

    Returns:
        `[T * K, H]`.
    """
    return _rows_at(tokens, receipt.order // per_token)


def sum_of_copies(copies: Copies, receipt: Receipt, per_token: int) -> Tokens:
    """Sums the copies of each token, in the order of choices and in float32 at least: the transpose of
    `to_sending_order`.

    Args:
        copies: `[T * K, H]`, in the sending order of `receipt`.
        receipt: it says which copy stands where; those that go nowhere count as 0.
        per_token: `K`.

    Returns:
        `[T, H]` in the dtype of `copies`.
    """
    place = receipt.place.reshape(-1, per_token)
    total = sum(_of_choice(copies, receipt, place[:, k], wide_dtype(copies)) for k in range(per_token))
    return jnp.asarray(total).astype(copies.dtype)


def combine(copies: Copies, weights: RoutingWeights, receipt: Receipt) -> Tokens:
    """Computes the weighted sum of each token's expert outputs: the last step of a layer.

    It takes one gather per choice, added as it comes: XLA:CPU then never writes the `[T, K, H]` products, nor the
    copies in token order.

    Args:
        copies: `[T * K, H]`, the experts' outputs in the sending order of `receipt`.
        weights: `[T, K]`, the router's, in float32 at least; sums are kept in their dtype.
        receipt: it says where each copy stands; those that go nowhere count as 0.

    Returns:
        `[T, H]` in the dtype of `copies`.
    """
    place = receipt.place.reshape(weights.shape)
    total = jnp.zeros((weights.shape[0], copies.shape[1]), weights.dtype)
    # Unrolled over the few choices, in their order, so that equal inputs give equal bits.
    for k in range(weights.shape[1]):
        total = total + _of_choice(copies, receipt, place[:, k], weights.dtype) * weights[:, k, None]
    return total.astype(copies.dtype)


def weights_in_order(weights: RoutingWeights, receipt: Receipt) -> CopyWeights:
    """Returns the weight of each copy in the sending order.

    Args:
        weights: `[T, K]`, the router's.
        receipt: it says which copy stands where.
    """
    return weights.reshape(-1, 1)[receipt.order]


def weights_by_token(values: CopyWeights, receipt: Receipt, per_token: int) -> RoutingWeights:
    """Returns what each copy has by token and choice, 0 for one that goes nowhere: the transpose of `weights_in_order`.

    Args:
        values: `[T * K, 1]`, in the sending order of `receipt`.
        receipt: it says where each copy stands.
        per_token: `K`.
    """
    return _of_choice(values, receipt, receipt.place, values.dtype).reshape(-1, per_token)


def _of_choice(copies: Copies, receipt: Receipt, place: Int[Array, "T"], dtype: DType) -> Tokens:
    """The copy at each of these places; 0 for one that goes nowhere, which nobody wrote."""
    # Widened after the gather, so that it reads narrow copies.
    return jnp.where((place < receipt.num_going)[:, None], _rows_at(copies, place), 0).astype(dtype)


def _rows_at(rows: Float[Array, "A H"], at: Int[Array, "B"]) -> Float[Array, "B H"]:
    def as_they_are(rows: Array, at: Array) -> Array:
        return rows[at]

    return jax.lax.platform_dependent(rows, at, tpu=rows_by_words, default=as_they_are)


def rows_by_words(rows: Float[Array, "A H"], at: Int[Array, "B"]) -> Float[Array, "B H"]:
    """Returns the rows at these places, `rows[at]`, in the layout that an exchange on a TPU has.

    Gathered so, rows are not turned around before an exchange or after it.

    Args:
        rows: `[A, H]`.
        at: `[B]` int32.
    """
    return as_rows(as_words(rows)[at])
