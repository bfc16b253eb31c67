"""Networks of experts whose activations, their gradients and row weights are inside grouped products.

`mosaic_product` and `mosaic_outer` have the kernels for Hopper, `tpu_products` has them for TPUs.

The kernel multiplies rows with `up` and gate at once and activates the products before it stores them. In the backward
pass one kernel computes the gradients of hidden activations, and from these the gradients of both products and of the
row weights. Another sums the gradients of rows over both products. No array is concatenated or read only to be
activated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device
from jax.extend.core import ClosedJaxpr, Literal
from jaxtyping import Array, Float

from jax_moe_lb.core.experts import Experts, swiglu
from jax_moe_lb.core.manual_axes import unvarying_call, vary_alike
from jax_moe_lb.core.schedule import in_order, in_order_on_tpu
from jax_moe_lb.core.types import DType, GroupSizes, ReceivedRows, Rows
from jax_moe_lb.kernels.fused_products import Epilogue, Factor, Results, Term
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups

Parts = tuple[Experts, ...]
Products = tuple[Float[Array, "A F"], ...]
"""Products with `up` and, if there is one, with the gate."""

Others = tuple[Float[Array, "A *_"], ...]
"""Products or `ReceivedRows`, as neighboring columns."""

ARITHMETIC = {"add", "add_any", "sub", "mul", "div", "neg", "sign", "abs", "square", "integer_pow", "one_minus_square"}
FUNCTIONS = {"exp", "exp2", "log", "tanh", "erf", "logistic", "sqrt", "rsqrt"}
CHOICES = {"max", "min", "clamp", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}
STRUCTURE = {"convert_element_type", "broadcast_in_dim", "stop_gradient", "jit", "pjit", "custom_jvp_call"}
ELEMENTWISE = ARITHMETIC | FUNCTIONS | CHOICES | STRUCTURE
"""Primitives of activations that Mosaic compiles inside a kernel."""


def can_activate(experts: Experts) -> bool:
    """Return whether a kernel can compute the activation and its gradient: with the given primitives, for scalars."""
    traced = _with_gradients(_activation(experts), (8, 8), _num_products(experts))
    return not any(map(jnp.ndim, traced.consts)) and _primitives(traced.jaxpr) <= ELEMENTWISE


def can_fuse(inner: int, hidden: int, num_parts: int) -> bool:
    """Return whether kernels of these widths have tiles as wide as products without activations."""
    if get_default_device().platform != "tpu":
        return True
    from jax_moe_lb.kernels import tpu_products

    return tpu_products.can_fuse(inner, hidden, num_parts)


def gradients(
    batch: BackwardRows,
    experts: Parts,
    groups: RowGroups,
    dtype: DType,
    again: Callable[[Array], Parts] | None,
    before: Parts | None = None,
) -> tuple[Rows, Float[Array, "A 1"], dict[str, tuple[Array, ...]]]:
    """Return the gradients of rows, of row weights, and of each kind of weights in parts, added to `before`."""
    (rows, weights, upstream, saved), group_sizes = batch, groups.sizes
    sizes = tuple(part.up.shape[0] for part in experts)

    def outers(kind: str, left: Array, right: Others) -> tuple[Array, ...]:
        sums = None if before is None else tuple(getattr(part, kind) for part in before)
        return weight_gradients(left, right, groups, sizes, dtype, sums)

    kept: Products = saved or inner_products(rows, experts, group_sizes)
    if upstream.ndim > 2:
        # Otherwise the exchange of these gradients may end before the products, and nothing runs beside it.
        kept, upstream = in_order_on_tpu(kept, upstream)
    of_products, hidden, of_weights = activation_gradients(kept, weights, experts, group_sizes, upstream)
    of_kinds = {"down": outers("down", hidden, (upstream,))}
    last = experts if again is None else again(of_products[0])
    of_rows = row_gradients(of_products, last, group_sizes)
    # The other gradients of weights come last: the gradients of the rows travel meanwhile. The barrier sets the layout
    # of the rows, which on TPUs is that of exchanges.
    words = of_rows.reshape(len(of_rows), 2, -1) if _kernels().writes_words(of_rows.shape[1]) else of_rows
    words, (rows, of_products) = in_order(words, (rows, of_products))
    of_rows = words.reshape(of_rows.shape)
    if experts[0].is_fused:
        return of_rows, of_weights, of_kinds | {"up": outers("up", rows, of_products)}
    kinds = zip(("up", "gate"), of_products, strict=False)
    return of_rows, of_weights, of_kinds | {kind: outers(kind, rows, (part,)) for kind, part in kinds}


def hidden_and_products(
    rows: ReceivedRows, experts: Parts, group_sizes: GroupSizes, *, keeps_products: bool
) -> tuple[Float[Array, "A F"], Products]:
    """Return the hidden activations and, if they are kept, the products before the activation."""
    activation, count = _activation(experts[0]), _num_products(experts[0])

    def activate(tiles: list[Array], operands: list[Array], weights: Array | None) -> tuple[list[Array], Any]:
        return [activation(*tiles), *(tiles if keeps_products else ())], None

    def compute(rows: ReceivedRows, experts: Parts, group_sizes: GroupSizes) -> tuple[Array, ...]:
        term, epilogue = Term(rows, _inner_factors(experts)), Epilogue(activate, 1 + count * keeps_products)
        width, run = experts[0].down.shape[1], _kernels().products
        return run([term], width, group_sizes, transposed=False, epilogue=epilogue, name="grouped_hidden").arrays

    hidden, *kept = _call(compute, rows, experts, group_sizes)
    return hidden, tuple(kept)


def outputs(hidden: Float[Array, "A F"], experts: Parts, group_sizes: GroupSizes) -> Rows:
    """Return the products of the hidden activations with `down`."""

    def compute(hidden: Array, experts: Parts, group_sizes: GroupSizes) -> Rows:
        term, width = Term(hidden, (Factor(tuple(part.down for part in experts)),)), experts[0].down.shape[2]
        return _kernels().travelling([term], width, group_sizes, transposed=False).arrays[0]

    return _call(compute, hidden, experts, group_sizes)


def inner_products(rows: ReceivedRows, experts: Parts, group_sizes: GroupSizes) -> Products:
    """Return the products before the activation, of one kernel; arguments as for `hidden_and_products`."""

    def compute(rows: ReceivedRows, experts: Parts, group_sizes: GroupSizes) -> Products:
        term, width = Term(rows, _inner_factors(experts)), experts[0].down.shape[1]
        return _kernels().products([term], width, group_sizes, transposed=False, name="grouped_inner").arrays

    return _call(compute, rows, experts, group_sizes)


def activation_gradients(
    kept: Products, weights: Float[Array, "A 1"], experts: Parts, group_sizes: GroupSizes, upstream: ReceivedRows
) -> tuple[Products, Float[Array, "A F"], Float[Array, "A 1"]]:
    """Return the gradients of the products, the weighted hidden activations and the gradients of the row weights."""
    activation, count = _activation(experts[0]), _num_products(experts[0])

    def pull_back(tiles: list[Array], operands: list[Array], weights: Array) -> tuple[list[Array], Any]:
        hidden, *gradients = _evaluate(
            _with_gradients(activation, tiles[0].shape, count), tiles[0] * weights, *operands
        )
        return [*gradients, hidden * weights], hidden * tiles[0]

    def compute(kept: Products, weights: Array, experts: Parts, group_sizes: GroupSizes, upstream: ReceivedRows) -> Any:
        term = Term(upstream, (Factor(tuple(part.down for part in experts)),))
        epilogue = Epilogue(pull_back, count + 1, kept, weights[:, 0].astype(jnp.float32), has_sums=True)
        width, name, run = kept[0].shape[1], "grouped_activation_gradients", _kernels().products
        results = run([term], width, group_sizes, transposed=True, epilogue=epilogue, name=name)
        assert results.sums is not None
        return results.arrays[:count], results.arrays[count], results.sums[:, None].astype(weights.dtype)

    return _call(compute, kept, weights, experts, group_sizes, upstream)


def row_gradients(of_products: Products, experts: Parts, group_sizes: GroupSizes) -> Rows:
    """Return the gradients of rows, the sum over both products; arguments as for `activation_gradients`."""

    def compute(of_products: Products, experts: Parts, group_sizes: GroupSizes) -> Rows:
        factors = _inner_factors(experts)
        terms = [Term(rows, (factor,)) for rows, factor in zip(of_products, factors, strict=True)]
        width, run = experts[0].down.shape[2], _kernels().travelling
        return run(terms, width, group_sizes, transposed=True, name="grouped_row_gradients").arrays[0]

    return _call(compute, of_products, experts, group_sizes)


def weight_gradients(
    rows: ReceivedRows,
    others: Others,
    groups: RowGroups,
    parts: tuple[int, ...],
    dtype: DType,
    before: tuple[Float[Array, "_ I O"], ...] | None = None,
) -> tuple[Float[Array, "_ I O"], ...]:
    """Return `rows.T @ others` per group, in parts, plus `before`; several arrays are neighboring columns."""

    def compute(rows: ReceivedRows, others: Others, groups: RowGroups, before: Any) -> tuple[Array, ...]:
        return _kernels().outer(rows, others, groups, parts=parts, dtype=dtype, before=before)

    return _call(compute, rows, others, groups, before)


class _Kernels(NamedTuple):
    products: Callable[..., Results]
    outer: Callable[..., Any]
    travelling: Callable[..., Results]  # products that an exchange, or a kernel for copies of rows, reads next
    writes_words: Callable[[int], bool]  # whether these products can have contiguous words of a row, by the width


def _kernels() -> _Kernels:
    # Imported lazily: the compilers of kernels are not part of every installation.
    if get_default_device().platform == "tpu":
        from jax_moe_lb.kernels import tpu_products

        travelling = partial(tpu_products.products, travels=True)
        return _Kernels(tpu_products.products, tpu_products.outer, travelling, tpu_products.has_words)
    from jax_moe_lb.kernels import mosaic_outer, mosaic_product

    def outer(
        rows: Rows, others: Others, groups: RowGroups, *, parts: tuple[int, ...], dtype: DType, before: Any
    ) -> tuple[Array, ...]:
        results = mosaic_outer.outer(rows, others, groups, parts=parts, dtype=dtype)
        return results if before is None else tuple(map(jnp.add, before, results))

    return _Kernels(mosaic_product.products, outer, mosaic_product.products, lambda _: False)


def _activation(experts: Experts) -> Callable[..., Array]:
    """Return the activation as a function of the products with `up` and, if there is one, with the gate."""
    activation = experts.activation
    if _num_products(experts) == 1:
        return activation or jax.nn.gelu
    return lambda up, gate: (activation or swiglu)(gate, up)


def _num_products(experts: Experts) -> int:
    return 2 if experts.is_fused or experts.gate is not None else 1


def _inner_factors(experts: Parts) -> tuple[Factor, ...]:
    ups = tuple(part.up for part in experts)
    if experts[0].is_fused:
        return Factor(ups), Factor(ups, experts[0].down.shape[1])
    gates = tuple(part.gate for part in experts if part.gate is not None)
    return (Factor(ups), Factor(gates)) if gates else (Factor(ups),)


def _with_gradients(activation: Callable[..., Array], shape: tuple[int, ...], count: int) -> ClosedJaxpr:
    """Trace the activation and the gradients as a function of the upstream gradient and `count` products."""

    def with_gradients(upstream: Array, *operands: Array) -> tuple[Array, ...]:
        hidden, pull_back = jax.vjp(activation, *operands)
        return hidden, *pull_back(upstream)

    return jax.make_jaxpr(with_gradients)(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * (count + 1))


def _evaluate(traced: ClosedJaxpr, *operands: Any) -> list[Any]:
    # Without `add_any`, the sum of gradients, which Mosaic does not compile.
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *operands], strict=True))
    read = lambda one: one.val if isinstance(one, Literal) else values[one]  # noqa: E731
    for equation in jaxpr.eqns:
        inputs, inside = [read(one) for one in equation.invars], _inside(equation)
        if inside is not None:
            results = _evaluate(inside, *inputs)
        elif equation.primitive.name == "add_any":
            results = [jnp.add(*inputs)]
        else:
            result = equation.primitive.bind(*inputs, **equation.params)
            results = result if equation.primitive.multiple_results else [result]
        values |= zip(equation.outvars, results, strict=True)
    return [read(one) for one in jaxpr.outvars]


def _inside(equation: Any) -> ClosedJaxpr | None:
    found = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr)]
    return found[0] if found else None


def _primitives(jaxpr: Any) -> frozenset[str]:
    """Return the names of all primitives of a jaxpr and of those inside, and `array` for literals that are arrays."""
    found = frozenset(equation.primitive.name for equation in jaxpr.eqns)
    literals = [one.val for equation in jaxpr.eqns for one in equation.invars if isinstance(one, Literal)]
    inside = [one.jaxpr for equation in jaxpr.eqns if (one := _inside(equation)) is not None]
    return found.union({"array"} if any(map(jnp.ndim, literals)) else (), *map(_primitives, inside))


def _call(function: Callable[..., Any], *operands: Any) -> Any:
    leaves, form = jax.tree.flatten(operands)
    return unvarying_call(lambda *leaves: function(*jax.tree.unflatten(form, leaves)), *vary_alike(leaves))
