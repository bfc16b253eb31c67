"""Helpers for values that vary over manual mesh axes inside `jax.shard_map`.

The type of a value records the mesh axes over which it varies. The branches of a conditional, the carry of a loop and
the operands of a custom call must agree in these axes, and a constant varies over none. `vary_like` and `vary_alike`
make constants agree. `unvarying_call` traces a function as if there were no mesh: some third-party kernels drop or
refuse the axes of their operands. `first_order` refuses a second derivative of a handwritten backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Array


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


unvarying_call_p = Primitive("unvarying_call")
unvarying_call_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class Traced:
    """Holds a traced function. As a bare parameter of the primitive JAX would look into it.

    Args:
        jaxpr: the function.
    """

    jaxpr: ClosedJaxpr


def unvarying_call(function: Callable[..., Any], *operands: Array) -> Any:
    """Calls a function that is traced with operands which vary over no mesh axes.

    It is neither differentiable nor mapped over; give what calls it rules of its own.

    Args:
        function: of arrays to a pytree of arrays, without collectives.
        *operands: arrays that all vary over the same mesh axes.

    Returns:
        What it returns; each array varies over those axes.
    """
    plain = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*plain)
    results = unvarying_call_p.bind(*operands, traced=Traced(jaxpr))
    return vary_like(jax.tree.unflatten(jax.tree.structure(shapes), results), *operands)


def _shapes(*operands: Any, traced: Traced) -> list[ShapedArray]:
    return [ShapedArray(out.shape, out.dtype) for out in traced.jaxpr.out_avals]


def _compute(*operands: Array, traced: Traced) -> list[Array]:
    return jaxpr_as_fun(traced.jaxpr)(*operands)


def _lower(context: mlir.LoweringRuleContext, *operands: Any, traced: Traced) -> Any:
    context = context.replace(avals_in=traced.jaxpr.in_avals, avals_out=traced.jaxpr.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(traced.jaxpr), multiple_results=True)(context, *operands)


unvarying_call_p.def_abstract_eval(_shapes)
unvarying_call_p.def_impl(_compute)
mlir.register_lowering(unvarying_call_p, _lower)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, which refuses to be differentiated in one line.

    Without it a gradient of a gradient ends at whatever operation comes first, such as a custom call that the user
    never heard of.

    Args:
        backward: computes gradients, from arguments that are pytrees of arrays.
    """

    def refuse(*args: Any) -> NoReturn:
        del args
        raise NotImplementedError("moe has no second derivatives; expected a gradient of it, not a gradient of that")

    function = jax.custom_vjp(backward)
    function.defvjp(refuse, refuse)
    return function
