"""Sizes of the terms in the sums of a function, to which the rounding errors of its results are proportional."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

LINEAR = (
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "cumsum", "dynamic_slice"),
    *("dynamic_update_slice", "expand_dims", "gather", "neg", "optimization_barrier", "pad", "reduce_sum", "reshape"),
    *("rev", "scatter", "scatter-add", "scatter_add", "select_n", "slice", "split", "squeeze", "transpose"),
)
"""Primitives whose sizes are those of the same primitive without signs."""


def with_sizes(function: Callable) -> Callable:
    """Return a function to the results, and to the sum of the absolute terms of each of their entries.

    A term is a product of the values of its factors; a factor which is a sum of cancelling terms counts with its size.
    Functions other than sums and products count as exact.
    """

    def sized(*args: Any) -> tuple[Any, Any]:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        tree, leaves = jax.tree.structure(shapes), jax.tree.leaves(args)
        pairs = _run(closed, [(leaf, _size(leaf)) for leaf in leaves])
        return tree.unflatten([value for value, _ in pairs]), tree.unflatten([size for _, size in pairs])

    return sized


def _is_float(value: Any) -> bool:
    # Keys of random numbers have a dtype of their own.
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.floating)


def _size(value: Any) -> Any:
    return jnp.abs(value) if _is_float(value) else value


def _run(closed: ClosedJaxpr, arguments: list[tuple]) -> list[tuple]:
    pairs = {var: (const, _size(const)) for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    pairs |= zip(closed.jaxpr.invars, arguments, strict=True)

    def read(var: Any) -> tuple:
        return (var.val, _size(var.val)) if isinstance(var, Literal) else pairs[var]

    for equation in closed.jaxpr.eqns:
        given = [read(var) for var in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            out = _run(equation.params["jaxpr"], given)
        else:
            out = _apply(equation, given)
        pairs |= zip(equation.outvars, out, strict=True)
    return [read(var) for var in closed.jaxpr.outvars]


def _apply(equation: Any, given: list[tuple]) -> list[tuple]:
    """Return the values of a primitive and their sizes."""

    def bind(arguments: list) -> list:
        out = equation.primitive.bind(*arguments, **equation.primitive.get_bind_params(equation.params))
        return list(out) if equation.primitive.multiple_results else [out]

    values, sizes = ([pair[at] for pair in given] for at in (0, 1))
    out, name = bind(values), equation.primitive.name
    if not any(map(_is_float, out)):
        return [(value, value) for value in out]
    if name in LINEAR:
        terms = bind(sizes)
    elif name in ("add", "sub", "add_any"):
        terms = [sizes[0] + sizes[1]]
    elif name in ("mul", "dot_general"):
        terms = [jnp.maximum(bind([sizes[0], abs(values[1])])[0], bind([abs(values[0]), sizes[1]])[0])]
    elif name == "div":
        terms = [sizes[0] / abs(values[1])]
    elif name == "square":
        terms = [sizes[0] * abs(values[0])]
    else:
        terms = out
    return [(value, _largest(value, term)) for value, term in zip(out, terms, strict=True)]


def _largest(value: Any, term: Any) -> Any:
    # The negation of a size has a sign.
    return jnp.maximum(abs(value), abs(term)) if _is_float(value) else value
