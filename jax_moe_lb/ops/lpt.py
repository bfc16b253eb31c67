"""Longest processing time first (Graham 1969): whole items into bins."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.ops._native import by_platform, like
from jax_moe_lb.ops._planner import alike, is_on_host, plan_call, plan_on_host
from jax_moe_lb.types import AnyArray, iota

Weights = Int[AnyArray, "N"]
Bins = Int[AnyArray, "N"]


def lpt(weights: Weights, num_bins: int, capacity: int) -> Bins:
    """The bin of each item: items go, heaviest first, to the lightest bin that is not full.

    Ties go to the lower index, of items and of bins.

    Args:
        weights: at least 0; their sum must stay below `2**31`.
        num_bins: at least 1.
        capacity: items that a bin holds; `num_bins * capacity >= N`.

    Raises:
        ValueError: too little room. Bad weights stop the program on a CPU with the custom call; on
            a GPU with it all bins are then -1.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; expected at least 1")
    needed = -(-weights.shape[0] // num_bins)
    if capacity < needed:
        raise ValueError(
            f"capacity is {capacity}; expected at least {needed} for {weights.shape[0]} items in {num_bins} bins"
        )
    if is_on_host(weights):
        return plan_on_host("lpt", weights, num_bins=num_bins, capacity=capacity)

    def native(weights: Weights) -> Bins:
        return plan_call("lpt", (like(weights),), weights, num_bins=num_bins, capacity=capacity)[0]

    def reference(weights: Weights) -> Bins:
        return lpt_reference(weights, num_bins, capacity)

    return by_platform(*alike(weights), native=native, reference=reference)


def lpt_reference(weights: Weights, num_bins: int, capacity: int) -> Bins:
    """`lpt` as a loop over the items."""
    weights = jnp.asarray(weights, jnp.int32)
    if not weights.size:
        return weights
    order = jnp.argsort(weights, descending=True, stable=True)
    # Zeros that vary over the same mesh axes as the weights.
    zero = weights.sum(dtype=jnp.int32) * 0
    full = jnp.iinfo(jnp.int32).max

    def place(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        load, held, bins = carry
        item = order[i]
        best = jax.lax.argmin(jnp.where(held < capacity, load, full), 0, jnp.int32)
        return load.at[best].add(weights[item]), held.at[best].add(1), bins.at[item].set(best)

    empty = jnp.zeros(num_bins, jnp.int32) + zero
    start = (empty, empty, iota(weights.shape[0]) + zero)
    return jax.lax.fori_loop(0, weights.shape[0], place, start)[2]
