"""FEPLB's scheduler (arXiv 2604.19654) moves whole experts of the busiest ranks to idle ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.types import AnyArray, Placement, Quota, iota, pytree
from jax_moe_lb.planners.base import (
    NativePlanner,
    alike,
    check_plan_shapes,
    check_tokens,
    domain_iota,
    edit,
    lowest,
    of_domains,
    to_first_empty,
)


def feplb(
    placement: Placement, quota: Quota, domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool
) -> tuple[Placement, Quota]:
    """Makes the moves that `FEPLB` describes; the rule to the letter stands in `ffi/planning/feplb.h`.

    Call it to plan on NumPy arrays, or in a balancer of your own; `FEPLB` applies `feplb_planner`, which is the same.

    Args:
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one; the first `E / R` columns are the
            home experts.
        quota: `[E, R]` integers, the token copies of each expert that each rank serves, at least 0; their sum must stay
            below `2**31`.
        domain: how many ranks a domain has; it divides `R`.
        num_dynamic: how many home experts of a rank may move, at least 1; 4 is usual.
        max_num_dyn: how many experts a rank takes at most, at least 1; 8 is usual. Its empty slots limit it too.
        tau: the least token copies of an expert that moves, at least 1; 1 is usual.
        skip: whether a smaller dynamic expert moves where the busiest cannot; false is usual.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. A plan that breaks the
        rules above stops the program on a CPU with the custom call; on a GPU with it all entries are then -1.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    return edit(feplb_planner(domain, num_dynamic, max_num_dyn, tau, skip), placement, quota)


def feplb_planner(domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool) -> NativePlanner:
    """Returns `feplb` as a value, which `TwoPhase` can run beside its static wave; it takes the same arguments."""
    options = {
        "domain": domain,
        "num_dynamic": num_dynamic,
        "max_num_dyn": max_num_dyn,
        "tau": tau,
        "skip": bool(skip),
    }
    return NativePlanner("feplb", tuple(options.items()), feplb_reference, _check)


def dynamic_experts(served: Int[AnyArray, "*B L"], num_dynamic: int) -> Bool[AnyArray, "*B L"]:
    """Says which home experts of a rank may move: the `num_dynamic` that it serves most of.

    Args:
        served: `[..., L]` integers, the token copies of each of a rank's home experts that the rank itself serves.
        num_dynamic: how many experts of each rank may move; with `L` or more all of them may.

    Returns:
        `[..., L]` booleans.
    """
    # Stable, so that of equal ones the lower expert is dynamic, as in the C++ planner: `TwoPhase` serves the others by
    # this answer, and a planner that disagreed would move an expert whose tokens are at home already.
    order = jnp.argsort(served, axis=-1, descending=True, stable=True)
    # Sorting the order gives each expert's position in it.
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
    """Refuses numbers of experts below 1, and a threshold that no expert's tokens can be compared with.

    Args:
        num_dynamic: how many home experts of a rank may move.
        max_num_dyn: how many experts a rank takes at most.
        tau: the least token copies of an expert that moves; it must fit int32.

    Raises:
        ValueError: names the option, and says what was expected.
    """
    for name, value in (("num_dynamic", num_dynamic), ("max_num_dyn", max_num_dyn)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    check_tokens("tau", tau)


def feplb_reference(
    placement: Placement, quota: Quota, domain: int, num_dynamic: int, max_num_dyn: int, tau: int, skip: bool
) -> tuple[Placement, Quota]:
    """Computes `feplb` as a loop over moves, all domains side by side; it runs where no custom call does."""
    placement, quota = alike(placement, quota)
    start = _start(placement, quota, domain, num_dynamic, max_num_dyn, tau)
    end = jax.lax.while_loop(lambda m: m.moved.any(), lambda m: _move(m, skip), start)
    return end.placement.reshape(placement.shape), end.quota.swapaxes(0, 1).reshape(quota.shape)


@pytree
class _Moves:
    """Carries the loop, over all `B = R / M` domains with `P = M L` experts each. Ranks are numbered inside a domain.

    Args:
        placement: the expert in each slot, numbered over all domains; -1 for an empty one.
        quota: the token copies of each expert that each rank serves.
        load: the token copies that each rank serves.
        open: how many experts each rank can still take.
        served: the token copies that the home of each of the domain's experts serves of it.
        dynamic: whether such an expert is dynamic, has at least the threshold's tokens, and has not moved yet.
        holds: whether a rank had a slot for it before the first move.
        moved: whether the last step moved an expert.
    """

    placement: Int[Array, "B M S"]
    quota: Int[Array, "B E M"]
    load: Int[Array, "B M"]
    open: Int[Array, "B M"]
    served: Int[Array, "B P"]
    dynamic: Bool[Array, "B P"]
    holds: Bool[Array, "B P M"]
    moved: Bool[Array, "B"]


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
        # True everywhere, so that the loop starts; made of a load so that it varies over the mesh axes of the plan.
        moved=load[:, 0] >= 0,
    )


def _move(m: _Moves, skip: bool) -> _Moves:
    """Makes one move in every domain in which one is left, and changes nothing in the others."""
    b, home = iota(m.load.shape[0]), m.served.shape[1] // m.load.shape[1]
    # `argmax` takes the first of equal ones: the lower rank, and below the lower expert, as the C++ does.
    giver = jax.lax.argmax(m.load, 1, jnp.int32)
    # The slots from before the first move are enough: an expert moves once, so no rank gets it by a move twice.
    taker, taker_load = lowest(m.load[:, None], (m.open > 0)[:, None] & ~m.holds)
    of_giver = m.dynamic & (iota(m.served.shape[1])[None] // home == giver[:, None])
    # The taker must end below what the giver has now, else the highest load would not fall. Written as a difference:
    # a sum with `NO_LOAD`, which stands for no taker, would overflow.
    fits = of_giver & (m.served < m.load[b, giver][:, None] - taker_load)
    # Without `skip` the busiest is chosen first, and then may not fit, which ends the domain. -1 is below what any
    # home serves.
    expert = jax.lax.argmax(jnp.where(fits if skip else of_giver, m.served, -1), 1, jnp.int32)
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
