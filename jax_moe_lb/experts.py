"""`Experts` holds the weights of experts as one pytree."""

from dataclasses import field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._pytree import pytree
from jax_moe_lb.activations import Activation


@pytree
class Experts:
    """These are the weights of `G` experts: the home experts of a rank (`G = L`), its slots (`G = S`) or all (`G = E`).

    Make it to call `moe` without the Flax layer, or to ask a codec for its bytes. A shared expert, which is one alone,
    has no leading dimension.

    Args:
        up: `[G, H, F]`, the first projection; or `[G, H, 2 F]`, that and the gate in one, `up` first. So the rows are
            read once for both, which saves memory traffic on GPUs (`docs/how-to/gpu.md`).
        down: `[G, F, H]`, the second projection.
        gate: `[G, H, F]`; with a gate an expert is SwiGLU, `(silu(x gate) * (x up)) down`, which is usual. `None` where
            `up` holds it; else it makes the expert plain GELU, `gelu(x up) down`.
        activation: another function between the projections, see `activations.py`; `None`, the default, is these.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import Experts
        >>> Experts(up=jnp.zeros((4, 8, 16)), down=jnp.zeros((4, 16, 8))).nbytes
        4096
    """

    up: Float[Array, "*G H F_or_2F"]
    down: Float[Array, "*G F H"]
    gate: Float[Array, "*G H F"] | None = None
    activation: Activation | None = field(default=None, metadata={"static": True})

    @property
    def is_fused(self) -> bool:
        """Says whether `up` holds the gate, too."""
        return self.up.shape[-1] == 2 * self.down.shape[-2]

    def fused(self) -> "Experts":
        """Returns the same experts with the gate in `up`, where there is one beside it."""
        if self.gate is None:
            return self
        return replace(self, up=jnp.concatenate([self.up, self.gate], -1), gate=None)

    def apart(self) -> "Experts":
        """Returns the same experts with the gate beside `up`, where that holds it."""
        if not self.is_fused:
            return self
        up, gate = jnp.split(self.up, 2, -1)
        return replace(self, up=up, gate=gate)

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all `G` experts."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
