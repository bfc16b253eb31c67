"""`Experts` holds the weights of experts as one pytree."""

import jax
from jaxtyping import Array, Float

from jax_moe_lb._pytree import pytree


@pytree
class Experts:
    """These are the weights of `G` experts: the home experts of a rank (`G = L`), its slots (`G = S`) or all (`G = E`).

    Make it to call `moe` without the Flax layer, or to ask a codec for its bytes. A shared expert, which is one alone,
    has no leading dimension.

    Args:
        up: `[G, H, F]`, the first projection.
        down: `[G, F, H]`, the second projection.
        gate: `[G, H, F]`; with it an expert is SwiGLU, `(silu(x gate) * (x up)) down`, which is usual. `None` makes it
            plain GELU, `gelu(x up) down`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import Experts
        >>> Experts(up=jnp.zeros((4, 8, 16)), down=jnp.zeros((4, 16, 8))).nbytes
        4096
    """

    up: Float[Array, "*G H F"]
    down: Float[Array, "*G F H"]
    gate: Float[Array, "*G H F"] | None = None

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all `G` experts."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
