"""Product of tokens and router kernel in float32 or wider, at full precision, and the gradients.

cuBLAS computes a float32 product at full precision without tensor cores. On NVIDIA GPUs, XLA therefore splits both
operands into bfloat16 terms inside a Triton kernel and multiplies the terms on tensor cores. Three terms have the 24
bits of a float32 number. The kernel adds the products of each tile to its sum in float32, rounded to nearest, because
tensor cores truncate. So the logits are as exact as those of the float32 product.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import DotAlgorithmPreset, Precision
from jaxtyping import Array, Float

from jax_moe_lb.core.manual_axes import vary_alike
from jax_moe_lb.core.types import DType, Tokens, wide_dtype


def router_logits(x: Tokens, kernel: Float[Array, "H E"]) -> Float[Array, "T E"]:
    """Compute the router logits `x @ kernel`."""
    # Vary outside of the custom gradient, so that the kernel's gradient is summed over the ranks.
    return _product(*vary_alike((x, kernel)), wide_dtype(x))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(left: Float[Array, "M K"], right: Float[Array, "K N"], dtype: DType) -> Float[Array, "M N"]:
    # Strict dtype promotion forbids `jnp.promote_types` of float32 and float64.
    wide = np.promote_types(wide_dtype(left), wide_dtype(right))

    def at(precision: Precision | DotAlgorithmPreset, left: Array, right: Array) -> Array:
        return jnp.matmul(left.astype(wide), right.astype(wide), precision=precision).astype(dtype)

    if wide != jnp.float32:
        return at(Precision.HIGHEST, left, right)
    algorithm = bfloat16_terms(left.dtype, right.dtype, dtype)
    return jax.lax.platform_dependent(left, right, cuda=partial(at, algorithm), default=partial(at, Precision.HIGHEST))


def bfloat16_terms(left: DType, right: DType, result: DType) -> DotAlgorithmPreset:
    """Return the algorithm of a product on tensor cores: the fewest bfloat16 terms that are exact enough."""
    # Returns two terms of each operand and three products, if both operands or the result are bfloat16: bfloat16
    # operands are one exact term, and a bfloat16 result has 8 bits. Three terms and six products otherwise.
    narrow = jnp.dtype(jnp.bfloat16)
    if left == right == narrow or result == narrow:
        return DotAlgorithmPreset.BF16_BF16_F32_X3
    return DotAlgorithmPreset.BF16_BF16_F32_X6


def _save(left: Array, right: Array, dtype: DType) -> tuple[Array, tuple[Array, Array]]:
    return _product(left, right, dtype), (left, right)


def _backward(dtype: DType, saved: tuple[Array, Array], upstream: Array) -> tuple[Array, Array]:
    left, right = saved
    return _product(upstream, right.T, left.dtype), _product(upstream.T, left, right.dtype).T


_product.defvjp(_save, _backward)
