"""Finds the lowest maximum load that the slots allow, by a search, and then the fewest replicas within it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb.core.custom_calls import PLANNING_MODULE, has_planning_module
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, Placement, Quota
from jax_moe_lb.planners.base import plan_on_host, run_planner
from jax_moe_lb.planners.exact_search import exact_in_jax

UNBOUNDED = 2**63 - 1
"""The `max_fan_out` that is no bound: the largest int64, as the custom call takes no `None`."""


def exact(
    counts: Counts,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
    call_host: bool = False,
) -> tuple[Placement, Quota]:
    """Makes a plan for these counts from nothing; `ffi/planning/exact.h` has the rule.

    `Exact` calls it. In a program that is lowered for a platform without its custom call, as for a TPU, another search
    plans in jnp (`planners/exact_search.py`): to the same rules, but not the same plans.

    Args:
        counts: `[R, E]` integers, the token copies that each rank routes to each expert, at least 0; their sum must
            stay below `2**31`.
        num_slots: `S`, the slots of a rank, home experts included; at least `E / R`, and two more are usual.
        domain: how many ranks a domain has; each domain is planned for itself.
        eps: the fraction by which the maximum load may exceed the lowest one found where that saves replicas; at least
            0, 0.01 by default.
        max_fan_out: how many replicas may be made of the experts of one home rank; `None`, the default, is any number.
        localize: whether replicas change places so that more tokens are served on the rank where they start.
        call_host: whether a program without the custom call asks the planner in C++ through a host callback, in place
            of the search in jnp. The device waits for it, and the program cannot be compiled for devices that are not
            there.

    Returns:
        The placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays give NumPy arrays. Counts that break the
        rules above stop the program on a CPU; on a GPU all entries are then -1. In jnp they give a plan that breaks
        rules too.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
        RuntimeError: with `call_host`, this installation lacks the planner in C++.
    """
    check_shapes(counts, num_slots, domain)
    check_exact(eps, max_fan_out)
    num_ranks, num_experts = counts.shape
    if call_host and not has_planning_module():
        raise RuntimeError(f"call_host is set, but {PLANNING_MODULE} was not built; expected it, or call_host=False")
    placement, quota = run_planner(
        "exact",
        ((num_ranks, num_slots), (num_experts, num_ranks)),
        counts,
        reference=partial(_from_host if call_host else exact_in_jax, num_slots=num_slots),
        # The custom call sees the slots in the shape of its result; a function of arrays must be told.
        host_options={"num_slots": num_slots},
        domain=domain,
        # NumPy's number keeps its 64 bits as an attribute, which the C++ reads as a double.
        eps=np.float64(eps),
        max_fan_out=UNBOUNDED if max_fan_out is None else max_fan_out,
        localize=localize,
    )
    return placement, quota


def check_exact(eps: float, max_fan_out: int | None) -> None:
    """Refuses options of `exact` that are out of range.

    Args:
        eps: the fraction above the lowest maximum load; at least 0 and finite.
        max_fan_out: the bound on replicas of one home rank's experts; at least 0, or `None` for no bound.

    Raises:
        ValueError: names the option, and says what was expected.
    """
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; expected a finite number, at least 0")
    if max_fan_out is not None and not 0 <= max_fan_out <= UNBOUNDED:
        raise ValueError(f"max_fan_out is {max_fan_out}; expected 0 to {UNBOUNDED}, or None")


def check_shapes(counts: AnyArray, num_slots: int, domain: int) -> None:
    """Refuses counts that are no `[R, E]` of integers, and slots and domains that do not fit them.

    Args:
        counts: what should be `[R, E]`; only shape and dtype are read.
        num_slots: `S`, the slots of a rank.
        domain: how many ranks a domain has.

    Raises:
        ValueError: names the argument, and says what was expected.
    """
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"counts has shape {counts.shape}; expected [R, E], both at least 1")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"counts has dtype {counts.dtype}; expected integers")
    num_ranks, num_experts = counts.shape
    home = home_experts_per_rank(num_experts, num_ranks, "counts")
    if num_slots < home:
        raise ValueError(f"num_slots is {num_slots}; expected at least the {home} home experts")
    check_domain(domain, num_ranks)


def _from_host(counts: jax.Array, num_slots: int, **options: Any) -> tuple[jax.Array, ...]:
    """Asks the planner in C++ through a callback; counts that it refuses stop the program."""
    num_ranks, num_experts = counts.shape
    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((num_ranks, num_slots), (num_experts, num_ranks)))
    planner = partial(plan_on_host, "exact", num_slots=num_slots, **options)
    # A callback takes JAX's arrays to the host. All ranks ask with equal counts, so that none is refused alone.
    answer = jax.pure_callback(lambda counts: planner(np.asarray(counts)), shapes, counts, vmap_method="sequential")
    # A callback's result carries no manual axes; counts carry the ones that it depends on.
    return vary_like(answer, counts)
