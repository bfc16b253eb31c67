"""Vectors of a TPU, the JAX that compiles kernels for them, and a kernel that allocates an array."""

import math
from typing import Any

import jax
from jaxtyping import Array

LANES, SUBLANES = 128, 8
"""Shape of a vector of 4-byte words."""

OLDEST_JAX = (0, 12)
"""Oldest JAX by which the kernels were compiled."""

ALLOCATING_KERNEL = "moe_allocate"
"""Kernel that writes nothing; its result is an uninitialized array."""


def num_vectors(rows: int, columns: int) -> int:
    """Return the number of vectors of a matrix of 4-byte words."""
    return math.ceil(rows / SUBLANES) * math.ceil(columns / LANES)


def allocate_after(array: Array, shape: tuple[int, ...]) -> Array:
    """Return an uninitialized array, allocated when `array` exists."""
    # Other platforms do not import Mosaic.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    result = jax.ShapeDtypeStruct(shape, array.dtype, manual_axis_type=jax.typeof(array).manual_axis_type)
    run: Any = pl.pallas_call(
        lambda *_: None, in_specs=[anywhere], out_specs=anywhere, out_shape=result, name=ALLOCATING_KERNEL
    )
    return run(array)
