"""Calls of functions that know nothing of the mesh axes which values vary over, inside `jax.shard_map`.

Kernels of others lose the axes of their operands, and some refuse operands that have any. What they compute is the same
on every rank's own values, so they are traced as if there were no mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Array

from jax_moe_lb._varying import vary_like

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
