"""Planner searching for the lowest maximum load, then for the fewest replicas within it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_moe_lb.core.custom_calls import PLANNING_MODULE, by_platform, has_planning_module, like
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.native_planner import alike
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import AnyArray, Counts, Placement, Quota, namespace
from jax_moe_lb.planners.base import is_on_host, kernel_check, plan_call, plan_on_host, run_planner

UNBOUNDED = 2**63 - 1
"""Value of `max_fan_out` without a limit, the int64 maximum: the custom call takes no `None`."""

Placements = Int[AnyArray, "N R S"]  # of plans under several limits
Quotas = Int[AnyArray, "N E R"]


def exact(
    counts: Counts,
    num_slots: int,
    domain: int,
    eps: float = 0.01,
    max_fan_out: int | None = None,
    localize: bool = True,
    call_host: bool = False,
) -> tuple[Placement, Quota]:
    """Plan placement and quota from the counts alone; `ffi/planning/exact.h` specifies the rule."""
    # On platforms without the custom call, such as TPU, a different search in jnp plans by the same rules
    # (`planners/exact_search.py`), but its plans differ.
    # Returns the placement `[R, S]` and the quota `[E, R]`, int32; NumPy arrays for NumPy inputs. For invalid counts,
    # the custom call stops the program on a CPU. On a GPU it returns -1 in all entries. The jnp form returns an illegal
    # plan.
    placements, quotas = exact_plans((UNBOUNDED,), counts, num_slots, domain, eps, max_fan_out, localize, call_host)
    return placements[0], quotas[0]


def exact_plans(
    limits: Sequence[int],
    counts: Counts,
    num_slots: int,
    domain: int,
    eps: float,
    max_fan_out: int | None,
    localize: bool,
    call_host: bool,
) -> tuple[Placements, Quotas]:
    """Plan as `exact` under limits on the replicas sent and received by a rank; the slots above a limit are empty."""
    # `Exact` compares the plans by time, so those under a limit that binds are brief. The kernel has a block for each.
    check_shapes(counts, num_slots, domain)
    check_exact(eps, max_fan_out)
    if call_host and not has_planning_module():
        raise RuntimeError(f"call_host is set, but {PLANNING_MODULE} was not built; expected it, or call_host=False")
    options: dict[str, Any] = {
        "limits": limits,
        "num_slots": num_slots,
        "domain": domain,
        # A NumPy scalar keeps 64 bits as an attribute, which C++ reads as a double.
        "eps": np.float64(eps),
        "max_fan_out": UNBOUNDED if max_fan_out is None else max_fan_out,
        "localize": localize,
    }
    one_by_one: Callable = partial(_one_by_one, reference=_from_host if call_host else _in_jax, **options)
    if is_on_host(counts):
        return one_by_one(counts)
    kernel = partial(_in_kernel, **options) if fits_kernel(counts.shape, num_slots, domain, eps, localize) else None
    # A program in jnp has a search for each plan, so it has every second one.
    return by_platform(*alike(counts), native=one_by_one, reference=partial(one_by_one, every=2), cuda=kernel)


def _one_by_one(
    counts: Counts,
    *,
    reference: Callable,
    limits: Sequence[int],
    num_slots: int,
    domain: int,
    max_fan_out: int,
    every: int = 1,
    **options: Any,
) -> tuple[Placements, Quotas]:
    (num_ranks, num_experts), xp = counts.shape, namespace(counts)
    placements, quotas = list[Placement](), list[Quota]()
    home = num_experts // num_ranks
    # As `ExactCall::Only` of the kernel.
    max_replicas = min(max_fan_out, domain * min(num_slots - home, (domain - 1) * home))
    for number, limit in enumerate(limits):
        if number % every and limit != limits[-1]:  # a plan under a lower limit is one under this limit
            placements.append(placements[-1])
            quotas.append(quotas[-1])
            continue
        slots = min(num_slots, home + limit)
        placement, quota = run_planner(
            "exact",
            ((num_ranks, slots), (num_experts, num_ranks)),
            counts,
            reference=partial(reference, num_slots=slots),
            # The custom call derives the slots from the shape of its result; the NumPy form needs an argument.
            host_options={"num_slots": slots},
            domain=domain,
            max_fan_out=min(max_fan_out, limit),
            brief=limit < max_replicas,
            **options,
        )
        placements.append(xp.pad(placement, ((0, 0), (0, num_slots - slots)), constant_values=-1))
        quotas.append(quota)
    return xp.stack(placements), xp.stack(quotas)


def _in_kernel(counts: jax.Array, limits: Sequence[int], num_slots: int, **options: Any) -> tuple[Placements, Quotas]:
    (num_ranks, num_experts), plans = counts.shape, len(limits)
    results = like(counts, (plans * num_ranks, num_slots)), like(counts, (plans * num_experts, num_ranks))
    placement, quota = plan_call("exact_kernel", results, *alike(counts, np.array(limits)), brief=False, **options)
    return placement.reshape(plans, num_ranks, -1), quota.reshape(plans, num_experts, -1)


def _in_jax(counts: Counts, **options: Any) -> tuple[Placement, Quota]:
    # Imported at its first trace: programs with the custom call need none of it.
    from jax_moe_lb.planners.exact_search import exact_in_jax

    return exact_in_jax(counts, **options)


def fits_kernel(shape: tuple[int, ...], num_slots: int, domain: int, eps: float, localize: bool) -> bool:
    """Return whether NVIDIA GPUs run `exact` as one kernel, without the host."""
    # They do for domains of at most 128 ranks whose plans fit into the shared memory of a thread block, such as 72
    # ranks with 576 experts, or 128 with 512, and 2 replica slots each, if the custom calls were built with a compiler
    # of device code. Others plan on the host.
    fits = kernel_check("exact_kernel_fits")
    return fits is not None and fits(*shape, num_slots, domain, eps, localize)


def check_exact(eps: float, max_fan_out: int | None) -> None:
    """Check the options of `exact`."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; expected a finite number, at least 0")
    if max_fan_out is not None and not 0 <= max_fan_out <= UNBOUNDED:
        raise ValueError(f"max_fan_out is {max_fan_out}; expected 0 to {UNBOUNDED}, or None")


def check_shapes(counts: AnyArray, num_slots: int, domain: int) -> None:
    """Check shape and dtype of counts, and slots and domain against them."""
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
    """Call the C++ planner through a callback; invalid counts stop the program."""
    num_ranks, num_experts = counts.shape
    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((num_ranks, num_slots), (num_experts, num_ranks)))
    planner = partial(plan_on_host, "exact", num_slots=num_slots, **options)
    # The callback converts JAX arrays to NumPy. All ranks pass equal counts, so all succeed or all fail.
    answer = jax.pure_callback(lambda counts: planner(np.asarray(counts)), shapes, counts, vmap_method="sequential")
    # A callback result has no manual axes. The counts have the axes on which it depends.
    return vary_like(answer, counts)
