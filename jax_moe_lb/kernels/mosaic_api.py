"""Calls of Pallas Mosaic GPU that differ between JAX 0.11.2 and later, and the launch of a warp-specialized kernel.

A program has three warpgroups of 128 threads. Two consume tiles with the tensor cores, and one produces them by bulk
copies into shared memory. As many programs as the device has multiprocessors run until all tiles are done.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu
from jax.extend.backend import get_default_device
from jaxtyping import Array

from jax_moe_lb.core.types import DType, Ref

CONSUMERS = 2
"""Warpgroups that multiply; the producer is the warpgroup after them."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Registers of a thread; together at most 65,536 for all threads."""

HOPPER_MULTIPROCESSORS = 132
"""Number for H100 SXM, H200 and GH200; the default for devices that do not report it."""

SWIZZLE_BYTES = 128
"""Bytes of a row of a swizzled tile in shared memory."""


def multiprocessors() -> int:
    """Return the number of multiprocessors of the default device."""
    return getattr(get_default_device(), "core_count", None) or HOPPER_MULTIPROCESSORS


def swizzled(dtype: DType) -> tuple[Any, Any]:
    """Return the transforms of an array in shared memory for the tensor cores, free of bank conflicts."""
    transforms: Any = mosaic_gpu
    columns = SWIZZLE_BYTES // jax.numpy.dtype(dtype).itemsize
    return transforms.TilingTransform((8, columns)), transforms.SwizzleTransform(SWIZZLE_BYTES)


def load(ref: Ref, layout: Any) -> Array:
    """Load a tile from global memory into registers of the given layout."""
    # In JAX 0.11 the second argument is an index.
    index = ((),) if "idx" in inspect.signature(mosaic_gpu.load).parameters else ()
    return mosaic_gpu.load(ref, *index, layout=layout, optimized=False)


def launch(
    body: Callable[..., None],
    out_types: Sequence[Any],
    operands: Sequence[Array],
    name: str,
    sizes: tuple[int, int, int],
) -> list[Array]:
    """Run a kernel on the default device."""
    kernel = mosaic_gpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(multiprocessors(),),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=f"{name}_{'x'.join(map(str, sizes))}",
        compiler_params=mosaic_gpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    return list(kernel(*operands))
