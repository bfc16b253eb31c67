"""Activations between the projections of an expert, and `Experts`, the weights of experts as one pytree.

`Experts` and `nn.MoE` take an activation as `activation`. It is called as `activation(gate, up)` with a gate and as
`activation(up)` without one, on `[..., F]`. Any elementwise, hashable function will do, for example `jax.nn.relu`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jax_moe_lb.core.checks import Positive, checked_fields
from jax_moe_lb.core.types import pytree

Hidden = Float[Array, "*B F"]

Activation = Callable[..., Array]
"""Function of the first products of a row: of `gate` and `up`, or of `up` only."""


def swiglu(gate: Hidden, up: Hidden) -> Hidden:
    """Compute `silu(gate) * up`, the default activation with a gate: Mixtral, Qwen, DeepSeek, GLM.

    Args:
        gate: `[..., F]`, product with the gate projection.
        up: `[..., F]`, product with the up projection.

    Returns:
        `[..., F]` in the dtype of the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import swiglu
        >>> print(swiglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.silu(gate) * up


def geglu(gate: Hidden, up: Hidden) -> Hidden:
    """Compute `gelu(gate) * up`, with the tanh approximation of GELU: Gemma and Grok.

    Args:
        gate: `[..., F]`, product with the gate projection.
        up: `[..., F]`, product with the up projection.

    Returns:
        `[..., F]` in the dtype of the arguments.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import geglu
        >>> print(geglu(jnp.array([0.0, 100.0]), jnp.array([1.0, 2.0])))
        [  0. 200.]
    """
    return jax.nn.gelu(gate) * up


def gelu_exact(up: Hidden) -> Hidden:
    """Compute GELU by the error function; the default without a gate is its tanh approximation, `jax.nn.gelu`.

    Args:
        up: `[..., F]`, product with the up projection.

    Returns:
        `[..., F]` in the dtype of `up`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import gelu_exact
        >>> print(gelu_exact(jnp.array([0.0, 100.0])))
        [  0. 100.]
    """
    return up * _normal_cdf(up)


@jax.custom_jvp
def _normal_cdf(x: Hidden) -> Hidden:
    return 0.5 * jax.lax.erfc(-math.sqrt(0.5) * x)


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: tuple[Hidden], tangents: tuple[Hidden]) -> tuple[Hidden, Hidden]:
    # JAX 0.12 cannot differentiate `erfc` of an array that varies over mesh axes: its rule evaluates a polynomial whose
    # coefficients vary over none.
    (x,), (of_x,) = primals, tangents
    return _normal_cdf(x), jnp.exp(-0.5 * jnp.square(x)) * of_x * math.sqrt(0.5 / math.pi)


def relu_squared(up: Hidden) -> Hidden:
    """Compute `max(up, 0) ** 2`: Nemotron.

    Args:
        up: `[..., F]`, product with the up projection.

    Returns:
        `[..., F]` in the dtype of `up`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import relu_squared
        >>> print(relu_squared(jnp.array([-2.0, 3.0])))
        [0. 9.]
    """
    return jnp.square(jax.nn.relu(up))


@dataclass(frozen=True)
@checked_fields
class ClampedSwiGLU:
    """Activation `(up + 1) * gate * sigmoid(alpha * gate)` of clamped products: GPT-OSS.

    Args:
        limit: upper bound of `gate`, and bound of the magnitude of `up`; 7.0 by default, as in GPT-OSS.
        alpha: slope of the sigmoid; 1.702 by default, as in GPT-OSS.

    Raises:
        ValueError: `limit` is not positive.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.kernels import ClampedSwiGLU
        >>> print(ClampedSwiGLU()(jnp.array([0.0, 100.0]), jnp.array([1.0, 20.0])))
        [ 0.       55.999626]
    """

    limit: Positive = 7.0
    alpha: float = 1.702

    def __call__(self, gate: Hidden, up: Hidden) -> Hidden:
        """Return the activation of `gate` and `up`, `[..., F]` each."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


LOGICAL_AXES = {
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate": ("embed", "mlp"),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
    "gate_bias": ("mlp",),
    "up_a": ("embed", None),
    "up_b": (None, "mlp"),
    "down_a": ("mlp", None),
    "down_b": (None, "embed"),
    "gate_a": ("embed", None),
    "gate_b": (None, "mlp"),
}
"""Logical axes per array after the first dimension: `embed` is `H`, `mlp` is `F`, None the rank of adapters."""

ADAPTERS = tuple(f"{kind}_{part}" for kind in ("up", "down", "gate") for part in "ab")
"""Names of the factors of adapters."""


@pytree
class Experts:
    """Weights of `G` experts: the home experts of a rank (`G = L`), its slots (`G = S`) or all experts (`G = E`).

    Create it to call `moe` without the Flax layer, or for the sizes of a codec. A single shared expert has no leading
    dimension.

    Args:
        up: `[G, H, F]`, first projection; or `[G, H, 2 F]`, fused with the gate, `up` first. Fused products read the
            rows once, which saves memory traffic on GPUs (`docs/how-to/gpu.md`).
        down: `[G, F, H]`, second projection.
        gate: `[G, H, F]`, gate projection of a SwiGLU expert, `(silu(x gate) * (x up)) down`. `None` (default) if `up`
            contains the gate, or without a gate: `gelu(x up) down`.
        activation: another function between the projections, see `core/experts.py`; `None` (default) uses SwiGLU or
            GELU as above.
        up_bias: `[G, F]`, added to `x up`, or `[G, 2 F]` if `up` contains the gate; `None` (default) for no bias.
        down_bias: `[G, H]`, added to the output of an expert, before the routing weight; `None` (default) for no bias.
        gate_bias: `[G, F]`, added to `x gate`; `None` (default) for no bias.
        up_a: `[G, H, rank]`, first factor of the adapter of `up` (LoRA, arXiv 2106.09685): the first projection is
            `x up + (x up_a) up_b`. `None` (default) for no adapters. With adapters, all other arrays are frozen: their
            gradients are 0, and are neither computed nor moved.
        up_b: `[G, rank, F]`, or `[G, rank, 2 F]` if `up` contains the gate; second factor, multiplied by the scale of
            the adapter.
        down_a: `[G, F, rank]`, first factor of the adapter of `down`.
        down_b: `[G, rank, H]`, second factor.
        gate_a: `[G, H, rank]`, first factor of the adapter of `gate`.
        gate_b: `[G, rank, F]`, second factor.

    Raises:
        ValueError: `gate_bias` is set without `gate` and `up_bias`, or missing with both; or only some matrices have
            adapters.

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
    up_a: Float[Array, "*G H _"] | None = None
    up_b: Float[Array, "*G _ F_or_2F"] | None = None
    down_a: Float[Array, "*G F _"] | None = None
    down_b: Float[Array, "*G _ H"] | None = None
    gate_a: Float[Array, "*G H _"] | None = None
    gate_b: Float[Array, "*G _ F"] | None = None

    def __post_init__(self) -> None:
        if (self.gate_bias is not None) != (self.gate is not None and self.up_bias is not None):
            raise ValueError("Experts has a bias for only one of up and gate; expected one for both, or none")
        expected = [self.has_adapters and getattr(self, name[:-2]) is not None for name in ADAPTERS]
        if [getattr(self, name) is not None for name in ADAPTERS] != expected:
            raise ValueError("Experts has adapters for only some matrices; expected adapters for all, or none")

    @property
    def has_adapters(self) -> bool:
        """Whether the matrices have adapters."""
        return self.up_a is not None

    @property
    def trained(self) -> "Experts":
        """The arrays with gradients: with adapters, only these, and None in place of other arrays."""
        if not self.has_adapters:
            return self
        return jax.tree.map_with_path(lambda path, leaf: leaf if path[0].name in ADAPTERS else None, self)

    @property
    def is_fused(self) -> bool:
        """Whether `up` contains the gate."""
        return self.up.shape[-1] == 2 * self.down.shape[-2]

    @property
    def inner_kinds(self) -> tuple[str, ...]:
        """Names of the first projections; their biases have the suffix `_bias`."""
        return ("up",) if self.gate is None else ("up", "gate")

    def fused(self) -> "Experts":
        """Return the same experts with the gate in `up`, if they have a separate one and no adapters."""
        if self.gate is None or self.has_adapters:
            return self
        up_bias, gate_bias = self.up_bias, self.gate_bias
        if up_bias is not None and gate_bias is not None:
            up_bias, gate_bias = jnp.concatenate([up_bias, gate_bias], -1), None
        return replace(
            self, up=jnp.concatenate([self.up, self.gate], -1), gate=None, up_bias=up_bias, gate_bias=gate_bias
        )

    def apart(self) -> "Experts":
        """Return the same experts with a separate gate, if `up` contains it."""
        if not self.is_fused:
            return self
        up, gate = jnp.split(self.up, 2, -1)
        up_bias, gate_bias = (None, None) if self.up_bias is None else jnp.split(self.up_bias, 2, -1)
        return replace(self, up=up, gate=gate, up_bias=up_bias, gate_bias=gate_bias)

    @property
    def nbytes(self) -> int:
        """Bytes of all `G` experts."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def usual_layout(weights: Float[Array, "S ..."]) -> Float[Array, "S ..."]:
    """Constrain weights to the row-major layout on GPUs."""
    # Without the constraint, XLA chooses the layout of the transposed product and hoists the layout change out of
    # loops. A scan over layers then transposes the weights of all layers, and each layer transposes its own back.

    def pinned(weights: Array) -> Array:
        return with_layout_constraint(weights, Layout(tuple(range(weights.ndim))))

    return jax.lax.platform_dependent(weights, cuda=pinned, default=lambda weights: weights)


def dense_ffn(rows: Float[Array, "*B H"], expert: Experts, out_sharding: NamedSharding | None = None) -> Array:
    """Apply one expert to all rows; the reference of `grouped_ffn`."""

    def product(rows: Array, kind: str, sharding: NamedSharding | None = None) -> Array:
        out, bias = jnp.matmul(rows, getattr(expert, kind), out_sharding=sharding), getattr(expert, f"{kind}_bias")
        if expert.has_adapters:
            out += jnp.matmul(jnp.matmul(rows, getattr(expert, f"{kind}_a")), getattr(expert, f"{kind}_b"))
        return out if bias is None else out + jnp.broadcast_to(bias, out.shape)

    hidden = activate(expert, tuple(product(rows, kind) for kind in expert.inner_kinds))
    return product(hidden, "down", out_sharding)


def activate(experts: Experts, products: tuple[Array, ...]) -> Array:
    """Return the hidden activations from the products with `up` and, if separate, `gate`."""
    if experts.is_fused and len(products) == 1:
        products = tuple(jnp.split(products[0], 2, -1))
    up, *gate = products
    if gate:
        return (experts.activation or swiglu)(gate[0], up)
    return (experts.activation or jax.nn.gelu)(up)
