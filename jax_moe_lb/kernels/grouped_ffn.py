"""Feed-forward networks of experts over rows sorted by slot, by grouped products, and biases of groups of rows.

On accelerators each product covers all rows. Experts may be in several parts, such as home experts and replicas; the
Triton kernels of this package read these in place, see `takes_parts`. On CPUs, windows of rows pass the whole network,
forward and backward, and results overwrite them. Hidden activations, which are wider than rows, then take the memory of
one window, unless their products are saved for the backward pass.

Biases are broadcast to rows, and summed over rows, by products with a 0-1 matrix `[A, S]`. The matrix is much smaller
than an expert. Unlike a scatter, the product adds in the same order every time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jax_moe_lb.core.experts import Experts, activate, usual_layout
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.schedule import in_order, in_order_on_cuda
from jax_moe_lb.core.types import DType, GroupSizes, ReceivedRows, Rows, iota, wide_dtype
from jax_moe_lb.kernels.backends import (
    KINDS,
    TILE,
    Kind,
    Product,
    accelerator,
    fuses_activations,
    platforms_reading_tail,
    products_are_by_group,
    reads_parts,
)
from jax_moe_lb.kernels.grouped_matmul import grouped_matmul, grouped_outer
from jax_moe_lb.kernels.operands import BackwardRows, RowGroups, clear_tail, in_rows
from jax_moe_lb.kernels.row_windows import RowWindow, each_window, num_windows


def bias_rows(bias: Float[Array, "S O"], group_sizes: GroupSizes, num_rows: int) -> Float[Array, "A O"]:
    """Return the bias of each row's group; 0 for rows beyond the groups."""
    member = _members(group_sizes, num_rows).astype(bias.dtype)
    # Empty slots of GPUs are uninitialized, and 0 times a NaN is NaN.
    read = jnp.where((group_sizes > 0)[:, None], bias, 0)
    # Full precision: by default TPUs would round a float32 bias to bfloat16, although this product only selects rows.
    return jnp.matmul(member, read, precision=jax.lax.Precision.HIGHEST)


def bias_sums(of_rows: Float[Array, "A O"], group_sizes: GroupSizes, dtype: DType) -> Float[Array, "S O"]:
    """Sum the gradients of the rows per group, in float32 or wider; the transpose of `bias_rows`."""
    member = _members(group_sizes, of_rows.shape[0])
    written = jnp.where(member.any(1, keepdims=True), of_rows, 0)
    exact, wide = jax.lax.Precision.HIGHEST, wide_dtype(of_rows)
    sums = jnp.matmul(member.T.astype(of_rows.dtype), written, precision=exact, preferred_element_type=wide)
    return sums.astype(dtype)


def _members(group_sizes: GroupSizes, num_rows: int) -> Bool[Array, "A S"]:
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    row = iota(num_rows)[:, None]
    return (row >= (ends - group_sizes)[None]) & (row < ends[None])


ExpertParts = tuple[Experts, ...]
"""Experts in several parts with consecutive groups."""

AnyExperts = Experts | ExpertParts


def takes_parts(experts: ExpertParts) -> bool:
    """Return whether all products with these experts read them in parts, without a copy in one array."""
    # It depends on the default device alone, so that a program compiled for another machine sets it; see `aot`.
    groups, first = tuple(part.up.shape[0] for part in experts), experts[0]

    def product(kind: Kind, matrices: Array) -> Product:
        (_, inner, outer), dtype = matrices.shape, matrices.dtype
        widths = (outer, inner) if kind == "transposed" else (inner, outer)
        # A tile of rows: with rows that its kernel refuses, a product joins its own parts.
        return Product(kind, TILE, widths, groups, (dtype, dtype), dtype)

    return all(reads_parts(product(kind, matrices)) for kind in KINDS for matrices in (first.up, first.down))


Products = tuple[Float[Array, "A _"], ...]
"""Products of rows with `up` and, if separate, with the gate, biases included: the inputs of the activation."""


@jax.custom_vjp
def grouped_ffn(rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes) -> Rows:
    """Apply the expert of the group to each row."""
    # `moe` calls it for the received rows of a rank; use it in custom transports. The residuals are `rows` and
    # `experts`: the backward pass recomputes the hidden activations.
    return _by_platform(_network(rows, experts), _in_windows, rows.shape[0], rows, experts, group_sizes)[0]


def grouped_ffn_with_products(
    rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes
) -> tuple[Rows, Products]:
    """Compute `grouped_ffn`; also return the products, which `grouped_ffn_gradients` then need not compute."""
    # It is not differentiable; use it in custom forward passes.
    # Returns the outputs, `[A, H]`, and the products with `up` and, if separate, with the gate, `[A, F]` each in the
    # dtype of `rows`; or one of `[A, 2 F]` if `up` contains the gate. Rows beyond `group_sizes.sum()` are undefined.
    at_once, in_windows = _network(rows, experts, keeps_products=True), partial(_in_windows, keeps_products=True)
    return _by_platform(at_once, in_windows, rows.shape[0], rows, experts, group_sizes)


def _network(rows: ReceivedRows, experts: AnyExperts, *, keeps_products: bool = False) -> Callable[..., Any]:
    """Return the network for all rows, by the kernels of the default device if they compute activations."""
    at_once, fused = (partial(network, keeps_products=keeps_products) for network in (_at_once, _fused))
    return partial(_on_device, fused, at_once) if fuses(rows, experts) else at_once


def fused_inner_products(rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes) -> Products | None:
    """Return the products before the activation by one kernel on TPUs; `None` if `grouped_ffn_gradients` has others."""
    if accelerator() != "tpu" or _first(experts).is_fused or not fuses(rows, experts):
        return None
    from jax_moe_lb.kernels import fused_ffn

    def fused(rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes) -> Products:
        return fused_ffn.inner_products(rows, _parts(jax.tree.map(usual_layout, experts)), group_sizes)

    return _on_device(fused, lambda rows, *others: _inner_products(in_rows(rows), *others), rows, experts, group_sizes)


def fuses(rows: ReceivedRows | jax.ShapeDtypeStruct, experts: AnyExperts) -> bool:
    """Return whether kernels of the default device compute the activations inside the products."""
    first = _first(experts)
    groups = tuple(part.up.shape[0] for part in experts) if isinstance(experts, tuple) else first.up.shape[0]
    if first.has_adapters or first.up_bias is not None or first.down_bias is not None:
        return False
    (inner, outer), dtypes = first.down.shape[1:], (rows.dtype, first.up.dtype)
    products = (Product(kind, rows.shape[0], (inner, outer), groups, dtypes, rows.dtype) for kind in KINDS)
    if not fuses_activations(products):
        return False
    from jax_moe_lb.kernels import fused_ffn

    return fused_ffn.can_activate(first) and fused_ffn.can_fuse(inner, outer, len(_parts(experts)))


def _on_device(fused: Callable[..., Any], other: Callable[..., Any], *operands: Any) -> Any:
    platform = accelerator()
    assert platform is not None
    branches = {platform: fused, "default": other}
    return jax.lax.platform_dependent(*vary_like(operands, *operands), **branches)


def _fused(
    rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes, *, keeps_products: bool = False
) -> tuple[Rows, Products]:
    from jax_moe_lb.kernels import fused_ffn

    rows, experts = rows if accelerator() == "tpu" else in_rows(rows), jax.tree.map(usual_layout, experts)
    hidden, products = fused_ffn.hidden_and_products(rows, _parts(experts), group_sizes, keeps_products=keeps_products)
    if products and _first(experts).is_fused:
        # In the form of the other branch.
        products = (jnp.concatenate(products, -1),)
    if accelerator() == "tpu":
        return fused_ffn.outputs(hidden, _parts(experts), group_sizes), products
    # Another kernel may be faster for this product.
    return _matmul(hidden, experts, "down", group_sizes), products


def _parts(experts: AnyExperts) -> ExpertParts:
    return experts if isinstance(experts, tuple) else (experts,)


def _by_platform(at_once: Callable[..., Any], in_windows: Callable[..., Any], num_rows: int, *args: Any) -> Any:
    in_parts = any(isinstance(arg, tuple) and any(isinstance(part, Experts) for part in arg) for arg in args)
    if in_parts or (num_windows(num_rows) == 1 and not products_are_by_group()):
        return at_once(*args)
    # The branches of `platform_dependent` must have one type.
    alike = vary_like(args, *args)
    return jax.lax.platform_dependent(*alike, cpu=in_windows, default=at_once)


def _in_windows(
    rows: ReceivedRows, experts: Experts, group_sizes: GroupSizes, *, keeps_products: bool = False
) -> tuple[Rows, Products]:
    rows = in_rows(rows)
    like = jax.eval_shape(_inner_products, rows, experts, group_sizes) if keeps_products else ()

    def step(window: RowWindow, carry: tuple[Rows, Products]) -> tuple[Rows, Products]:
        of_window = window.take(carry[0]), window.of_groups(experts), window.group_sizes
        return jax.tree.map(window.put, _at_once(*of_window, keeps_products=keeps_products), carry)

    carry = rows, jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), like)
    return each_window(step, carry, rows.shape[0], group_sizes, of_one_group=products_are_by_group())


def _at_once(
    rows: ReceivedRows, experts: AnyExperts, group_sizes: GroupSizes, *, keeps_products: bool = False
) -> tuple[Rows, Products]:
    rows, experts = in_rows(rows), jax.tree.map(usual_layout, experts)
    # Rows are independent, so rows beyond the groups affect no others and need no mask.
    products = _inner_products(rows, experts, group_sizes)
    outputs = _product(activate(_first(experts), products), experts, "down", group_sizes)
    return outputs, products if keeps_products else ()


def _first(experts: AnyExperts) -> Experts:
    return experts[0] if isinstance(experts, tuple) else experts


def _kind(experts: AnyExperts, name: str) -> Any:
    """Return one weight array; for experts in parts, a tuple of arrays."""
    return tuple(getattr(part, name) for part in experts) if isinstance(experts, tuple) else getattr(experts, name)


def _inner_products(rows: Rows, experts: AnyExperts, group_sizes: GroupSizes) -> Products:
    return tuple(_product(rows, experts, name, group_sizes) for name in _first(experts).inner_kinds)


def _product(rows: Rows, experts: AnyExperts, name: str, group_sizes: GroupSizes) -> Array:
    products, bias = _matmul(rows, experts, name, group_sizes), _in_one(_kind(experts, f"{name}_bias"))
    return products if bias is None else products + bias_rows(bias, group_sizes, rows.shape[0])


def _matmul(rows: Rows, experts: AnyExperts, name: str, group_sizes: GroupSizes, *, transposed: bool = False) -> Array:
    """Multiply rows with the matrices of a kind, and with one factor of the adapters after the other."""
    multiply = partial(grouped_matmul, group_sizes=group_sizes, transposed=transposed)
    products = multiply(rows, _kind(experts, name))
    if not _first(experts).has_adapters:
        return products
    first, last = (_kind(experts, f"{name}_{part}") for part in ("ba" if transposed else "ab"))
    return products + multiply(multiply(rows, first), last)


def _in_one(bias: Any) -> Array | None:
    if not isinstance(bias, tuple):
        return bias
    return None if bias[0] is None else jnp.concatenate(bias)


def _save(*operands: Any) -> tuple[Rows, tuple[Any, ...]]:
    return grouped_ffn(*operands), operands


def grouped_ffn_gradients(
    batch: BackwardRows,
    experts: AnyExperts,
    groups: RowGroups,
    sums_dtype: DType,
    sums: AnyExperts | None = None,
    again: Callable[[Array], AnyExperts] | None = None,
) -> tuple[Rows, Float[Array, "A 1"], AnyExperts]:
    """Compute the gradients of `weights * grouped_ffn(rows, experts, group_sizes)`."""
    # Use it in a handwritten backward pass, such as the one of the rounds.
    at_once = partial(_gradients_at_once, sums_dtype=sums_dtype, again=again)
    if fuses(batch.rows, experts):
        at_once = partial(_on_device, partial(_fused_gradients, sums_dtype=sums_dtype, again=again), at_once)
    in_windows = partial(_gradients_in_windows, sums_dtype=sums_dtype)
    return _by_platform(at_once, in_windows, batch.rows.shape[0], batch, experts, groups, sums)


def _gradients_in_windows(
    batch: BackwardRows, experts: Experts, groups: RowGroups, sums: Experts | None, *, sums_dtype: DType
) -> tuple[Rows, Float[Array, "A 1"], Experts]:
    batch, wide = batch.in_rows, wide_dtype(batch.rows)
    if sums is None:
        sums = jax.tree.map(jnp.zeros_like, experts.trained)
    # Round after the sum over all windows.
    sums = jax.tree.map(lambda leaf: leaf.astype(wide), sums)

    def step(window: RowWindow, carry: PyTree) -> PyTree:
        rows, weights, sums = carry
        # Gradients overwrite the rows and weights of earlier windows.
        of_window = jax.tree.map(window.take, batch._replace(rows=rows, weights=weights))
        of_rows, of_weights, of_experts = _gradients_at_once(
            of_window, window.of_groups(experts), RowGroups(window.group_sizes), window.of_groups(sums), sums_dtype=wide
        )
        return window.put(of_rows, rows), window.put(of_weights, weights), window.put_of_groups(of_experts, sums)

    carry, num_rows = (batch.rows, batch.weights, sums), batch.rows.shape[0]
    of_rows, of_weights, sums = each_window(step, carry, num_rows, groups.sizes, of_one_group=products_are_by_group())
    return of_rows, of_weights, jax.tree.map(lambda leaf: leaf.astype(sums_dtype), sums)


def _gradients_at_once(
    batch: BackwardRows,
    experts: AnyExperts,
    groups: RowGroups,
    sums: AnyExperts | None,
    *,
    sums_dtype: DType,
    again: Callable[[Array], AnyExperts] | None = None,
) -> tuple[Rows, Float[Array, "A 1"], AnyExperts]:
    (rows, weights, upstream, products), group_sizes = batch.in_rows, groups.sizes
    experts, inner = jax.tree.map(usual_layout, experts), _first(experts).inner_kinds
    # Clear rows beyond the groups: weight gradients sum over all rows.
    clear = partial(clear_tail, group_sizes=group_sizes, on=_reading_tail(rows, experts, sums_dtype))
    rows, upstream = clear(rows), clear(upstream)
    first = _inner_products(rows, experts, group_sizes) if products is None else products
    hidden, pull_back = jax.vjp(partial(activate, _first(experts)), first)
    # With `y = hidden down`, the gradient of the row weight is `y upstream = hidden (upstream down^T)`. So this pass
    # needs no outputs. For the same reason, and because they are narrower, multiply the hidden activations by the row
    # weights.
    of_hidden = _matmul(upstream, experts, "down", group_sizes, transposed=True).astype(weights.dtype)
    of_weights = (hidden.astype(weights.dtype) * of_hidden).sum(1, keepdims=True)
    if (down_bias := _in_one(_kind(experts, "down_bias"))) is not None:
        bias = bias_rows(down_bias, group_sizes, rows.shape[0]).astype(weights.dtype)
        of_weights += (bias * upstream.astype(weights.dtype)).sum(1, keepdims=True)
    (upstreams,) = pull_back((of_hidden * weights).astype(rows.dtype))
    if len(upstreams) > len(inner):
        upstreams = (jnp.concatenate(upstreams, -1),)
    upstreams = tuple(clear(part, are_results=True) for part in upstreams)
    # On GPUs, hidden activations and gradients of weights follow the last use of the gradients of these activations:
    # `hidden` is computed once more, into their memory.
    upstreams, (first, upstream) = in_order_on_cuda(upstreams, (first, upstream))
    hidden = (activate(_first(experts), first).astype(weights.dtype) * weights).astype(rows.dtype)
    hidden = clear(hidden, are_results=True)

    num_groups = tuple(part.up.shape[0] for part in experts) if isinstance(experts, tuple) else None

    def outer(kind: str, left: Array, right: Array) -> Any:
        before = None if sums is None else _kind(sums, kind)
        return grouped_outer(left, right, groups, sums_dtype, before, num_groups)

    def narrow(rows: Array, kind: str, *, transposed: bool = False) -> Array:
        return clear(grouped_matmul(rows, _kind(experts, kind), group_sizes, transposed=transposed))

    def outers(kind: str, left: Array, right: Array) -> dict[str, Any]:
        if not _first(experts).has_adapters:
            return {kind: outer(kind, left, right)}
        a, b = f"{kind}_a", f"{kind}_b"
        return {a: outer(a, left, narrow(right, b, transposed=True)), b: outer(b, narrow(left, a), right)}

    def bias_sum(kind: str, part: Array) -> Any:
        total: Any = bias_sums(part, group_sizes, sums_dtype)
        if num_groups is not None:
            total = tuple(jnp.split(total, np.cumsum(num_groups)[:-1]))
        return total if sums is None else jax.tree.map(jnp.add, _kind(sums, kind), total)

    of_kinds = outers("down", hidden, upstream)
    if down_bias is not None and not _first(experts).has_adapters:
        of_kinds["down_bias"] = bias_sum("down_bias", upstream.astype(weights.dtype) * weights)
    # On GPUs, `down` comes before the gradients of the rows, if it is smaller than the arrays that it frees for them.
    if sum(leaf.nbytes for leaf in jax.tree.leaves(of_kinds)) <= upstream.nbytes + hidden.nbytes:
        of_kinds, upstreams = in_order_on_cuda(of_kinds, upstreams)
    last = experts if again is None else jax.tree.map(usual_layout, again(upstreams[0]))
    back = [
        _matmul(part, last, kind, group_sizes, transposed=True) for part, kind in zip(upstreams, inner, strict=True)
    ]
    of_rows = sum(back[1:], start=back[0])
    # The other gradients of weights come last: the gradients of the rows travel meanwhile.
    of_rows, (rows, upstreams) = in_order(of_rows, (rows, upstreams))
    for kind, part in zip(inner, upstreams, strict=True):
        of_kinds |= outers(kind, rows, part)
        if _first(experts).trained.up_bias is not None:
            of_kinds[f"{kind}_bias"] = bias_sum(f"{kind}_bias", part)
    return of_rows, of_weights, _with_kinds(experts, of_kinds)


def _reading_tail(rows: Rows, experts: AnyExperts, dtype: DType) -> list[str]:
    """Return the platforms on which the gradients of weights may read rows beyond the groups."""
    parts, first = tuple(part.up.shape[0] for part in _parts(experts)), _first(experts)
    groups = parts if isinstance(experts, tuple) else parts[0]
    products = [
        Product("outer", rows.shape[0], (matrices.shape[1], matrices.shape[2]), groups, (rows.dtype, rows.dtype), dtype)
        for matrices in (first.up, first.down)
    ]
    # The kernels of adapters are others, for narrow matrices.
    return ["cuda", "tpu"] if first.has_adapters else platforms_reading_tail(products)


def _fused_gradients(
    batch: BackwardRows,
    experts: AnyExperts,
    groups: RowGroups,
    sums: AnyExperts | None,
    *,
    sums_dtype: DType,
    again: Callable[[Array], AnyExperts] | None = None,
) -> tuple[Rows, Float[Array, "A 1"], AnyExperts]:
    from jax_moe_lb.kernels import fused_ffn

    experts = jax.tree.map(usual_layout, experts)
    batch = batch if accelerator() == "tpu" else batch.in_rows
    if batch.products is not None and len(batch.products) == 1 and _first(experts).is_fused:
        batch = batch._replace(products=tuple(jnp.split(batch.products[0], 2, -1)))
    rebuilt = None if again is None else lambda after: _parts(jax.tree.map(usual_layout, again(after)))
    before = None if sums is None else _parts(sums)
    of_rows, of_weights, of_kinds = fused_ffn.gradients(batch, _parts(experts), groups, sums_dtype, rebuilt, before)
    kinds = {kind: parts if isinstance(experts, tuple) else parts[0] for kind, parts in of_kinds.items()}
    return of_rows, of_weights, _with_kinds(experts, kinds)


def _with_kinds(experts: AnyExperts, kinds: dict[str, Any]) -> AnyExperts:
    if not isinstance(experts, tuple):
        return replace(experts, **kinds).trained
    return tuple(replace(part, **{name: of[i] for name, of in kinds.items()}).trained for i, part in enumerate(experts))


def _backward(saved: tuple[Any, ...], upstream: Rows) -> tuple[ReceivedRows, AnyExperts, None]:
    rows, experts, group_sizes = saved
    ones = vary_like(jnp.ones((rows.shape[0], 1), wide_dtype(rows)), rows)
    batch, dtype = BackwardRows(rows, ones, upstream), _first(experts).up.dtype
    of_rows, _, of_experts = grouped_ffn_gradients(batch, experts, RowGroups(group_sizes), dtype)
    return of_rows.reshape(rows.shape), of_experts, None


grouped_ffn.defvjp(_save, _backward)
