"""FasterMoE's shadowing: hot experts on every rank of their domain."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.planners.by_domain import check_tokens, domain_iota, of_domains, to_first_empty
from jax_moe_lb.planners.native import alike, check_plan_shapes, run_planner
from jax_moe_lb.types import Counts, Placement, Quota, iota


def fastermoe(
    placement: Placement, quota: Quota, counts: Counts, domain: int, min_saved: int
) -> tuple[Placement, Quota]:
    """The plan with the copies that `FasterMoE` describes; the rule to the letter stands in `ffi/planning/fastermoe.h`.

    Args:
        placement: expert in each slot, -1 for an empty one; the first `E / R` columns are the home experts.
        quota: tokens of each expert that each rank serves, at least 0; their sum must stay below `2**31`.
        counts: tokens of each rank for each expert, likewise.
        domain: ranks of a domain.
        min_saved: tokens by which the highest load of a domain must fall for an expert to be copied.

    Returns:
        Placement and quota, int32; of NumPy arrays, NumPy arrays. A plan that breaks the rules above
        stops the program on a CPU with the custom call; on a GPU with it all entries are then -1.

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
    """`fastermoe` as a loop over copies, all domains side by side."""
    placement, quota, counts = alike(placement, quota, counts)
    start = _start(placement, quota, counts, domain)
    end = jax.lax.while_loop(lambda s: s.copied.any(), lambda s: _copy(s, min_saved), start)
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


@pytree
class _Shadows:
    """All domains, `B = R / M` of them, with `P = M L` experts each. Ranks are numbered inside a domain.

    Args:
        placement: expert in each slot, numbered over all domains; -1 for an empty one.
        quota: tokens of each expert that each rank serves.
        load: tokens of each rank.
        leaving: tokens of each of the domain's experts that its other ranks would serve of it.
        served: what its home serves of it.
        at_home: whether its home serves all of it, and no other rank holds it.
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
        copied=load[:, 0] >= 0,
    )


def _copy(s: _Shadows, min_saved: int) -> _Shadows:
    """One copy in every domain in which one pays."""
    b, members = iota(s.load.shape[0]), iota(s.load.shape[1])[None]
    giver = jax.lax.argmax(s.load, 1, jnp.int32)
    others = members != giver[:, None]
    slots = ((s.placement < 0).any(2) | ~others).all(1)
    home = iota(s.served.shape[1])[None] // (s.served.shape[1] // s.load.shape[1])
    able = s.at_home & (home == giver[:, None]) & slots[:, None]
    expert = jax.lax.argmax(jnp.where(able, s.served, -1), 1, jnp.int32)
    leaving = s.leaving[b, expert]
    change = leaving - jnp.where(others, 0, leaving.sum(1, dtype=jnp.int32, keepdims=True))
    copied = able[b, expert] & (s.load.max(1) - (s.load + change).max(1) >= min_saved)
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
