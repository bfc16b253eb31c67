"""What transports share: the order in which a rank sends its copies, and moves of whole blocks of rows."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.plan import Plan
from jax_moe_lb.split import arrivals
from jax_moe_lb.types import Counts, iota


def sending_order(experts: Int[Array, "C"], going: Int[Array, "E R"], plan: Plan) -> Int[Array, "C"]:
    """Copies sorted by destination rank and slot; those that go nowhere last.

    Sorted by expert, the first copies of an expert go to rank 0, the next to rank 1, and
    so on, as `going` counts them. What is left is to put these runs in order of rank and slot.
    """
    num_copies, num_experts = experts.shape[0], going.shape[0]
    by_expert = jnp.argsort(jnp.where(experts < 0, num_experts, experts), stable=True).astype(jnp.int32)
    run_start = starts(going.reshape(-1)).reshape(going.shape)
    expert = jnp.maximum(plan.placement, 0)
    rank = iota(plan.num_ranks)[:, None]
    sizes = jnp.where(plan.placement >= 0, going[expert, rank], 0)
    return by_expert[concatenated(run_start[expert, rank], sizes, num_copies)]


def arriving_rows(counts: Counts, plan: Plan, me: Int[Array, ""]) -> Int[Array, "R S"]:
    """Copies from each rank for each slot of this one; only the experts that it holds matter."""
    slots = plan.placement[me]
    held = jnp.maximum(slots, 0)
    by_slot = arrivals(counts[:, held], plan.quota[held], me, plan.domain, plan.split)
    return jnp.where((slots >= 0)[:, None], by_slot, 0).T


def landings(arriving: Int[Array, "R S"], i: Int[Array, ""], capacity: int) -> Int[Array, "R S"]:
    """Copies from each rank for each slot that arrive in round `i`."""
    sizes = arriving.reshape(-1)
    ends = sizes.cumsum(dtype=jnp.int32)
    first, last = i * capacity, (i + 1) * capacity
    return (jnp.clip(ends, first, last) - jnp.clip(ends - sizes, first, last)).reshape(arriving.shape)


def by_slot(coming: Int[Array, "R S"], num_rows: int) -> Int[Array, "A"]:
    """Takes rows that stand by source, then slot, to by slot, then source: the source row of each row."""
    return concatenated(starts(coming.reshape(-1)).reshape(coming.shape).T, coming.T, num_rows)


def concatenated(first: Int[Array, "*N"], size: Int[Array, "*N"], num_rows: int) -> Int[Array, "A"]:
    """Of blocks of rows, put one after the other, the row that each row comes from; beyond them, its own number.

    Args:
        first: where each block starts.
        size: rows of each block; `num_rows` or fewer in all.
        num_rows: rows that are asked for.
    """
    first, size = first.reshape(-1), size.reshape(-1)
    row = iota(num_rows)
    block = jnp.repeat(iota(size.shape[0]), size, total_repeat_length=num_rows)
    return jnp.where(row < size.sum(dtype=jnp.int32), row + (first - starts(size))[block], row)


def starts(sizes: Int[Array, "N"]) -> Int[Array, "N"]:
    """Where blocks of these sizes start, one after the other."""
    return sizes.cumsum(dtype=jnp.int32) - sizes
