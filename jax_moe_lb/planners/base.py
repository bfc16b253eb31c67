"""Calls of planners: C++ on the host, a custom call in a program, or a reference in jnp.

A planner maps integers to integers. `jax_moe_lb._planning` plans NumPy arrays on the host. Traced arrays become a
custom call if one was built for the target platform, and the jnp reference otherwise. All three return equal integers,
except for `exact`, whose reference searches differently.

The jnp forms process all domains side by side, as a leading dimension. Domains are independent, so a loop with one step
per move takes as many steps as the busiest domain and not as all domains together.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.custom_calls import (
    MODULES,
    PLANNING_MODULE,
    by_platform,
    call,
    has_planning_module,
    is_built,
    like,
)
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.native_planner import NativePlanner, alike
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import Placement, Quota, as_int32, host_iota, iota, pytree

ILLEGAL = -1
"""Value of all entries of a failed plan; invalid as a quota, bin or home expert."""

Shape = tuple[int, ...]


def edit(planner: NativePlanner, placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
    """Apply a planner to a plan."""
    # This is the `rebalance` of balancers equivalent to a native planner.
    options = planner.checked_options(placement, quota)
    shapes = placement.shape, quota.shape
    placement, quota = run_planner(
        planner.name,
        shapes,
        placement,
        quota,
        reference=planner.reference,
        **options,
    )
    return placement, quota


def fits_kernel(name: str, placement: Shape, num_experts: int, domain: int) -> bool:
    """Return whether NVIDIA GPUs run a planner other than `exact` as one kernel, without the host."""
    # They do for domains of at most 128 ranks, if the custom calls were built with a compiler of device code. Others
    # plan on the host.
    fits = kernel_check("kernel_fits")
    return fits is not None and fits(name, placement[0], num_experts, placement[1], domain)


def kernel_check(name: str) -> Callable[..., bool] | None:
    """Return a function of the CUDA module about kernels; `None` if it is not built, or the driver cannot run them."""
    if not is_built("cuda"):
        return None
    module = importlib.import_module(MODULES["cuda"])
    why_none = getattr(module, "why_no_kernels", None)
    return getattr(module, name, None) if why_none is None or why_none() is None else None


def run_planner(
    name: str,
    shapes: tuple[Shape, ...],
    *operands: Any,
    reference: Callable,
    host_options: Mapping[str, Any] = MappingProxyType({}),
    in_kernel: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Any, ...]:
    """Run a planner on the operands."""
    # The function of a new planner checks its arguments and calls this function.
    # NumPy arrays are planned immediately, without compiling a program.
    if is_on_host(*operands):
        return _as_tuple(plan_on_host(name, *operands, **host_options, **options))

    def native(*operands: jax.Array, name: str = name) -> tuple[jax.Array, ...]:
        return plan_call(name, _results(shapes, operands), *operands, **options)

    kernel = partial(native, name=f"{name}_kernel") if in_kernel() else None

    def otherwise(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Only custom calls distinguish 32-bit from 64-bit numbers. The reference takes Python scalars, which do not
        # change the dtype of other operands.
        numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        planned = _as_tuple(reference(*operands, **numbers))
        # Both branches must give equal types. A reference may return more dimensions, or a result depending on shapes
        # only, such as the placement of a single rank.
        return tuple(vary_like(result.reshape(shape), *operands) for result, shape in zip(planned, shapes, strict=True))

    return by_platform(*alike(*operands), native=native, reference=otherwise, cuda=kernel)


def _results(shapes: tuple[Shape, ...], operands: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Return the types of the results, each with the sharding of the operand of the shape, if any."""
    return tuple(like(next((o for o in operands if o.shape == shape), operands[0]), shape) for shape in shapes)


def _as_tuple(planned: Any) -> tuple[Any, ...]:
    return planned if isinstance(planned, tuple) else (planned,)


def is_on_host(*arrays: object) -> bool:
    """Return whether `plan_on_host` can plan these arrays: all are NumPy arrays and the planning module is built."""
    return all(isinstance(array, np.ndarray) for array in arrays) and has_planning_module()


def plan_on_host(name: str, *args: np.ndarray, **options: Any) -> Any:
    """Call the planner `name` of `jax_moe_lb._planning` on NumPy arrays."""
    planner = getattr(importlib.import_module(PLANNING_MODULE), name)
    return planner(*map(as_int32, args), **options)


def plan_call(name: str, results: tuple[Any, ...], *args: jax.Array, **attributes: Any) -> tuple[jax.Array, ...]:
    """Make the custom call `moe_lb_plan_<name>` and return its results without the status word."""
    # On a GPU the planner is a kernel or a host function of the stream, which cannot raise. On failure it sets a status
    # word; a host function also writes the reason to stderr. All entries of its results are then `ILLEGAL`, and
    # `fallback_to_plain` replaces them like any illegal plan. A separate check would wait for the GPU again. On a CPU a
    # failure is an error.
    *planned, status = call(f"plan_{name}", (*results, like(args[0], (1,))), *args, **attributes)
    return jax.lax.platform_dependent(
        status, *planned, cuda=illegal_if_failed, default=lambda status, *planned: tuple(planned)
    )


def illegal_if_failed(status: jax.Array, *planned: jax.Array) -> tuple[jax.Array, ...]:
    """Return the results, or `ILLEGAL` in all entries if the status word is not 0."""
    # Select on the device: reading the status word on the host would wait for the GPU.
    return tuple(jnp.where(status[0] == 0, result, jnp.int32(ILLEGAL)) for result in planned)


def check_plan_shapes(placement: Shape, quota: Shape, domain: int) -> None:
    """Check the shapes of a plan and the domain."""
    num_experts, num_ranks = quota
    home = home_experts_per_rank(num_experts, num_ranks, "quota")
    if placement[0] != num_ranks or placement[1] < home:
        raise ValueError(f"placement has shape {placement}; expected [{num_ranks}, S] with S >= {home}")
    check_domain(domain, num_ranks)


NO_LOAD = np.int32(np.iinfo(np.int32).max)
"""Load of ranks excluded from the choice of the least loaded rank: the int32 maximum."""


@pytree
class PlanByDomain:
    """Plan split into its `B = R / M` domains, with `P = M L` home experts each."""

    # Ranks are numbered inside a domain. `of_domains` constructs it; the loop of a planner carries all or part of it.

    placement: Int[Array, "B M S"]  # the expert in each slot, numbered over all domains; -1 for an empty slot
    quota: Int[Array, "B E M"]  # the token copies of each expert served by each rank of the domain
    served: Int[Array, "B P"]  # the token copies of each home expert of the domain served at home
    holds: Bool[Array, "B P M"]  # true if the rank has a slot for the expert


def check_tokens(name: str, tokens: int) -> None:
    """Check that a threshold in token copies is positive and fits int32."""
    if not 1 <= tokens < 2**31:
        raise ValueError(f"{name} is {tokens}; expected 1 to {2**31 - 1}")


def within_int32(threshold: int) -> int:
    """Return the threshold, or the int32 maximum, which has the same effect on counts of int32."""
    # Custom calls take 64-bit thresholds, and jnp refuses a larger constant.
    return min(threshold, 2**31 - 1)


def quotient(numbers: Int[Array, "..."], by: Array | int) -> Int[Array, "..."]:
    """Return the quotients of numbers of at least 0 as unsigned ones, one operation; those of signed ones take ten."""
    return (numbers.astype(jnp.uint32) // jnp.asarray(by, jnp.uint32)).astype(jnp.int32)


def ceil_divide(numbers: Int[Array, "..."], by: Array | int) -> Int[Array, "..."]:
    """Return the quotients rounded up, for numbers of at least 0 and `by >= 1`."""
    # The sum may exceed int32, but not uint32.
    return quotient(numbers + (by - 1), by)


def of_domains(placement: Placement, quota: Quota, members: int) -> PlanByDomain:
    """Split a plan into the domains."""
    num_experts, num_ranks = quota.shape
    num_domains, num_local = num_ranks // members, num_experts // num_ranks * members
    placement = placement.reshape(num_domains, members, -1)
    quota = quota.reshape(num_experts, num_domains, members).swapaxes(0, 1)
    first = (host_iota(num_domains) * num_local)[:, None, None]
    # Experts of other domains and empty slots (-1) get an index past the end, dropped by the scatter below. Index -1
    # would address the last expert of the domain.
    local = jnp.where((placement >= first) & (placement < first + num_local), placement - first, num_local)
    domain, member, _ = np.indices(placement.shape)
    holds = jnp.zeros((num_domains, num_local, members), bool).at[domain, local, member].set(True, mode="drop")
    expert = host_iota(num_experts).reshape(num_domains, num_local)
    at_home = expert % num_local // (num_local // members)
    return PlanByDomain(placement, quota, quota[host_iota(num_domains)[:, None], expert, at_home], holds)


def domain_iota(served: Int[Array, "B P"]) -> Int[Array, "B P"]:
    """Return the global index of each domain's experts, `[B, P]` int32."""
    return iota(served.size).reshape(served.shape)


def lowest(load: Int[Array, "B #P M"], able: Bool[Array, "B P M"]) -> tuple[Int[Array, "B P"], Int[Array, "B P"]]:
    """Return the least loaded eligible rank per expert, and the load."""
    # Shapes are fixed, so ineligible ranks get the load `NO_LOAD`. argmin takes the first of equal values, like the C++
    # planners.
    load = jnp.where(able, load, NO_LOAD)
    return jax.lax.argmin(load, 2, jnp.int32), load.min(2)


def first_argmax(values: Int[Array, "B N"] | Bool[Array, "B N"]) -> Int[Array, "B"]:
    """Return the lowest index of each row's maximum: ties go to the lower rank, slot and expert, as in C++."""
    return jax.lax.argmax(values, 1, jnp.int32)


def to_first_empty(
    placement: Int[Array, "B M S"], expert: Int[Array, "B #M"], ranks: Bool[Array, "B M"]
) -> Int[Array, "B M S"]:
    """Put an expert into the first empty slot per selected rank."""
    # argmax of booleans gives the first empty slot. Use a mask instead of a scatter: most domains change no slot in a
    # step, and a scatter would need an index for them.
    first = jax.lax.argmax(placement < 0, 2, jnp.int32)
    here = ranks[:, :, None] & (iota(placement.shape[2])[None, None] == first[:, :, None])
    return jnp.where(here, expert[:, :, None], placement)
