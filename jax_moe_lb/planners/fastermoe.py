"""FasterMoE's shadowing: a replica per hot expert on every rank of the domain."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.types import Counts, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import (
    check_plan_shapes,
    check_tokens,
    domain_iota,
    first_argmax,
    of_domains,
    run_planner,
    to_first_empty,
)


def fastermoe(
    placement: Placement, quota: Quota, counts: Counts, domain: int, min_saved: int
) -> tuple[Placement, Quota]:
    """Add the replicas of `FasterMoE`; `ffi/planning/fastermoe.h` specifies the rule."""
    # `FasterMoE` calls it with `min_saved` from its time model. Call it directly with a known `min_saved`.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For an illegal plan,
    # the custom call stops the program on a CPU, and returns -1 in all entries on a GPU.
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
    """Compute `fastermoe` in jnp as a loop over copies, all domains side by side."""
    placement, quota, counts = alike(placement, quota, counts)
    start = _start(placement, quota, counts, domain)
    end = jax.lax.while_loop(lambda s: s.copied.any(), lambda s: _copy(s, min_saved), start)
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


@pytree
class _Shadows:
    """Carry of the loop, over all `B = R / M` domains with `P = M L` experts each."""

    # Ranks are numbered inside a domain.

    placement: Int[Array, "B M S"]  # expert in each slot, numbered over all domains; -1 for an empty slot
    quota: Int[Array, "B E M"]  # token copies of each expert served by each rank
    load: Int[Array, "B M"]  # token copies served by each rank
    # Token copies of each of the domain's experts served by each other rank of the domain once copied
    leaving: Int[Array, "B P M"]
    served: Int[Array, "B P"]  # token copies of each expert served at home
    at_home: Bool[Array, "B P"]  # true if the home serves all tokens of the expert and no other rank holds it
    copied: Bool[Array, "B"]  # true if the last step copied an expert


def _start(placement: Placement, quota: Quota, counts: Counts, members: int) -> _Shadows:
    domains, num_experts = of_domains(placement, quota, members), quota.shape[0]
    num_domains, num_local = domains.served.shape
    expert = domain_iota(domains.served)
    home = iota(num_local) // (num_local // members)
    # Only ranks of the expert's own domain: token copies from other domains stay at its home.
    own = counts.reshape(num_domains, members, num_experts)[iota(num_domains)[:, None], :, expert]
    # An empty slot (-1) gets an index past the end, dropped by the scatter.
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
        # True everywhere, so that the loop starts. Derived from a load, so it varies over the mesh axes of the plan.
        copied=load[:, 0] >= 0,
    )


def _copy(s: _Shadows, min_saved: int) -> _Shadows:
    """Copy one expert in every domain with a sufficient gain, and leave the others unchanged."""
    b, members = iota(s.load.shape[0]), iota(s.load.shape[1])[None]
    # argmax takes the first of equal values: the lower rank and the lower expert, as in C++.
    giver = first_argmax(s.load)
    others = members != giver[:, None]
    slots = ((s.placement < 0).any(2) | ~others).all(1)
    home = iota(s.served.shape[1])[None] // (s.served.shape[1] // s.load.shape[1])
    able = s.at_home & (home == giver[:, None]) & slots[:, None]
    # -1 is below every served load, so an expert without a possible copy is chosen only if no expert has one.
    expert = first_argmax(jnp.where(able, s.served, -1))
    leaving = s.leaving[b, expert]
    change = leaving - jnp.where(others, 0, leaving.sum(1, dtype=jnp.int32, keepdims=True))
    copied = able[b, expert] & (s.load.max(1) - (s.load + change).max(1) >= min_saved)
    # Finished domains take the step with a change of 0, until all domains are finished.
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
