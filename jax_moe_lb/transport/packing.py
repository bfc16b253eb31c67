"""What exchanges share: the order in which a rank sends its copies, and moves of whole blocks of rows."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.ops.row_blocks import concatenated, starts
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
