"""`Experts` holds the weights of experts as one pytree."""

from dataclasses import field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb._pytree import pytree
from jax_moe_lb.activations import Activation

LOGICAL_AXES = {
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate": ("embed", "mlp"),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
    "gate_bias": ("mlp",),
}
"""What the dimensions after the first are, of each kind of weights: `embed` is `H`, `mlp` is `F`."""


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
        up_bias: `[G, F]`, added to `x up`, or `[G, 2 F]` where that holds the gate; `None`, which is usual: nothing is.
        down_bias: `[G, H]`, added to the output of an expert; so it counts with the weight of a token's copy.
        gate_bias: `[G, F]`, added to `x gate`.

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
    up_bias: Float[Array, "*G F_or_2F"] | None = None
    down_bias: Float[Array, "*G H"] | None = None
    gate_bias: Float[Array, "*G F"] | None = None

    def __post_init__(self) -> None:
        if (self.gate_bias is not None) != (self.gate is not None and self.up_bias is not None):
            raise ValueError("Experts has a bias for one of up and gate alone; expected one for both, or none")

    @property
    def is_fused(self) -> bool:
        """Says whether `up` holds the gate, too."""
        return self.up.shape[-1] == 2 * self.down.shape[-2]

    def fused(self) -> "Experts":
        """Returns the same experts with the gate in `up`, where there is one beside it."""
        if self.gate is None:
            return self
        up_bias, gate_bias = self.up_bias, self.gate_bias
        if up_bias is not None and gate_bias is not None:
            up_bias, gate_bias = jnp.concatenate([up_bias, gate_bias], -1), None
        return replace(
            self, up=jnp.concatenate([self.up, self.gate], -1), gate=None, up_bias=up_bias, gate_bias=gate_bias
        )

    def apart(self) -> "Experts":
        """Returns the same experts with the gate beside `up`, where that holds it."""
        if not self.is_fused:
            return self
        up, gate = jnp.split(self.up, 2, -1)
        up_bias, gate_bias = (None, None) if self.up_bias is None else jnp.split(self.up_bias, 2, -1)
        return replace(self, up=up, gate=gate, up_bias=up_bias, gate_bias=gate_bias)

    @property
    def nbytes(self) -> int:
        """Counts the bytes of all `G` experts."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))
