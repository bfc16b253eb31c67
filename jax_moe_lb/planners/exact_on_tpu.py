"""`fill` of `exact` as one Pallas kernel for TPUs.

XLA would run every step of the chains as about twenty kernels, each of them shorter than its launch. Here all chains
of a pass stay in vector registers and the memory beside them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_moe_lb.core.custom_calls import why_older_jax
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.tpu_vectors import OLDEST_JAX, num_vectors
from jax_moe_lb.planners.exact_packing import Candidates, Filled, fill

MOST_VECTORS = 512
"""Maximum number of vectors of the experts and slots of a pass: 2 MB, with noise and results below 10 MB."""


def why_no_kernel(num_home: int, num_ranks: int, slots: int, width: int) -> str | None:
    """Return the reason why the kernel cannot fill such a domain, or `None`."""
    if (reason := why_older_jax(OLDEST_JAX)) is not None:
        return reason
    vectors = (num_home + slots) * num_vectors(num_ranks, width)
    if vectors > MOST_VECTORS:
        return f"experts and slots are {vectors} vectors; expected at most {MOST_VECTORS}"
    return None


def fill_in_kernel(given: Candidates, slots: int, max_fan_out: int, *, interpret: bool = False) -> Filled:
    """Do the same as `fill`, in one kernel."""
    (num_home, num_ranks, _), width = given.tokens.shape, given.limit.shape[1]
    manual_axes = jax.typeof(given.tokens).manual_axis_type

    def result(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, num_ranks, width), jnp.int32, manual_axis_type=manual_axes)

    def run(given: Candidates, *into: Any) -> None:
        filled = fill(jax.tree.map(lambda ref: ref[...], given), slots, max_fan_out)
        for ref, value in zip(into, jax.tree.leaves(filled), strict=True):
            ref[...] = value

    kernel: Any = pl.pallas_call(
        run,
        out_shape=(result(slots), result(slots), result(num_home), result()),
        name="moe_exact_fill",
        interpret=interpret,
    )
    return Filled(*kernel(vary_like(given, given.tokens)))
