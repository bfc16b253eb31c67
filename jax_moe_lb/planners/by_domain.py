"""Planners that edit a plan share these checks, and in jnp these steps for all domains side by side.

Domains are a leading dimension and not a loop: they do not depend on each other, and a loop of one step per move then
takes as many steps as the busiest domain, not as all together.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import Placement, Quota, host_iota, iota

NO_LOAD = np.int32(np.iinfo(np.int32).max)
"""The load that stands for a rank which must not be chosen as the idlest: no load is higher."""


@pytree
class PlanByDomain:
    """Holds a plan cut into its `B = R / M` domains, with `P = M L` experts at home in each.

    Ranks are numbered inside a domain. `of_domains` makes it; a planner's loop carries it, or parts of it.

    Args:
        placement: `[B, M, S]` int32, the expert in each slot, numbered over all domains; -1 for an empty one.
        quota: `[B, E, M]` int32, the token copies of each expert that each rank of the domain serves.
        served: `[B, P]` int32, the token copies that the home of each of the domain's experts serves of it.
        holds: `[B, P, M]`, whether a rank has a slot for such an expert.
    """

    placement: Int[Array, "B M S"]
    quota: Int[Array, "B E M"]
    served: Int[Array, "B P"]
    holds: Bool[Array, "B P M"]


def check_tokens(name: str, tokens: int) -> None:
    """Refuses a threshold that is no number of tokens above 0.

    Args:
        name: what the message calls the argument.
        tokens: the threshold, in token copies; it must fit int32, in which all planners count.

    Raises:
        ValueError: the threshold is below 1 or above `2**31 - 1`.
    """
    if not 1 <= tokens < 2**31:
        raise ValueError(f"{name} is {tokens}; expected 1 to {2**31 - 1}")


def of_domains(placement: Placement, quota: Quota, members: int) -> PlanByDomain:
    """Cuts a plan into its domains.

    Args:
        placement: `[R, S]` int32, the expert in each slot, -1 for an empty one.
        quota: `[E, R]` int32, the token copies of each expert that each rank serves.
        members: how many ranks a domain has.
    """
    num_experts, num_ranks = quota.shape
    num_domains, num_local = num_ranks // members, num_experts // num_ranks * members
    placement = placement.reshape(num_domains, members, -1)
    quota = quota.reshape(num_experts, num_domains, members).swapaxes(0, 1)
    first = (host_iota(num_domains) * num_local)[:, None, None]
    # Experts of other domains, and the -1 of an empty slot, get an index past the end, which the scatter below drops:
    # -1 itself would be the last expert of the domain.
    local = jnp.where((placement >= first) & (placement < first + num_local), placement - first, num_local)
    domain, member, _ = np.indices(placement.shape)
    holds = jnp.zeros((num_domains, num_local, members), bool).at[domain, local, member].set(True, mode="drop")
    expert = host_iota(num_experts).reshape(num_domains, num_local)
    at_home = expert % num_local // (num_local // members)
    return PlanByDomain(placement, quota, quota[host_iota(num_domains)[:, None], expert, at_home], holds)


def domain_iota(served: Int[Array, "B P"]) -> Int[Array, "B P"]:
    """Returns the number that each domain's experts have over all domains, `[B, P]` int32."""
    return iota(served.size).reshape(served.shape)


def lowest(load: Int[Array, "B #P M"], able: Bool[Array, "B P M"]) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """Returns, for each expert, the able rank with the lowest load, and that load.

    Args:
        load: `[B, M]` int32 or one for every expert, the token copies that each rank serves.
        able: `[B, P, M]`, whether a rank may be chosen for an expert.

    Returns:
        The rank inside its domain, the lower one on a tie, and its load; `NO_LOAD` where no rank is able.
    """
    # Ranks that may not be chosen stay in the array, since shapes are fixed; no load wins against `NO_LOAD`. `argmin`
    # takes the first of equal ones, as the planners in C++ do.
    load = jnp.where(able, load, NO_LOAD)
    return jax.lax.argmin(load, 2, jnp.int32), load.min(2)


def to_first_empty(
    placement: Int[Array, "B M S"], expert: Int[Array, "B #M"], ranks: Bool[Array, "B M"]
) -> Int[Array, "B M S"]:
    """Puts an expert into the first empty slot of each of these ranks, which must have one.

    Args:
        placement: `[B, M, S]` int32, the expert in each slot, -1 for an empty one.
        expert: `[B, M]` int32 or one per domain, numbered over all domains.
        ranks: `[B, M]`, whether a rank takes its expert.
    """
    # The largest of booleans that comes first is the first empty slot. A mask and not a scatter, since most domains
    # change nothing in a step and a scatter would need an index for them.
    first = jax.lax.argmax(placement < 0, 2, jnp.int32)
    here = ranks[:, :, None] & (iota(placement.shape[2])[None, None] == first[:, :, None])
    return jnp.where(here, expert[:, :, None], placement)
