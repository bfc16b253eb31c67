"""What the planners' custom calls share."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb.ops._native import HOST_PLANNERS, call, has_host_planners, like

ILLEGAL = -1
"""In every entry of a failed plan: no quota, no bin, no home expert."""


def is_on_host(*arrays: Any) -> bool:
    """Whether a plan of these arrays is computed here and now, by `plan_on_host`."""
    return has_host_planners() and all(isinstance(array, np.ndarray) for array in arrays)


def plan_on_host(name: str, *args: np.ndarray, **options: Any) -> Any:
    """What the planner `name` says of NumPy arrays; it refuses what is wrong with a ValueError."""
    planner = getattr(importlib.import_module(HOST_PLANNERS), name)
    return planner(*(np.asarray(array, np.int32) for array in args), **options)


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
    arrays = tuple(jnp.asarray(array, jnp.int32) for array in arrays)
    # XLA folds the zero away; only its type matters.
    zero = sum(array.sum(dtype=jnp.int32) * 0 for array in arrays)
    return tuple(array + zero for array in arrays)
