"""These are the functions between the projections of an expert; `Experts` and `nn.MoE` take one as `activation`.

With a gate it is called as `activation(gate, up)`, without one as `activation(up)`, on `[..., F]`. Any function of your
own will do that looks at each entry alone and is hashable, `jax.nn.relu` for example.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Hidden = Float[Array, "*B F"]

Activation = Callable[..., Array]
"""A function of the first products of a row: of `gate` and `up`, or of `up` alone."""


def swiglu(gate: Hidden, up: Hidden) -> Hidden:
    """Computes `silu(gate) * up`, which experts with a gate have by default: Mixtral, Qwen, DeepSeek, GLM.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import swiglu
        >>> print(swiglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.silu(gate) * up


def geglu(gate: Hidden, up: Hidden) -> Hidden:
    """Computes `gelu(gate) * up`, with GELU in its tanh form: Gemma and Grok.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import geglu
        >>> print(geglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.gelu(gate) * up


def gelu_exact(up: Hidden) -> Hidden:
    """Computes GELU by the error function; without a gate the default is its tanh form, `jax.nn.gelu`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import gelu_exact
        >>> print(gelu_exact(jnp.array([0.0, 100.0])))
        [  0. 100.]
    """
    return jax.nn.gelu(up, approximate=False)


def relu_squared(up: Hidden) -> Hidden:
    """Computes `max(up, 0) ** 2`: Nemotron.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import relu_squared
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
        >>> from jax_moe_lb import ClampedSwiGLU
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
