"""Capacity mode, in which an expert takes a limited number of token copies, and the layer drops the others.

Use it for comparisons: without `capacity_factor` the same layer is dropless. Each rank has its own share of an expert's
capacity, as in GShard's groups (arXiv 2006.16668), so capacity needs no communication. The output of a token is 0 if
all its copies are dropped.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.core.types import iota
from jax_moe_lb.routing.routers import NO_EXPERT


def capacity(factor: float, num_copies: int, num_experts: int) -> int:
    """Return the capacity of an expert for the copies of one rank, at least 1 and at most all of them."""
    # A large factor may exceed int32, and the product even float64.
    return max(1, math.ceil(min(factor * num_copies / num_experts, num_copies)))


def within_capacity(experts: Int[Array, "T K"], num_experts: int, capacity: int) -> Int[Array, "T K"]:
    """Replace the experts of copies beyond capacity by `NO_EXPERT`."""
    # All first choices precede all second choices, and earlier tokens precede later ones within a choice.
    by_choice = experts.T.reshape(-1)
    queues = jnp.where(by_choice < 0, num_experts, by_choice)
    order = jnp.argsort(queues, stable=True)
    ordered = queues[order]
    # Queue position: the distance from the first copy of the same expert.
    place = iota(order.size) - jnp.searchsorted(ordered, ordered, method="sort").astype(jnp.int32)
    kept = jnp.zeros_like(ordered, dtype=bool).at[order].set(place < capacity, unique_indices=True)
    return jnp.where(kept, by_choice, NO_EXPERT).reshape(experts.T.shape).T
