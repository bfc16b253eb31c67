"""Moving token copies straight to the ranks that serve them, and their outputs back.

The sender sorts its copies by destination rank and slot. A receiver's stream is the
copies of rank 0, then of rank 1, and so on; round `i` takes `A` rows of it, so that
no rank ever holds more, whatever the load.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.ops.ragged_all_to_all import ragged_all_to_all
from jax_moe_lb.plan import Plan, load
from jax_moe_lb.split import arrivals, nearest_first
from jax_moe_lb.topology import Topology
from jax_moe_lb.types import Counts, GroupSizes, Rows, iota

Copies = Float[Array, "C H"]
"""The `C = T * K` token copies of a rank, in the order in which it sends them."""

PerRank = Int[Array, "R"]


@pytree
class Receipt:
    """Which copies went where: returned by `Direct.address`, read by everything after it.

    Args:
        order: the copy, `token * K + k`, that stands at each place of the sending order.
        place: its inverse: the place of each copy.
        sent: copies for each rank.
        first_sent: where they start in the sending order.
        first_landed: where they start in the stream of that rank.
        arriving: copies from each rank for each of this rank's slots.
        first_at_source: where the copies from each rank start in its sending order.
        rounds: how often `A` rows are needed by the rank with the highest load.
    """

    order: Int[Array, "C"]
    place: Int[Array, "C"]
    sent: PerRank
    first_sent: PerRank
    first_landed: PerRank
    arriving: Int[Array, "R S"]
    first_at_source: PerRank
    rounds: Int[Array, ""]


@dataclass(frozen=True)
class Direct:
    """Token copies go straight to the rank that serves them.

    Args:
        headroom: rows that a rank can receive in one round, over the mean: `A = ceil(headroom * T * K)`.
            What does not fit takes another round; nothing is ever dropped.
    """

    headroom: float = 1.05

    def __post_init__(self) -> None:
        if not 0 < self.headroom < math.inf:
            raise ValueError(f"headroom is {self.headroom}; expected a finite number above 0")

    def capacity(self, num_copies: int) -> int:
        """`A`, for `T * K` copies on each rank."""
        return max(1, math.ceil(self.headroom * num_copies))

    def address(self, experts: Int[Array, "T K"], counts: Counts, plan: Plan, topology: Topology) -> Receipt:
        """Decides for every copy of this rank where it goes.

        Args:
            experts: expert of each copy, `NO_EXPERT` for one that goes nowhere.
            counts: `[R, E]`, the load of all ranks.
            plan: equal on all ranks.
            topology: its expert axes.

        Raises:
            ValueError: the plan sprays over rails.
        """
        if plan.rails is not None:
            raise ValueError("plan.rails is set; expected None, as Direct does not spray")
        axes, num_copies = topology.expert_axes, experts.size
        me = jax.lax.axis_index(axes)
        going = nearest_first(counts, plan.quota, me, plan.domain, plan.split)
        order = _sending_order(experts.reshape(-1), going, plan)
        arriving = _arriving(counts, plan, me)
        sent = going.sum(0, dtype=jnp.int32)
        first_sent, first_in_stream = _starts(sent), _starts(arriving.sum(1, dtype=jnp.int32))
        # Each rank tells the others where their rows are in its stream and in its sending order.
        told = jax.lax.all_to_all(jnp.stack([first_in_stream, first_sent], 1), axes, 0, 0, tiled=True)
        capacity = self.capacity(num_copies)
        return Receipt(
            order=order,
            place=jnp.zeros_like(order).at[order].set(iota(num_copies)),
            sent=sent,
            first_sent=first_sent,
            first_landed=told[:, 0],
            arriving=arriving,
            first_at_source=told[:, 1],
            rounds=(load(plan).max() + capacity - 1) // capacity,
        )

    def send(self, copies: Copies, receipt: Receipt, i: Int[Array, ""], topology: Topology) -> tuple[Rows, GroupSizes]:
        """Round `i` of the exchange: the rows that this rank serves, sorted by slot, and the rows of each slot.

        Rows beyond the last group are 0.
        """
        capacity = self.capacity(copies.shape[0])
        going, coming = _departures(receipt, i, capacity), _landings(receipt, i, capacity)
        rows = ragged_all_to_all(
            copies,
            jnp.zeros_like(copies, shape=(capacity, copies.shape[1])),
            input_offsets=receipt.first_sent + going.start,
            send_sizes=going.size,
            output_offsets=receipt.first_landed + going.start - i * capacity,
            recv_sizes=coming.sum(1, dtype=jnp.int32),
            axis_name=topology.expert_axes,
            site="dispatch",
        )
        return rows[_by_slot(coming, capacity)], coming.sum(0, dtype=jnp.int32)

    def send_back(self, rows: Rows, receipt: Receipt, i: Int[Array, ""], out: Copies, topology: Topology) -> Copies:
        """The reverse of `send`: writes the outputs of round `i` into `out`, in the sending order."""
        capacity = rows.shape[0]
        going, coming = _departures(receipt, i, capacity), _landings(receipt, i, capacity)
        by_source = jnp.zeros_like(rows).at[_by_slot(coming, capacity)].set(rows)
        per_source = coming.sum(1, dtype=jnp.int32)
        first_in_stream = _starts(receipt.arriving.sum(1, dtype=jnp.int32))
        skipped = jnp.maximum(i * capacity - first_in_stream, 0)
        return ragged_all_to_all(
            by_source,
            out,
            input_offsets=_starts(per_source),
            send_sizes=per_source,
            output_offsets=receipt.first_at_source + skipped,
            recv_sizes=going.size,
            axis_name=topology.expert_axes,
            site="combine",
        )


@dataclass(frozen=True)
class _Slice:
    """Of the copies for each rank, those that travel in one round."""

    start: PerRank
    size: PerRank


def _departures(receipt: Receipt, i: Int[Array, ""], capacity: int) -> _Slice:
    start = jnp.clip(i * capacity - receipt.first_landed, 0, receipt.sent)
    end = jnp.clip((i + 1) * capacity - receipt.first_landed, 0, receipt.sent)
    return _Slice(start, end - start)


def _landings(receipt: Receipt, i: Int[Array, ""], capacity: int) -> Int[Array, "R S"]:
    """Copies from each rank for each slot that arrive in round `i`."""
    sizes = receipt.arriving.reshape(-1)
    start = _starts(sizes)
    in_round = jnp.clip(start + sizes, i * capacity, (i + 1) * capacity) - jnp.clip(
        start, i * capacity, (i + 1) * capacity
    )
    return in_round.reshape(receipt.arriving.shape)


def _sending_order(experts: Int[Array, "C"], going: Int[Array, "E R"], plan: Plan) -> Int[Array, "C"]:
    """Copies sorted by destination rank and slot; those that go nowhere last.

    Sorted by expert, the first copies of an expert go to rank 0, the next to rank 1, and
    so on, as `going` counts them. What is left is to put these runs in order of rank and slot.
    """
    num_copies, num_experts = experts.shape[0], going.shape[0]
    by_expert = jnp.argsort(jnp.where(experts < 0, num_experts, experts), stable=True).astype(jnp.int32)
    run_start = _starts(going.reshape(-1)).reshape(going.shape)
    expert = jnp.maximum(plan.placement, 0)
    rank = iota(plan.num_ranks)[:, None]
    sizes = jnp.where(plan.placement >= 0, going[expert, rank], 0).reshape(-1)
    place = iota(num_copies)
    shift = (run_start[expert, rank].reshape(-1) - _starts(sizes))[_segment(sizes, num_copies)]
    goes = place < sizes.sum(dtype=jnp.int32)
    return by_expert[jnp.where(goes, place + shift, place)]


def _by_slot(coming: Int[Array, "R S"], num_rows: int) -> Int[Array, "A"]:
    """Takes rows that stand by source, then slot, to by slot, then source: the source row of each row."""
    by_slot = coming.T.reshape(-1)
    shift = _starts(coming.reshape(-1)).reshape(coming.shape).T.reshape(-1) - _starts(by_slot)
    row = iota(num_rows)
    used = row < by_slot.sum(dtype=jnp.int32)
    return jnp.where(used, row + shift[_segment(by_slot, num_rows)], row)


def _arriving(counts: Counts, plan: Plan, me: Int[Array, ""]) -> Int[Array, "R S"]:
    """Copies from each rank for each slot of this one; only the experts that it holds matter."""
    slots = plan.placement[me]
    held = jnp.maximum(slots, 0)
    by_slot = arrivals(counts[:, held], plan.quota[held], me, plan.domain, plan.split)
    return jnp.where((slots >= 0)[:, None], by_slot, 0).T


def _segment(sizes: Int[Array, "N"], total: int) -> Int[Array, "C"]:
    """The segment that each of `total` places falls in."""
    segments = iota(sizes.shape[0])
    return jnp.repeat(segments, sizes, total_repeat_length=total)


def _starts(sizes: Int[Array, "N"]) -> Int[Array, "N"]:
    return sizes.cumsum(dtype=jnp.int32) - sizes
