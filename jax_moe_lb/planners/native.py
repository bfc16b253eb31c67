"""What the planners' custom calls share."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb._custom_calls import PLANNING_MODULE, by_platform, call, has_planning_module, like
from jax_moe_lb.types import Placement, Quota

ILLEGAL = -1
"""In every entry of a failed plan: no quota, no bin, no home expert."""


@dataclass(frozen=True)
class NativePlanner:
    """A planner in C++ that edits a plan, and nothing but the plan decides what it does.

    Args:
        name: of its custom calls: `moe_lb_plan_<name>`, and with copies `moe_lb_plan_<name>_and_copy`.
        options: its attributes, by name; they are arguments of `reference` and `check` too.
        reference: the same in jnp, `(placement, quota, **options)`.
        check: refuses, `(placement.shape, quota.shape, **options)`, with a ValueError.
    """

    name: str
    options: tuple[tuple[str, int], ...]
    reference: Callable[..., tuple[Placement, Quota]]
    check: Callable[..., None]

    def checked_options(self, placement: Placement, quota: Quota) -> dict[str, Any]:
        """The options, if they fit these arrays.

        Raises:
            ValueError: of `check`.
        """
        options = dict(self.options)
        self.check(placement.shape, quota.shape, **options)
        return options


def edit(planner: NativePlanner, placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
    """The plan after the planner; of NumPy arrays, NumPy arrays.

    Raises:
        ValueError: shapes that do not fit, or an option out of range.
    """
    options = planner.checked_options(placement, quota)
    if is_on_host(placement, quota):
        return plan_on_host(planner.name, placement, quota, **options)

    def native(placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
        results = like(placement), like(quota)
        placement, quota = plan_call(planner.name, results, placement, quota, **options)
        return placement, quota

    def reference(placement: Placement, quota: Quota) -> tuple[Placement, Quota]:
        return planner.reference(placement, quota, **options)

    return by_platform(*alike(placement, quota), native=native, reference=reference)


def is_on_host(*arrays: Any) -> bool:
    """Whether a plan of these arrays is computed here and now, by `plan_on_host`."""
    return has_planning_module() and all(isinstance(array, np.ndarray) for array in arrays)


def plan_on_host(name: str, *args: np.ndarray, **options: Any) -> Any:
    """What the planner `name` says of NumPy arrays; it refuses what is wrong with a ValueError."""
    planner = getattr(importlib.import_module(PLANNING_MODULE), name)
    return planner(*(np.asarray(saturated(array), np.int32) for array in args), **options)


def plan_call(name: str, results: tuple[Any, ...], *args: jax.Array, **attributes: Any) -> tuple[jax.Array, ...]:
    """The results of the custom call `moe_lb_plan_<name>`.

    On a GPU the planner is a host function of the stream, which cannot raise: it sets a
    status word and writes the reason to stderr. Its results are then `ILLEGAL` throughout,
    which `ensure_legal` refuses together with every other bad plan; a check of its own would
    have to wait for the GPU once more. On a CPU a failure is an error, and nothing is added.

    Args:
        name: of the planner.
        results: shapes and dtypes; see `like`.
        args: its operands, int32, varying over the same mesh axes; see `alike`.
        attributes: static.
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
    arrays = tuple(jnp.asarray(saturated(array), jnp.int32) for array in arrays)
    # XLA folds the zero away; only its type matters.
    zero = sum(array.sum(dtype=jnp.int32) * 0 for array in arrays)
    return tuple(array + zero for array in arrays)


def saturated(array: Any) -> Any:
    """What int32 cannot hold as its nearest number, so that a sum is refused instead of wrapping round."""
    return array.clip(-(2**31), 2**31 - 1) if array.dtype.itemsize > 4 else array
