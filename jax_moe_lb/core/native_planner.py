"""`NativePlanner`, a rule that C++ applies to a plan, and the operands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import Placement, Quota, as_int32


@dataclass(frozen=True)
class NativePlanner:
    """C++ planner editing placement and quota from these two inputs alone."""

    # It is a hashable value, so a concurrent executor (`collectives/plan_and_copy.py`) can receive it as a static
    # argument. A balancer equivalent to such a planner returns it from `Balancer.native_planner` and applies it with
    # `edit`.

    # Name of the planner. Its custom calls are `moe_lb_plan_<name>` and, with weight copies,
    # `moe_lb_plan_<name>_and_copy`.
    name: str
    # Integer attributes by name, arguments of `reference` and `check`. A tuple of pairs, because a dict is not
    # hashable.
    options: tuple[tuple[str, int], ...]
    reference: Callable[..., tuple[Placement, Quota]]  # the same rule in jnp, called as `(placement, quota, **options)`
    # Function raising a ValueError for invalid arguments, called as `(placement.shape, quota.shape, **options)`
    check: Callable[..., None]

    def checked_options(self, placement: Placement, quota: Quota) -> dict[str, Any]:
        """Check the options against the shapes of a plan and return them."""
        options = dict(self.options)
        self.check(placement.shape, quota.shape, **options)
        return options


def alike(*arrays: Any) -> tuple[jax.Array, ...]:
    """Return the arrays as int32, varying over the union of the mesh axes."""
    # Operands of a custom call and the carry of a loop require equal axes.
    return vary_alike([jnp.asarray(as_int32(array)) for array in arrays])
