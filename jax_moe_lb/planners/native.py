"""All planners are called here: in C++ on a host, as a custom call in a program, or as a reference in jnp.

Every planner is integers in, integers out. NumPy arrays are planned here and now by `jax_moe_lb._planning`; arrays of
JAX become a custom call where one was built for the platform that a program is lowered for, and the reference
elsewhere. All three give the same integers, save `exact`, whose reference searches otherwise.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb._custom_calls import PLANNING_MODULE, by_platform, call, has_planning_module, like
from jax_moe_lb._varying import vary_alike, vary_like
from jax_moe_lb.checks import check_domain, home_experts_per_rank
from jax_moe_lb.types import Placement, Quota

ILLEGAL = -1
"""The number in every entry of a failed plan, which is no quota, no bin and no home expert."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NativePlanner:
    """Names a planner in C++ that edits placement and quota, and that nothing but these two tells what to do.

    It is a value, so that what runs beside a plan (`ops/plan_and_copy.py`) can be told which planner to run. A balancer
    that is nothing but such a planner returns it from `Balancer.native_planner`, and applies it with `edit`.

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


def saturated(array: Any) -> Any:
    """Clips integers of more than 32 bits to int32's range, so that a sum is refused instead of wrapping round."""
    # A conversion to int32 alone would drop the high halves of 64-bit numbers without a word.
    return array.clip(-(2**31), 2**31 - 1) if array.dtype.itemsize > 4 else array


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
