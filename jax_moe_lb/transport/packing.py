"""What exchanges share: the order in which a rank sends its copies, and moves of whole blocks of rows."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.plan import Plan
from jax_moe_lb.split import arrivals
from jax_moe_lb.types import Counts, iota


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
    # An empty slot reads expert 0, and its size is then set to 0.
    expert = jnp.maximum(plan.placement, 0)
    rank = iota(plan.num_ranks)[:, None]
    sizes = jnp.where(plan.placement >= 0, going[expert, rank], 0)
    return by_expert[concatenated(run_start[expert, rank], sizes, num_copies)]


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


def concatenated(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Puts blocks of rows one after the other: returns the row that each row comes from.

    Rows beyond the blocks get their own number, so that the result is a permutation where the blocks together are the
    first rows.

    Args:
        first: int32, the row at which each block starts.
        size: int32, the rows of each block; `num_rows` or fewer in all.
        num_rows: how many rows are asked for.
    """
    first, size = first.reshape(-1), size.reshape(-1)
    row = iota(num_rows)
    # `total_repeat_length` keeps the shape static. It also repeats the last block to the end, which is masked below.
    block = jnp.repeat(iota(size.shape[0]), size, total_repeat_length=num_rows)
    return jnp.where(row < size.sum(dtype=jnp.int32), row + (first - starts(size))[block], row)


def starts(sizes: Int[Array, "N"]) -> Int[Array, "N"]:
    """Returns where blocks of these sizes start, one after the other."""
    return sizes.cumsum(dtype=jnp.int32) - sizes
