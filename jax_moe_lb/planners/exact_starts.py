"""Plans of other rules as starts of the search of `exact` in jnp.

`exact` is never less level than `Greedy`, nor than `UltraEP` without a minimum replica size: their plans are among its
candidates.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_moe_lb.core.types import Placement, Quota, iota
from jax_moe_lb.planners.exact_packing import Filled
from jax_moe_lb.planners.greedy import greedy_reference
from jax_moe_lb.planners.ultraep import ultraep_reference

ULTRAEP_EPS = 0.01
"""Default `eps` of `UltraEP`."""


def starts(tokens: Int[Array, "L M"], slots: int) -> tuple[Filled, ...]:
    """Return the plans of the greedy rule and of UltraEP's planner for one domain."""
    tokens = tokens.T
    num_ranks, num_home = tokens.shape
    homes = iota(tokens.size).reshape(num_ranks, num_home) + 0 * tokens
    placement = jnp.pad(homes, ((0, 0), (0, slots)), constant_values=-1)
    at_home = (iota(tokens.size) // num_home)[:, None] == iota(num_ranks)[None]
    quota = jnp.where(at_home, tokens.reshape(-1)[:, None], 0)
    plans = (
        greedy_reference(placement, quota, num_ranks, 1),
        ultraep_reference(placement, quota, num_ranks, ULTRAEP_EPS, 1),
    )
    return tuple(_filled(*plan, num_home) for plan in plans)


def _filled(placement: Placement, quota: Quota, num_home: int) -> Filled:
    expert, rank = placement[:, num_home:].T, iota(len(placement))[None]
    home = iota(len(quota)) // num_home
    return Filled(
        expert=expert,
        tokens=jnp.where(expert >= 0, quota[jnp.maximum(expert, 0), rank], 0),
        left=quota[iota(len(quota)), home].reshape(-1, num_home).T,
        load=quota.sum(0, dtype=jnp.int32),
    )


def fan_out(plan: Filled) -> Int[Array, ""]:
    """Return the most replicas of the experts of one rank."""
    num_home = len(plan.left)
    # An empty slot (-1) has no home.
    home = jnp.where(plan.expert >= 0, plan.expert // num_home, np.int32(-1))
    return (home.reshape(-1)[:, None] == iota(plan.load.size)[None]).sum(0, dtype=jnp.int32).max()
