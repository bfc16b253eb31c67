"""Encoded gradients of gathered experts on the way home, with error feedback.

The way is the reverse of the gather: level by level from the innermost to the outermost, with one exchange per level.
At each level a rank has gradients of the experts of all members. It sends to every other member the largest entries of
that member's block, and adds the received entries to its own block, which stays exact. The sums of a level are encoded
again at the next one. Every level thus carries as many bytes as a gather of encoded experts.

The entries that a rank does not send are its *residual*. It adds them to its next gradients of the same experts (error
feedback, arXiv 1809.07599), so every entry arrives, some steps later.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from jax_moe_lb.collectives.permutes import exchange_tiles
from jax_moe_lb.core.experts import Experts
from jax_moe_lb.core.types import Axes, wide_dtype
from jax_moe_lb.transport.compression import Codec


def residual_experts(num_home: int, axes: Axes) -> int:
    """Return the number of experts in the residual of a rank: the sum over levels of the experts gathered there."""
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    return num_home * sum(math.prod(sizes[at:]) for at, size in enumerate(sizes) if size > 1)


def placed_at_home(home: Array, others: Array, axes: Axes) -> Array:
    """Replace this rank's block of `others` by `home`."""
    first = jax.lax.axis_index(axes) * home.shape[0]
    return jax.lax.dynamic_update_slice_in_dim(others, home, first, 0)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def differentiated_together(experts: Experts, residual: Experts, ratio: float) -> tuple[Experts, Experts]:
    """Return the experts and their residual; a derivative with respect to the experts alone is refused."""
    del ratio
    return experts, residual


def _require_both(ratio: float, primals: Any, tangents: Any) -> tuple[Any, Any]:
    of_experts, of_residual = (any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(t)) for t in tangents)
    if of_experts and not of_residual:
        # The residual is returned as a gradient. Without this gradient, unsent entries are lost.
        raise ValueError(
            f"gradient_ratio is {ratio}; expected gradients with respect to the residual, too, or 1.0. "
            "Differentiate with respect to nnx.Any(nnx.Param, GradientResidual), and call keep_residuals."
        )
    return primals, tangents


differentiated_together.defjvp(_require_both, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def place_with_residual(experts: Experts, decoded: Experts, residual: Experts, codec: Codec, axes: Axes) -> Experts:
    """Replace this rank's decoded experts by the exact ones; their gradients go home encoded."""
    del residual, codec
    return jax.tree.map(lambda home, others: placed_at_home(home, others, axes), experts, decoded)


def _save(experts: Experts, decoded: Experts, residual: Experts, codec: Codec, axes: Axes) -> tuple[Experts, Experts]:
    return place_with_residual(experts, decoded, residual, codec, axes), residual


def _backward(codec: Codec, axes: Axes, residual: Experts, upstream: Experts) -> tuple[Experts, Experts, Experts]:
    home, left = sent_home(upstream, residual, codec, axes)
    return home, jax.tree.map(jnp.zeros_like, upstream), left


place_with_residual.defvjp(_save, _backward)


def sent_home(gradients: Experts, residual: Experts, codec: Codec, axes: Axes) -> tuple[Experts, Experts]:
    """Return the sums of the gradients of this rank's home experts, and the new residual."""
    sums = jax.tree.map(lambda leaf: leaf.astype(wide_dtype(leaf)), gradients)
    left, first = [], 0
    for axis in axes:
        if jax.lax.axis_size(axis) == 1:
            continue
        end = first + sums.up.shape[0]
        earlier = jax.tree.map(lambda leaf, first=first, end=end: leaf[first:end], residual)
        sums, kept = _sent_over_level(jax.tree.map(jnp.add, sums, earlier), gradients, codec, axis)
        left.append(kept)
        first = end
    home = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, gradients)
    return home, jax.tree.map(lambda *parts: jnp.concatenate(parts), *left)


def _sent_over_level(gradients: Experts, like: Experts, codec: Codec, axis: str) -> tuple[Experts, Experts]:
    """Return the sums of this rank's block over the members of a level, and the entries not sent."""
    size, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    block = gradients.up.shape[0] // size
    encoded = codec.select(gradients, like)
    left = jax.tree.map(jnp.subtract, gradients, codec.decode(encoded, None, gradients))
    exact = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, me * block, block), gradients)
    left = jax.tree.map(
        lambda leaf: jax.lax.dynamic_update_slice_in_dim(leaf, jnp.zeros_like(leaf[:block]), me * block, 0), left
    )
    arrived = encoded.from_words(exchange_tiles(encoded.words, axis))

    def add(member: Array, sums: Experts) -> Experts:
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, member * block, block), arrived)
        return jax.tree.map(partial(jnp.where, member == me), sums, codec.decode(part, sums, sums))

    # In the order of the members, so that the sums do not depend on arrival.
    return jax.lax.fori_loop(0, size, add, exact), left
