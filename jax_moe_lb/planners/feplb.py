"""FEPLB's scheduler (arXiv 2604.19654): whole experts of the busiest ranks move to idle ranks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.native_planner import NativePlanner, alike
from jax_moe_lb.core.types import AnyArray, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import (
    check_plan_shapes,
    check_tokens,
    domain_iota,
    edit,
    first_argmax,
    lowest,
    of_domains,
    to_first_empty,
    within_int32,
)


def feplb(
    placement: Placement, quota: Quota, domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool
) -> tuple[Placement, Quota]:
    """Make the moves of `FEPLB`; `ffi/planning/feplb.h` specifies the rule."""
    # Call it to plan on NumPy arrays or in a custom balancer; `FEPLB` applies the equivalent `feplb_planner`.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For an illegal plan,
    # the custom call stops the program on a CPU, and returns -1 in all entries on a GPU.
    return edit(feplb_planner(domain, num_dynamic, max_num_dyn, tau, skip), placement, quota)


def feplb_planner(domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool) -> NativePlanner:
    """Return `feplb` as a value, which `TwoPhase` runs beside its exchange home; the arguments are those of `feplb`."""
    options = {
        "domain": domain,
        "num_dynamic": num_dynamic,
        "max_num_dyn": max_num_dyn,
        "tau": tau,
        "skip": bool(skip),
    }
    return NativePlanner("feplb", tuple(options.items()), feplb_reference, _check)


def dynamic_experts(served: Int[AnyArray, "*B L"], num_dynamic: int) -> Bool[AnyArray, "*B L"]:
    """Return the movable home experts per rank: the `num_dynamic` with the most tokens served there."""
    # The stable sort makes the lower of equal experts dynamic, as in C++. `TwoPhase` orders rows by the same rule, so a
    # planner with other ties would move rows that are not the last ones.
    order = jnp.argsort(served, axis=-1, descending=True, stable=True)
    # The argsort of the order is each expert's position in it.
    return jnp.argsort(order, axis=-1) < num_dynamic


def _check(
    placement: tuple[int, ...],
    quota: tuple[int, ...],
    domain: int,
    num_dynamic: int,
    max_num_dyn: int,
    tau: int,
    skip: bool,
) -> None:
    del skip
    check_plan_shapes(placement, quota, domain)
    check_options(num_dynamic, max_num_dyn, tau)


def check_options(num_dynamic: int, max_num_dyn: int, tau: int) -> None:
    """Check the options of `feplb`."""
    for name, value in (("num_dynamic", num_dynamic), ("max_num_dyn", max_num_dyn)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    check_tokens("tau", tau)


def feplb_reference(
    placement: Placement, quota: Quota, domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool
) -> tuple[Placement, Quota]:
    """Compute `feplb` in jnp as a loop over moves, all domains side by side."""
    placement, quota = alike(placement, quota)
    start = _start(placement, quota, domain, within_int32(num_dynamic), max_num_dyn, tau)
    end = jax.lax.while_loop(lambda m: m.moved.any(), lambda m: _move(m, skip), start)
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


@pytree
class _Moves:
    """Carry of the loop, over all `B = R / M` domains with `P = M L` experts each."""

    # Ranks are numbered inside a domain.

    placement: Int[Array, "B M S"]  # expert in each slot, numbered over all domains; -1 for an empty slot
    quota: Int[Array, "B E M"]  # token copies of each expert served by each rank
    load: Int[Array, "B M"]  # token copies served by each rank
    open: Int[Array, "B M"]  # number of experts each rank can still take
    served: Int[Array, "B P"]  # token copies of each of the domain's experts served at home
    dynamic: Bool[Array, "B P"]  # true if the expert is dynamic, reaches the threshold, and has not moved yet
    holds: Bool[Array, "B P M"]  # true if the rank had a slot for the expert before the first move
    moved: Bool[Array, "B"]  # true if the last step moved an expert


def _start(placement: Placement, quota: Quota, members: int, num_dynamic: int, max_num_dyn: int, tau: int) -> _Moves:
    domains = of_domains(placement, quota, members)
    load = domains.quota.sum(1, dtype=jnp.int32)
    served = domains.served.reshape(*load.shape, -1)
    dynamic = dynamic_experts(served, num_dynamic).reshape(domains.served.shape)
    return _Moves(
        placement=domains.placement,
        quota=domains.quota,
        load=load,
        open=jnp.minimum((domains.placement < 0).sum(2, dtype=jnp.int32), min(max_num_dyn, placement.shape[1])),
        served=domains.served,
        dynamic=dynamic & (domains.served >= tau),
        holds=domains.holds,
        # True everywhere, so that the loop starts. Derived from a load, so it varies over the mesh axes of the plan.
        moved=load[:, 0] >= 0,
    )


def _move(m: _Moves, skip: bool) -> _Moves:
    """Make one move in every domain with a possible move, and leave the others unchanged."""
    b, home = iota(m.load.shape[0]), m.served.shape[1] // m.load.shape[1]
    # argmax takes the first of equal values: the lower rank and the lower expert, as in C++.
    giver = first_argmax(m.load)
    # The slots before the first move suffice: an expert moves once, so no rank gets it twice.
    taker, taker_load = lowest(m.load[:, None], (m.open > 0)[:, None] & ~m.holds)
    of_giver = m.dynamic & (iota(m.served.shape[1])[None] // home == giver[:, None])
    # The taker must end below the giver's current load, or the highest load would not fall. Use a difference: a sum
    # with `NO_LOAD` (no taker) would overflow.
    fits = of_giver & (m.served < m.load[b, giver][:, None] - taker_load)
    # Without `skip`, the busiest expert is chosen first; if it does not fit, the domain is finished. -1 is below every
    # served load.
    expert = first_argmax(jnp.where(fits if skip else of_giver, m.served, -1))
    moved, taker = fits[b, expert], taker[b, expert]
    tokens = jnp.where(moved, m.served[b, expert], 0)
    number = domain_iota(m.served)[b, expert]
    return _Moves(
        placement=to_first_empty(
            m.placement, number[:, None], moved[:, None] & (iota(m.load.shape[1])[None] == taker[:, None])
        ),
        quota=m.quota.at[b, number, giver].add(-tokens).at[b, number, taker].add(tokens),
        load=m.load.at[b, giver].add(-tokens).at[b, taker].add(tokens),
        open=m.open.at[b, taker].add(-moved.astype(jnp.int32)),
        served=m.served,
        dynamic=m.dynamic.at[b, expert].min(~moved),
        holds=m.holds,
        moved=moved,
    )
