"""These are the functions between the projections of an expert; `Experts` and `nn.MoE` take one as `activation`.

With a gate it is called as `activation(gate, up)`, without one as `activation(up)`, on `[..., F]`. Any function of your
own will do that looks at each entry alone and is hashable, `jax.nn.relu` for example.

`Experts` holds the weights of experts as one pytree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.core.types import pytree

Hidden = Float[Array, "*B F"]

Activation = Callable[..., Array]
"""A function of the first products of a row: of `gate` and `up`, or of `up` alone."""


def swiglu(gate: Hidden, up: Hidden) -> Hidden:
    """Computes `silu(gate) * up`, which experts with a gate have by default: Mixtral, Qwen, DeepSeek, GLM.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import swiglu
        >>> print(swiglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.silu(gate) * up


def geglu(gate: Hidden, up: Hidden) -> Hidden:
    """Computes `gelu(gate) * up`, with GELU in its tanh form: Gemma and Grok.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import geglu
        >>> print(geglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.gelu(gate) * up


def gelu_exact(up: Hidden) -> Hidden:
    """Computes GELU by the error function; without a gate the default is its tanh form, `jax.nn.gelu`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import gelu_exact
        >>> print(gelu_exact(jnp.array([0.0, 100.0])))
        [  0. 100.]
    """
    return jax.nn.gelu(up, approximate=False)


def relu_squared(up: Hidden) -> Hidden:
    """Computes `max(up, 0) ** 2`: Nemotron.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import relu_squared
        >>> print(relu_squared(jnp.array([-2.0, 3.0])))
        [0. 9.]
    """
    return jnp.square(jax.nn.relu(up))


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Computes `(up + 1) * gate * sigmoid(alpha * gate)` of clamped products: GPT-OSS.

    Args:
        limit: `gate` is at most that, and `up` between it and its opposite; 7 in GPT-OSS.
        alpha: the slope of the sigmoid; 1.702 in GPT-OSS.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import ClampedSwiGLU
        >>> print(ClampedSwiGLU()(jnp.array([0.0, 100.0]), jnp.array([1.0, 20.0])))
        [ 0.       55.999626]
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit is {self.limit}; expected above 0")

    def __call__(self, gate: Hidden, up: Hidden) -> Hidden:
        """Computes it of both products."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


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
        activation: another function between the projections, see `kernels/experts.py`; `None`, the default, is these.
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
