"""The one way in which planners are called: in C++ on a host, as a custom call in a program, or as a reference in jnp.

Every planner is integers in, integers out. NumPy arrays are planned here and now by `jax_moe_lb._planning`; arrays of
JAX become a custom call where one was built for the platform that a program is lowered for, and the reference
elsewhere. All three give the same integers.
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
from jax_moe_lb._refusal import refuse
from jax_moe_lb._varying import vary_alike
from jax_moe_lb.checks import check_domain, home_experts_per_rank
from jax_moe_lb.types import Placement, Quota

ILLEGAL = -1
"""In every entry of a failed plan: no quota, no bin, no home expert."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """Stands for the reference of a planner that exists in C++ alone.

    Args:
        explain: says in one line, given a platform, what the planner needs and what to use there.
    """

    explain: Callable[[str], str]


@dataclass(frozen=True)
class NativePlanner:
    """A planner in C++ that edits placement and quota, and that nothing but these two tells what to do.

    It is a value, so that what is beside a plan (`ops/plan_and_copy.py`) can be told which planner to run.

    Args:
        name: its custom calls are `moe_lb_plan_<name>` and, with copies, `moe_lb_plan_<name>_and_copy`.
        options: its attributes by name. `reference` and `check` take them as arguments.
        reference: the same rule in jnp, `(placement, quota, **options)`.
        check: refuses what does not fit with a ValueError, `(placement.shape, quota.shape, **options)`.
    """

    name: str
    options: tuple[tuple[str, int], ...]
    reference: Callable[..., tuple[Placement, Quota]]
    check: Callable[..., None]

    def checked_options(self, placement: Placement, quota: Quota) -> dict[str, Any]:
        """The options, once they are known to fit these arrays.

        Raises:
            ValueError: what `check` says.
        """
        options = dict(self.options)
        self.check(placement.shape, quota.shape, **options)
        return options


def edit(planner: NativePlanner, placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
    """The plan after the planner.

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
    reference: Callable | Refused,
    host_options: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Any, ...]:
    """What a planner makes of its operands: NumPy arrays of NumPy arrays, else arrays of JAX.

    Args:
        name: of the planner, in `jax_moe_lb._planning` and after `moe_lb_plan_`.
        shapes: of its results; all are int32.
        *operands: integers. What int32 cannot hold becomes its nearest number, which the planner refuses.
        reference: the same rule in jnp, `(*operands, **options)`, for platforms without the custom call; or why there
            is none, and then a program cannot be lowered for them.
        host_options: what only the planner on NumPy arrays is told, because the custom call sees it in shapes.
        **options: static ones, which all three take by name. NumPy's numbers keep their type as attributes.
    """
    if is_on_host(*operands):
        return _as_tuple(plan_on_host(name, *operands, **host_options, **options))

    def native(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return plan_call(name, _results(shapes, operands), *operands, **options)

    def otherwise(*operands: jax.Array) -> tuple[jax.Array, ...]:
        if isinstance(reference, Refused):
            return refuse(*operands, results=_results(shapes, operands), explain=reference.explain)
        # Custom calls tell 32-bit numbers apart; a reference takes Python's.
        numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in options.items()}
        planned = _as_tuple(reference(*operands, **numbers))
        return tuple(result.reshape(shape) for result, shape in zip(planned, shapes, strict=True))

    return by_platform(*alike(*operands), native=native, reference=otherwise)


def _results(shapes: tuple[Shape, ...], operands: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    """Types of results: each is placed like the operand of its shape, if there is one."""
    return tuple(like(next((o for o in operands if o.shape == shape), operands[0]), shape) for shape in shapes)


def _as_tuple(planned: Any) -> tuple[Any, ...]:
    return planned if isinstance(planned, tuple) else (planned,)


def is_on_host(*arrays: Any) -> bool:
    """Whether a plan of these arrays is computed here and now, by `plan_on_host`."""
    return has_planning_module() and all(isinstance(array, np.ndarray) for array in arrays)


def plan_on_host(name: str, *args: np.ndarray, **options: Any) -> Any:
    """What the planner `name` of `jax_moe_lb._planning` says of NumPy arrays.

    Raises:
        ValueError: what the planner refuses.
    """
    planner = getattr(importlib.import_module(PLANNING_MODULE), name)
    return planner(*(np.asarray(saturated(array), np.int32) for array in args), **options)


def plan_call(name: str, results: tuple[Any, ...], *args: jax.Array, **attributes: Any) -> tuple[jax.Array, ...]:
    """The results of the custom call `moe_lb_plan_<name>`.

    On a GPU the planner is a host function of the stream, which cannot raise: it sets a
    status word and writes the reason to stderr. Its results are then `ILLEGAL` throughout,
    which `ensure_legal` refuses together with every other bad plan; a check of its own would
    have to wait for the GPU once more. On a CPU a failure is an error, and nothing is added.

    Args:
        name: the planner's.
        results: shapes and dtypes; see `like`.
        args: its operands, int32, which vary over the same mesh axes; see `alike`.
        attributes: static ones.
    """
    *planned, status = call(f"plan_{name}", (*results, like(args[0], (1,))), *args, **attributes)
    return jax.lax.platform_dependent(
        status, *planned, cuda=illegal_if_failed, default=lambda status, *planned: tuple(planned)
    )


def illegal_if_failed(status: jax.Array, *planned: jax.Array) -> tuple[jax.Array, ...]:
    """The results, or `ILLEGAL` everywhere if the status word is not 0."""
    return tuple(jnp.where(status[0] == 0, result, jnp.int32(ILLEGAL)) for result in planned)


def alike(*arrays: Any) -> tuple[jax.Array, ...]:
    """The arrays as int32, all varying over the mesh axes that any of them varies over."""
    return vary_alike([jnp.asarray(saturated(array), jnp.int32) for array in arrays])


def saturated(array: Any) -> Any:
    """What int32 cannot hold as its nearest number, so that a sum is refused instead of wrapping round."""
    return array.clip(-(2**31), 2**31 - 1) if array.dtype.itemsize > 4 else array


def check_plan_shapes(placement: Shape, quota: Shape, domain: int) -> None:
    """Refuses shapes that are none of a plan, and a domain that does not divide its ranks.

    Raises:
        ValueError: names the array, and says what was expected of it.
    """
    num_experts, num_ranks = quota
    home = home_experts_per_rank(num_experts, num_ranks, "quota")
    if placement[0] != num_ranks or placement[1] < home:
        raise ValueError(f"placement has shape {placement}; expected [{num_ranks}, S] with S >= {home}")
    check_domain(domain, num_ranks)
