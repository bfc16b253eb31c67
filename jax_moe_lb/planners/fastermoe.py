"""FasterMoE's shadowing puts a replica of each hot expert on every rank of its domain."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.types import Counts, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import (
    alike,
    check_plan_shapes,
    check_tokens,
    domain_iota,
    of_domains,
    run_planner,
    to_first_empty,
)


def fastermoe(
    placement: Placement, quota: Quota, counts: Counts, domain: int, min_saved: int
) -> tuple[Placement, Quota]:
    """Adds the replicas that `FasterMoE` describes; the rule to the letter stands in `ffi/planning/fastermoe.h`.

    `FasterMoE` calls it, with a `min_saved` out of its model of time; call it yourself where you know that number.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; the first `E / R` columns are the
            home experts.
        quota: `[E, R]` integers, the token copies of each expert that each rank serves, at least 0; their sum must stay
            below `2**31`.
        counts: `[R, E]` integers, the token copies that each rank routes to each expert, within the same bounds.
        domain: how many ranks a domain has; it divides `R`.
        min_saved: by how many token copies the highest load of a domain must fall for an expert to be copied, at least
            1; about 1000 for large experts on H100.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. A plan that breaks the
        rules above stops the program on a CPU with the custom call; on a GPU with it all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    check_plan_shapes(placement.shape, quota.shape, domain)
    if counts.shape != quota.shape[::-1]:
        raise ValueError(f"counts has shape {counts.shape}; expected {quota.shape[::-1]}")
    check_tokens("min_saved", min_saved)
    placement, quota = run_planner(
        "fastermoe",
        (placement.shape, quota.shape),
        placement,
        quota,
        counts,
        reference=fastermoe_reference,
        domain=domain,
        min_saved=min_saved,
    )
    return placement, quota


def fastermoe_reference(
    placement: Placement, quota: Quota, counts: Counts, domain: int, min_saved: int
) -> tuple[Placement, Quota]:
    """Computes `fastermoe` as a loop over copies, all domains side by side; it runs where no custom call does."""
    placement, quota, counts = alike(placement, quota, counts)
    start = _start(placement, quota, counts, domain)
    end = jax.lax.while_loop(lambda s: s.copied.any(), lambda s: _copy(s, min_saved), start)
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


@pytree
class _Shadows:
    """Carries the loop, over all `B = R / M` domains with `P = M L` experts each. Ranks are numbered inside a domain.

    Args:
        placement: the expert in each slot, numbered over all domains; -1 for an empty one.
        quota: the token copies of each expert that each rank serves.
        load: the token copies that each rank serves.
        leaving: the token copies of each of the domain's experts that each other rank of it would serve, if copied.
        served: the token copies that the home of each expert serves of it.
        at_home: whether the home of an expert serves all of it, and no other rank holds it.
        copied: whether the last step copied an expert.
    """

    placement: Int[Array, "B M S"]
    quota: Int[Array, "B E M"]
    load: Int[Array, "B M"]
    leaving: Int[Array, "B P M"]
    served: Int[Array, "B P"]
    at_home: Bool[Array, "B P"]
    copied: Bool[Array, "B"]


def _start(placement: Placement, quota: Quota, counts: Counts, members: int) -> _Shadows:
    domains, num_experts = of_domains(placement, quota, members), quota.shape[0]
    num_domains, num_local = domains.served.shape
    expert = domain_iota(domains.served)
    home = iota(num_local) // (num_local // members)
    # Only ranks of the expert's own domain: copies from other domains stay with its home.
    own = counts.reshape(num_domains, members, num_experts)[iota(num_domains)[:, None], :, expert]
    # The -1 of an empty slot becomes an expert past the end, which the scatter drops.
    slots = jnp.zeros(num_experts, jnp.int32).at[jnp.where(placement < 0, num_experts, placement)].add(1, mode="drop")
    tokens = counts.sum(0, dtype=jnp.int32)[expert]
    load = domains.quota.sum(1, dtype=jnp.int32)
    return _Shadows(
        placement=domains.placement,
        quota=domains.quota,
        load=load,
        leaving=jnp.where((home[:, None] == iota(members)[None])[None], 0, own),
        served=domains.served,
        at_home=(domains.served == tokens) & (slots[expert] == 1),
        # True everywhere, so that the loop starts; made of a load so that it varies over the mesh axes of the plan.
        copied=load[:, 0] >= 0,
    )


def _copy(s: _Shadows, min_saved: int) -> _Shadows:
    """Copies one expert in every domain in which that pays, and changes nothing in the others."""
    b, members = iota(s.load.shape[0]), iota(s.load.shape[1])[None]
    # `argmax` takes the first of equal ones: the lower rank, and below the lower expert, as the C++ does.
    giver = jax.lax.argmax(s.load, 1, jnp.int32)
    others = members != giver[:, None]
    slots = ((s.placement < 0).any(2) | ~others).all(1)
    home = iota(s.served.shape[1])[None] // (s.served.shape[1] // s.load.shape[1])
    able = s.at_home & (home == giver[:, None]) & slots[:, None]
    # -1 is below what any home serves, so an expert that cannot be copied is chosen only where none can.
    expert = jax.lax.argmax(jnp.where(able, s.served, -1), 1, jnp.int32)
    leaving = s.leaving[b, expert]
    change = leaving - jnp.where(others, 0, leaving.sum(1, dtype=jnp.int32, keepdims=True))
    copied = able[b, expert] & (s.load.max(1) - (s.load + change).max(1) >= min_saved)
    # A domain that is done goes through the step too, with a change of 0, until all domains are.
    change = jnp.where(copied[:, None], change, 0)
    number = domain_iota(s.served)[b, expert]
    return _Shadows(
        placement=to_first_empty(s.placement, number[:, None], copied[:, None] & others),
        quota=s.quota.at[b, number].add(change),
        load=s.load + change,
        leaving=s.leaving,
        served=s.served,
        at_home=s.at_home.at[b, expert].min(~copied),
        copied=copied,
    )
