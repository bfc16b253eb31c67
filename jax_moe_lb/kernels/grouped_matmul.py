"""Products of groups of rows with one matrix each, and the gradients.

Every backend multiplies each row with the matrix of the group only. `backends.py` chooses the backend for each
platform.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import DType, GroupSizes, wide_dtype
from jax_moe_lb.kernels.backends import PLATFORMS, Backend, Product, choose_backend
from jax_moe_lb.kernels.operands import RowGroups, clear_tail

Inputs = Float[Array, "A I"]
Outputs = Float[Array, "A O"]
GroupWeights = Float[Array, "S _ _"]
WeightParts = tuple[Float[Array, "_ _ _"], ...]
Sums = Float[Array, "S I O"]


def grouped_matmul(
    rows: Inputs, weights: GroupWeights | WeightParts, group_sizes: GroupSizes, transposed: bool = False
) -> Outputs:
    """Multiply each row with the matrix of the group."""
    # It is differentiable in `rows` and `weights`, and accumulates in float32 or wider.
    # Returns the products, `[A, O]` in the dtype of `rows`. Rows beyond `group_sizes.sum()` are undefined and may be
    # NaN.
    parts = list(weights) if isinstance(weights, tuple) else [weights]
    inner = {part.shape[2 if transposed else 1] for part in parts}
    num_groups, dtypes = sum(part.shape[0] for part in parts), {part.dtype for part in parts}
    if ({rows.shape[1]}, group_sizes.shape[0], {rows.dtype}) != (inner, num_groups, dtypes):
        given = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
        raise ValueError(
            f"rows {rows.dtype}{list(rows.shape)}, weights {given} and group_sizes {list(group_sizes.shape)} do not "
            f"fit; transposed is {transposed}"
        )
    # The custom call requires int32, and operands that vary over the same mesh axes.
    rows, group_sizes, *parts = vary_alike((rows, group_sizes.astype(jnp.int32), *parts))
    return _matmul(transposed, rows, tuple(parts) if isinstance(weights, tuple) else parts[0], group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(transposed: bool, rows: Inputs, weights: GroupWeights | WeightParts, group_sizes: GroupSizes) -> Outputs:
    return _by_platform(matmul_product(rows, weights, transposed), rows, weights, RowGroups(group_sizes))


def matmul_product(rows: Inputs, weights: GroupWeights | WeightParts, transposed: bool) -> Product:
    """Return the description of the product of these operands in `grouped_matmul`."""
    first = jax.tree.leaves(weights)[0]
    widths, dtypes = (rows.shape[1], first.shape[1 if transposed else 2]), (rows.dtype, first.dtype)
    num_groups = tuple(part.shape[0] for part in weights) if isinstance(weights, tuple) else weights.shape[0]
    return Product("transposed" if transposed else "product", rows.shape[0], widths, num_groups, dtypes, rows.dtype)


def outer_product(rows: Inputs, others: Outputs, num_groups: int | tuple[int, ...], dtype: DType) -> Product:
    """Return the description of the product of these operands in `grouped_outer`."""
    widths, dtypes = (rows.shape[1], others.shape[1]), (rows.dtype, others.dtype)
    return Product("outer", rows.shape[0], widths, num_groups, dtypes, dtype)


def _by_platform(product: Product, *operands: Any, sums: Any = None) -> Any:
    # The platform is known when the program is lowered; the branches of all platforms are traced.
    backends = {platform: choose_backend(product, platform).backend for platform in (*PLATFORMS, "default")}
    return _on_platforms(product, tuple(backends.items()), *operands, sums)


# Traced once for equal shapes: a layer has dozens of products.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _on_platforms(product: Product, backends: tuple[tuple[str, Backend], ...], *operands: Any) -> Any:
    branches = {platform: partial(backend, product) for platform, backend in backends}
    return jax.lax.platform_dependent(*operands, **branches)


def _save(transposed: bool, *args: Any) -> tuple[Outputs, tuple[Any, ...]]:
    return _matmul(transposed, *args), args


def _backward(
    transposed: bool, saved: tuple[Any, ...], upstream: Outputs
) -> tuple[Inputs, GroupWeights | WeightParts, None]:
    rows, weights, group_sizes = saved
    rows, upstream = (clear_tail(array, group_sizes) for array in (rows, upstream))
    # The gradient has the shape of the weights, so the factors swap if these are transposed.
    pair = (upstream, rows) if transposed else (rows, upstream)
    # Rounded once, to the dtype of the weights.
    parts = tuple(part.shape[0] for part in weights) if isinstance(weights, tuple) else None
    sums = grouped_outer(*pair, RowGroups(group_sizes), jax.tree.leaves(weights)[0].dtype, parts=parts)
    return _matmul(not transposed, upstream, weights, group_sizes), sums, None


_matmul.defvjp(_save, _backward)


def grouped_outer(
    rows: Inputs,
    others: Outputs,
    groups: RowGroups,
    dtype: DType | None = None,
    sums: Sums | WeightParts | None = None,
    parts: tuple[int, ...] | None = None,
) -> Sums | WeightParts:
    """Compute `rows.T @ others` per group, the gradient of the weights of `grouped_matmul`."""
    # It is not differentiable; use it in custom backward passes.
    num_groups = groups.sizes.shape[0] if parts is None else parts
    product = outer_product(rows, others, num_groups, wide_dtype(rows) if dtype is None else dtype)
    leaves, form = jax.tree.flatten((rows, others, groups._replace(sizes=groups.sizes.astype(jnp.int32)), sums))
    *operands, sums = jax.tree.unflatten(form, vary_alike(leaves))
    return _by_platform(product, *operands, sums=sums)
