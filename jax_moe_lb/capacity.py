"""Capacity mode: experts take a limited number of token copies, and the others are dropped (GShard, arXiv 2006.16668).

It is here to compare with, and to leave: the same layer with the same parameters drops nothing without a
`capacity_factor`. Each rank has its own share of an expert's capacity, as GShard's groups have, so that no rank needs
to know what others route. Dropped copies are not served at all, and a token whose copies are all dropped gets 0.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.routing import NO_EXPERT
from jax_moe_lb.types import iota


def capacity(factor: float, num_copies: int, num_experts: int) -> int:
    """Returns how many copies of one rank an expert takes, at least 1.

    Args:
        factor: over the mean; 1 to 2 are usual.
        num_copies: `T * K`.
        num_experts: `E`.

    Raises:
        ValueError: `factor` is not positive and finite.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"capacity_factor is {factor}; expected above 0 and finite, or None to drop nothing")
    return max(1, math.ceil(factor * num_copies / num_experts))


def within_capacity(experts: Int[Array, "T K"], num_experts: int, capacity: int) -> Int[Array, "T K"]:
    """Sends copies beyond an expert's capacity nowhere.

    All first choices come before second ones, and among equals earlier tokens before later ones.

    Args:
        experts: the expert of each copy of this rank, `NO_EXPERT` for none.
        num_experts: `E`.
        capacity: how many copies an expert takes.
    """
    by_choice = experts.T.reshape(-1)
    queues = jnp.where(by_choice < 0, num_experts, by_choice)
    order = jnp.argsort(queues, stable=True)
    ordered = queues[order]
    # The place in the queue of an expert: how far a copy stands behind the first one of its expert.
    place = iota(order.size) - jnp.searchsorted(ordered, ordered, method="sort").astype(jnp.int32)
    kept = jnp.zeros_like(ordered, dtype=bool).at[order].set(place < capacity, unique_indices=True)
    return jnp.where(kept, by_choice, NO_EXPERT).reshape(experts.T.shape).T
