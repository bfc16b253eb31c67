"""Constants are made here to vary over the same manual mesh axes as what they meet.

Inside `jax.shard_map` the type of a value says over which mesh axes it differs. The branches of a conditional, the
carry of a loop and the operands of a custom call must agree in that, and a constant varies over none.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def vary_like(tree: Any, *others: Any) -> Any:
    """Returns the same values, which also vary over every manual mesh axis that one of `others` varies over.

    Use it for constants and for results of callbacks, before they meet the others in a loop or a conditional. Only
    types change; the compiled program does not.

    Args:
        tree: a pytree of arrays, or of numbers of JAX or NumPy.
        others: pytrees of arrays. Where all of them are NumPy's, this is a plan on a host, and `tree` stays as it is.
    """
    leaves = jax.tree.leaves(others)
    if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return tree
    axes = frozenset[str]().union(*map(varying_axes, leaves))
    return jax.tree.map(lambda leaf: _cast(jnp.asarray(leaf), axes), tree)


def vary_alike(arrays: Any, *others: Array) -> tuple[Array, ...]:
    """Returns the arrays, each of which varies over all mesh axes that any of them or of the others varies over.

    Use it for the operands of a custom call, and for the carry of a loop.

    Args:
        arrays: arrays of JAX.
        *others: arrays that these will meet.
    """
    return tuple(vary_like(tuple(arrays), *arrays, *others))


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array differs.

    There are none outside `jax.shard_map`, or where that does not check.
    """
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _cast(leaf: Array, axes: frozenset[str]) -> Array:
    # A cast over an axis that the value varies over already is refused. Sorted, as a set has another order in each
    # process, and the programs of all processes must be the same text.
    missing = tuple(sorted(axes - varying_axes(leaf)))
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf
