"""`fill` of `exact` as one Pallas kernel for TPUs.

XLA would run every step of the chains as about twenty kernels, each of them shorter than its launch. Here all chains
of a pass stay in vector registers and the memory beside them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.planners.exact_packing import Filled, SearchOrder, fill

OLDEST_JAX = (0, 12)
"""Oldest JAX by which the kernel was compiled."""

LANES, SUBLANES = 128, 8
"""Shape of a vector of 4-byte words."""

MOST_VECTORS = 512
"""Maximum number of vectors of the experts and slots of a pass: 2 MB, with noise and results below 10 MB."""


def why_no_kernel(num_home: int, num_ranks: int, slots: int, width: int) -> str | None:
    """Return the reason why the kernel cannot fill such a domain, or `None`."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"JAX is {jax.__version__}; expected at least {'.'.join(map(str, OLDEST_JAX))}"
    vectors = (num_home + slots) * pl.cdiv(num_ranks, SUBLANES) * pl.cdiv(width, LANES)
    if vectors > MOST_VECTORS:
        return f"experts and slots are {vectors} vectors; expected at most {MOST_VECTORS}"
    return None


def fill_in_kernel(
    tokens: Int[Array, "L M 1"],
    place: Int[Array, "M 1"] | None,
    limit: Int[Array, "1 C"],
    order: SearchOrder,
    most: Int[Array, "1 C"],
    slots: int,
    max_fan_out: int,
    *,
    interpret: bool = False,
) -> Filled:
    """Do the same as `fill`, in one kernel."""
    (num_home, num_ranks, _), width = tokens.shape, limit.shape[1]
    manual_axes = jax.typeof(tokens).manual_axis_type
    operands = vary_like((tokens, place, limit, order, most), tokens)

    def result(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, num_ranks, width), jnp.int32, manual_axis_type=manual_axes)

    def run(*refs: Any) -> None:
        tokens, place, limit, order, most = jax.tree.map(lambda ref: ref[...], refs[: len(operands)])
        filled = fill(tokens, place, limit, order, most, slots, max_fan_out)
        for ref, value in zip(refs[len(operands) :], jax.tree.leaves(filled), strict=True):
            ref[...] = value

    kernel: Any = pl.pallas_call(
        run,
        out_shape=(result(slots), result(slots), result(num_home), result()),
        name="moe_exact_fill",
        interpret=interpret,
    )
    return Filled(*kernel(*operands))
