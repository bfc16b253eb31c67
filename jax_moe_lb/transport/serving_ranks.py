"""Ranks that serve the choices of entries, within the copies of each expert for each rank.

The counts alone decide how many copies of an expert a source sends to each rank, so a source may choose which ones
without an exchange. `in_order` takes them in the order of entries. `preferring` sends copies to ranks that their entry
visits anyway, which saves rows.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.collectives.ragged_all_to_all import starts
from jax_moe_lb.core.types import iota

Choices = Int[Array, "N K"]
"""Expert per entry and choice; negative for none."""

Going = Int[Array, "E P"]
"""Copies per expert and rank."""

PASSES = 2
"""Passes of `preferring`: the second sees the ranks chosen by the first."""


def in_order(experts: Choices, going: Going) -> Int[Array, "N K"]:
    """Return the rank per choice: the first copies of an expert go to the lowest rank."""
    (num_experts, num_ranks), flat = going.shape, experts.reshape(-1)
    by_expert = jnp.argsort(jnp.where(flat < 0, num_experts, flat), stable=True)
    ranks = jnp.tile(iota(num_ranks), num_experts)
    in_turn = jnp.repeat(ranks, going.reshape(-1), total_repeat_length=flat.shape[0])
    rank = jnp.zeros_like(in_turn).at[by_expert].set(in_turn, unique_indices=True).reshape(experts.shape)
    return jnp.where(experts < 0, -1, rank)


def preferring(experts: Choices, going: Going) -> Int[Array, "N K"]:
    """Return the rank per choice: copies prefer ranks that their entry visits, as far as `going` allows."""
    # Choices of experts with a single rank are fixed. In each pass, another choice takes a rank visited by its entry,
    # the one with most copies left; earlier entries come first. The remaining choices follow in order.
    of = jnp.maximum(experts, 0)
    is_single = (going > 0).sum(1) == 1
    rank = jnp.where((experts >= 0) & is_single[of], going.argmax(1).astype(jnp.int32)[of], -1)
    left = jnp.where(is_single[:, None], 0, going)
    for _ in range(PASSES):
        rank, left = _pass(experts, rank, left)
    return jnp.where(rank >= 0, rank, in_order(jnp.where(rank >= 0, -1, experts), left))


def _pass(experts: Choices, rank: Int[Array, "N K"], left: Going) -> tuple[Int[Array, "N K"], Going]:
    """Give choices without a rank the visited rank with most copies left; return ranks and the copies left."""
    (num_experts, num_ranks), of = left.shape, jnp.maximum(experts, 0)
    visits = (rank[:, :, None] == iota(num_ranks)[None, None]).any(1)
    free = jnp.where(visits[:, None], left[of], 0)
    wanted = jnp.where((experts >= 0) & (rank < 0) & (free.max(2) > 0), free.argmax(2).astype(jnp.int32), num_ranks)
    # One key for each pair of expert and rank; choices that want no rank come last.
    key = jnp.where(wanted < num_ranks, of * num_ranks + wanted, num_experts * num_ranks).reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    asked = jnp.zeros_like(key, shape=num_experts * num_ranks + 1).at[key].add(1)
    position = jnp.zeros_like(key).at[order].set(iota(key.shape[0]) - starts(asked)[key[order]])
    takes = (position < jnp.append(left.reshape(-1), 0)[key]).reshape(experts.shape)
    return jnp.where(takes, wanted, rank), left - jnp.minimum(left, asked[:-1].reshape(left.shape))
