"""Helpers for values varying over manual mesh axes inside `jax.shard_map`.

The type of a value records the mesh axes over which it varies. The branches of a conditional, the carry of a loop and
the operands of a custom call must agree in these axes, but a constant varies over none. `vary_like` and `vary_alike`
make constants agree. `unvarying_call` traces a function as if there were no mesh, because some third-party kernels drop
or reject the axes of the operands. `first_order` rejects second derivatives of a custom backward pass.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Array, PyTree


def vary_like(tree: PyTree, *others: PyTree) -> PyTree:
    """Return the same values, varying also over all manual mesh axes of `others`."""
    # Use it for constants and callback results before combining them with `others` in a loop or a conditional. It
    # changes types only, not the compiled program.
    leaves = jax.tree.leaves(others)
    if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return tree
    axes = frozenset[str]().union(*map(varying_axes, leaves))
    return jax.tree.map(lambda leaf: _cast(jnp.asarray(leaf), axes), tree)


def vary_alike(arrays: Iterable[Array], *others: Array) -> tuple[Array, ...]:
    """Return the arrays, varying over the union of the mesh axes and the axes of `others`."""
    # Use it for the operands of a custom call and for the carry of a loop.
    return tuple(vary_like(tuple(arrays), *arrays, *others))


def varying_axes(array: Any) -> frozenset[str]:
    """Return the manual mesh axes over which an array varies."""
    # The set is empty outside `jax.shard_map` and with `check_vma=False`.
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _cast(leaf: Array, axes: frozenset[str]) -> Array:
    # pcast rejects axes over which the value already varies. Sort the axes: set order differs between processes, but
    # all processes must compile identical programs.
    missing = tuple(sorted(axes - varying_axes(leaf)))
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


unvarying_call_p = Primitive("unvarying_call")
unvarying_call_p.multiple_results = True


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced function, wrapped because JAX would inspect a bare jaxpr parameter of a primitive."""

    jaxpr: ClosedJaxpr  # the traced function


def unvarying_call(function: Callable[..., Any], *operands: Array) -> Any:
    """Call a function traced with operands varying over no mesh axes."""
    # The call has no rule for differentiation; define it on the caller. `jax.vmap` calls it once per entry.
    plain = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*plain)
    call = jax.custom_batching.sequential_vmap(partial(unvarying_call_p.bind, traced=Traced(jaxpr)))
    return vary_like(jax.tree.unflatten(jax.tree.structure(shapes), call(*operands)), *operands)


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
    """Return the same function, raising a one-line error if it is differentiated."""
    # Without it, a second derivative fails inside the first operation without a derivative rule, such as a custom call.

    def refuse(*args: object) -> NoReturn:
        del args
        raise NotImplementedError("moe has no second derivatives; expected first-order differentiation only")

    function = jax.custom_vjp(backward)
    function.defvjp(refuse, refuse)
    return function
