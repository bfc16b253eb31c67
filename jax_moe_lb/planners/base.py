"""Calls of planners: C++ on the host, a custom call in a program, or a reference in jnp.

A planner maps integers to integers. `jax_moe_lb._planning` plans NumPy arrays on the host. Traced arrays become a
custom call if one was built for the target platform, and the jnp reference otherwise. All three return equal integers,
except for `exact`, whose reference searches differently.

The jnp forms process all domains side by side, as a leading dimension. Domains are independent, so a loop with one step
per move takes as many steps as the busiest domain and not as all domains together.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_moe_lb.core.custom_calls import PLANNING_MODULE, by_platform, call, has_planning_module, like
from jax_moe_lb.core.manual_axes import vary_alike, vary_like
from jax_moe_lb.core.topology import check_domain, home_experts_per_rank
from jax_moe_lb.core.types import Placement, Quota, host_iota, iota, pytree, saturated

ILLEGAL = -1
"""The number in every entry of a failed plan, which is no quota, no bin and no home expert."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NativePlanner:
    """Names a planner in C++ that edits placement and quota, and that nothing but these two tells what to do.

    It is a value, so that what runs beside a plan (`collectives/plan_and_copy.py`) can be told which planner to run. A
    balancer that is nothing but such a planner returns it from `Balancer.native_planner`, and applies it with `edit`.

    Args:
        name: the planner's name; its custom calls are `moe_lb_plan_<name>` and, with copies,
            `moe_lb_plan_<name>_and_copy`.
        options: the planner's attributes by name, integers, which `reference` and `check` take as arguments. A tuple of
            pairs and not a dict, so that the value is hashable.
        reference: the same rule in jnp, called as `(placement, quota, **options)`.
        check: refuses what does not fit with a ValueError, called as `(placement.shape, quota.shape, **options)`.
    """

    name: str
    options: tuple[tuple[str, int], ...]
    reference: Callable[..., tuple[Placement, Quota]]
    check: Callable[..., None]

    def checked_options(self, placement: Placement, quota: Quota) -> dict[str, Any]:
        """Returns the options, once they are known to fit these arrays.

        Args:
            placement: `[R, S]`; only its shape is read.
            quota: `[E, R]`; only its shape is read.

        Raises:
            ValueError: `check` refuses them.
        """
        options = dict(self.options)
        self.check(placement.shape, quota.shape, **options)
        return options


def edit(planner: NativePlanner, placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
    """Applies a planner to a plan; the `rebalance` of a balancer that is a native planner is this.

    Args:
        planner: the planner and its options.
        placement: `[R, S]` integers, the expert in each slot, -1 for an empty one.
        quota: `[E, R]` integers, the token copies of each expert that each rank serves.

    Returns:
        The new placement and quota, int32; NumPy arrays give NumPy arrays.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    options = planner.checked_options(placement, quota)
    shapes = placement.shape, quota.shape
    placement, quota = run_planner(planner.name, shapes, placement, quota, reference=planner.reference, **options)
    return placement, quota


def run_planner(
    name: str,
    shapes: tuple[Shape, ...],
    *operands: Any,
    reference: Callable,
    host_options: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Any, ...]:
    """Runs a planner on its operands: NumPy arrays give NumPy arrays, all else gives arrays of JAX.

    A new planner's function is a check of its arguments and this call.

    Args:
        name: the planner's name in `jax_moe_lb._planning`, and after `moe_lb_plan_` in the name of its custom call.
        shapes: the shapes of its results, which are all int32.
        *operands: arrays of integers. What int32 cannot hold becomes its nearest number, which the planner refuses.
        reference: the same rule in jnp, called as `(*operands, **options)`, for platforms without the custom call.
        host_options: what only the planner on NumPy arrays is told, because the custom call sees it in shapes.
        **options: static numbers, which all three forms take by name. NumPy's numbers keep their type as attributes.

    Returns:
        One array for each of `shapes`.
    """
    # NumPy arrays are planned at once: a caller on a host wants a plan and not a program to compile.
    if is_on_host(*operands):
        return _as_tuple(plan_on_host(name, *operands, **host_options, **options))

    def native(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return plan_call(name, _results(shapes, operands), *operands, **options)

    def otherwise(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # Only custom calls tell 32-bit numbers from 64-bit ones; a reference takes Python's, which do not change the
        # dtype of what they meet.
        numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        planned = _as_tuple(reference(*operands, **numbers))
        # Both branches must give the same types: a reference may return its result in more dimensions, or one that
        # follows from shapes alone, such as the placement of a single rank.
        return tuple(vary_like(result.reshape(shape), *operands) for result, shape in zip(planned, shapes, strict=True))

    return by_platform(*alike(*operands), native=native, reference=otherwise)


def _results(shapes: tuple[Shape, ...], operands: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Describes the results: each is placed like the operand of its shape, if there is one."""
    return tuple(like(next((o for o in operands if o.shape == shape), operands[0]), shape) for shape in shapes)


def _as_tuple(planned: Any) -> tuple[Any, ...]:
    return planned if isinstance(planned, tuple) else (planned,)


def is_on_host(*arrays: Any) -> bool:
    """Says whether a plan of these arrays is computed here and now, by `plan_on_host`.

    That is so for NumPy arrays alone, and where the planning module was built.
    """
    return has_planning_module() and all(isinstance(array, np.ndarray) for array in arrays)


def plan_on_host(name: str, *args: np.ndarray, **options: Any) -> Any:
    """Asks the planner `name` of `jax_moe_lb._planning` for a plan of NumPy arrays.

    Args:
        name: a function of that module.
        *args: arrays of integers, in the order in which the function takes them.
        **options: the function's other arguments.

    Raises:
        ValueError: the planner refuses the values.
    """
    planner = getattr(importlib.import_module(PLANNING_MODULE), name)
    return planner(*(np.asarray(saturated(array), np.int32) for array in args), **options)


def plan_call(name: str, results: tuple[Any, ...], *args: jax.Array, **attributes: Any) -> tuple[jax.Array, ...]:
    """Makes the custom call `moe_lb_plan_<name>`, and returns its results without the status word.

    On a GPU the planner is a host function of the stream, which cannot raise: it sets a
    status word and writes the reason to stderr. Its results are then `ILLEGAL` throughout,
    which `ensure_legal` refuses together with every other bad plan; a check of its own would
    have to wait for the GPU once more. On a CPU a failure is an error, and nothing is added.

    Args:
        name: the planner's name.
        results: the shapes and dtypes of its results; see `like`.
        args: its operands, int32, which must vary over the same mesh axes; see `alike`.
        attributes: its options; integers become int64, NumPy's numbers keep their type.
    """
    *planned, status = call(f"plan_{name}", (*results, like(args[0], (1,))), *args, **attributes)
    return jax.lax.platform_dependent(
        status, *planned, cuda=illegal_if_failed, default=lambda status, *planned: tuple(planned)
    )


def illegal_if_failed(status: jax.Array, *planned: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the results, or `ILLEGAL` everywhere if the status word is not 0.

    Args:
        status: `[1]` int32, 0 unless the planner failed.
        *planned: its results, int32.
    """
    # A select over every entry, and no read of the word on the host, which would have to wait for the GPU.
    return tuple(jnp.where(status[0] == 0, result, jnp.int32(ILLEGAL)) for result in planned)


def alike(*arrays: Any) -> tuple[jax.Array, ...]:
    """Returns the arrays as int32, all varying over the mesh axes that any of them varies over.

    Operands of a custom call must, and so must the carry of a reference's loop.
    """
    return vary_alike([jnp.asarray(saturated(array), jnp.int32) for array in arrays])


def check_plan_shapes(placement: Shape, quota: Shape, domain: int) -> None:
    """Refuses shapes that are none of a plan, and a domain that does not divide its ranks.

    Args:
        placement: the shape of the placement, `(R, S)`.
        quota: the shape of the quota, `(E, R)`.
        domain: how many ranks a domain has.

    Raises:
        ValueError: names the array, and says what was expected of it.
    """
    num_experts, num_ranks = quota
    home = home_experts_per_rank(num_experts, num_ranks, "quota")
    if placement[0] != num_ranks or placement[1] < home:
        raise ValueError(f"placement has shape {placement}; expected [{num_ranks}, S] with S >= {home}")
    check_domain(domain, num_ranks)


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
