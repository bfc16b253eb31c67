"""What planners that edit a plan share: their checks, and in jnp all domains side by side."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import Placement, Quota, host_iota, iota

NO_LOAD = np.int32(np.iinfo(np.int32).max)
"""Of a rank that must not be chosen as the idlest: no load is higher."""


@pytree
class PlanByDomain:
    """The `B = R / M` domains of a plan, with `P = M L` experts at home in each. Ranks are numbered inside a domain.

    Args:
        placement: expert in each slot, numbered over all domains; -1 for an empty one.
        quota: tokens of each expert that each rank serves.
        served: what the home of each of the domain's experts serves.
        holds: whether a rank has a slot for such an expert.
    """

    placement: Int[Array, "B M S"]
    quota: Int[Array, "B E M"]
    served: Int[Array, "B P"]
    holds: Bool[Array, "B P M"]


def check_tokens(name: str, tokens: int) -> None:
    """Refuses a threshold that is no number of tokens above 0."""
    if not 1 <= tokens < 2**31:
        raise ValueError(f"{name} is {tokens}; expected 1 to {2**31 - 1}")


def of_domains(placement: Placement, quota: Quota, members: int) -> PlanByDomain:
    """The plan, domain by domain."""
    num_experts, num_ranks = quota.shape
    num_domains, num_local = num_ranks // members, num_experts // num_ranks * members
    placement = placement.reshape(num_domains, members, -1)
    quota = quota.reshape(num_experts, num_domains, members).swapaxes(0, 1)
    first = (host_iota(num_domains) * num_local)[:, None, None]
    # Experts of other domains, and the -1 of an empty slot, fall off the end.
    local = jnp.where((placement >= first) & (placement < first + num_local), placement - first, num_local)
    domain, member, _ = np.indices(placement.shape)
    holds = jnp.zeros((num_domains, num_local, members), bool).at[domain, local, member].set(True, mode="drop")
    expert = host_iota(num_experts).reshape(num_domains, num_local)
    at_home = expert % num_local // (num_local // members)
    return PlanByDomain(placement, quota, quota[host_iota(num_domains)[:, None], expert, at_home], holds)


def domain_iota(served: Int[Array, "B P"]) -> Int[Array, "B P"]:
    """The number over all domains of each domain's experts."""
    return iota(served.size).reshape(served.shape)


def lowest(load: Int[Array, "B #P M"], able: Bool[Array, "B P M"]) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """The able rank with the lowest load, and that load; `NO_LOAD` where no rank is able."""
    load = jnp.where(able, load, NO_LOAD)
    return jax.lax.argmin(load, 2, jnp.int32), load.min(2)


def to_first_empty(
    placement: Int[Array, "B M S"], expert: Int[Array, "B #M"], ranks: Bool[Array, "B M"]
) -> Int[Array, "B M S"]:
    """The expert in the first empty slot of each of these ranks, which have one."""
    first = jax.lax.argmax(placement < 0, 2, jnp.int32)
    here = ranks[:, :, None] & (iota(placement.shape[2])[None, None] == first[:, :, None])
    return jnp.where(here, expert[:, :, None], placement)
