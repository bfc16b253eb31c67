"""The weights of experts, as one pytree."""

import jax
from jaxtyping import Array, Float

from jax_moe_lb._pytree import pytree


@pytree
class Experts:
    """Weights of `G` experts: the home experts of a rank (`G = L`), its slots (`G = S`) or all (`G = E`).

    One expert alone has no leading dimension.

    Args:
        up: first projection.
        down: second projection.
        gate: with it an expert is SwiGLU, `(silu(x gate) * (x up)) down`; `None`: plain
            GELU, `gelu(x up) down`.
    """

    up: Float[Array, "*G H F"]
    down: Float[Array, "*G F H"]
    gate: Float[Array, "*G H F"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all `G` experts."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
