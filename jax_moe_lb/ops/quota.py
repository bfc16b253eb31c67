"""Who serves how many tokens, for a given placement."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_moe_lb.ops._native import by_platform, like
from jax_moe_lb.ops._planner import alike, is_on_host, plan_call, plan_on_host
from jax_moe_lb.types import AnyArray, Placement, Quota, iota

TokensOfExperts = Int[AnyArray, "E"]


def quota(tokens: TokensOfExperts, placement: Placement) -> Quota:
    """Splits the tokens of every expert over the ranks that hold it, so that loads become level.

    1. An expert that one rank holds is served there whole; it has no choice.
    2. The others follow, heaviest first (ties: the lower expert). Each one's tokens are poured
       onto the ranks that hold it: lift the loads of these ranks that are below it to the
       largest level that the tokens reach, then give what is left, one token each, to the
       lowest of these ranks whose load is at that level.

    The order is fixed and nothing is moved again, so `max(load)` need not be the least that
    the placement allows.

    Args:
        tokens: token copies of each expert, at least 0; their sum must stay below `2**31`.
        placement: expert in each slot, -1 for an empty one; several slots on a rank count as one.

    Returns:
        `[E, R]` int32, whose rows sum to `tokens`. An expert with tokens and no slot stops the
        program on a CPU with the custom call, like every bad value; on a GPU with it the whole
        quota is then -1, and elsewhere that expert's row is 0.

    Raises:
        ValueError: no experts, or a placement without ranks or slots.
    """
    if 0 in (*tokens.shape, *placement.shape):
        raise ValueError(
            f"tokens has shape {tokens.shape}, placement {placement.shape}; expected [E] and [R, S], all at least 1"
        )
    if is_on_host(tokens, placement):
        return plan_on_host("quota", tokens, placement)

    def native(tokens: TokensOfExperts, placement: Placement) -> Quota:
        shape = tokens.shape[0], placement.shape[0]
        return plan_call("quota", (like(placement, shape),), tokens, placement)[0]

    return by_platform(*alike(tokens, placement), native=native, reference=quota_reference)


def quota_reference(tokens: TokensOfExperts, placement: Placement) -> Quota:
    """`quota` as a loop over the experts."""
    tokens, placement = alike(tokens, placement)
    num_experts, num_ranks = tokens.shape[0], placement.shape[0]
    # An empty slot's -1 becomes an expert past the end, which the scatter drops.
    expert = jnp.where(placement < 0, num_experts, placement)
    holds = jnp.zeros((num_experts, num_ranks), bool).at[expert, iota(num_ranks)[:, None]].set(True, mode="drop")
    single = holds & (holds.sum(1, keepdims=True, dtype=jnp.int32) == 1)
    alone = jnp.where(single, tokens[:, None], 0)
    order = jnp.argsort(tokens, descending=True, stable=True)
    shared = holds & ~single

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        load, served = carry
        poured = _pour(tokens[order[i]], load, shared[order[i]])
        return load + poured, served.at[order[i]].add(poured)

    return jax.lax.fori_loop(0, num_experts, step, (alone.sum(0, dtype=jnp.int32), alone))[1]


def _pour(tokens: Int[Array, ""], load: Int[Array, "R"], held: Array) -> Int[Array, "R"]:
    """Tokens of one expert for each rank; none where no rank is `held`."""
    num_held = held.sum(dtype=jnp.int32)
    far = jnp.iinfo(jnp.int32).max
    lowest = jnp.sort(jnp.where(held, load, far))
    is_held = iota(load.shape[0]) < num_held
    # Spread over the lightest n they reach (tokens + sum of these) / n; the right n reaches least.
    reached = (tokens + jnp.cumsum(jnp.where(is_held, lowest, 0), dtype=jnp.int32)) // (iota(load.shape[0]) + 1)
    level = jnp.where(is_held, reached, far).min()
    lift = jnp.where(held, jnp.maximum(level - load, 0), 0)
    at_level = held & (load <= level)
    first = jnp.cumsum(at_level, dtype=jnp.int32) <= tokens - lift.sum(dtype=jnp.int32)
    return lift + (at_level & first).astype(jnp.int32)
