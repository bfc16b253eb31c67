"""The model that is simulated: what one layer computes and moves."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_moe_lb.experts import Experts
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.transport.codec import Codec

DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}
"""Numbers of so many bytes; only their size matters."""

ATTENTION_PRODUCTS = 4
"""Products with an `H x H` matrix for every token: queries, keys, values and output."""


@dataclass(frozen=True)
class ModelShape:
    """Layers that are all alike, one microbatch per step.

    Args:
        layers: MoE layers.
        hidden: `H`.
        inner: `F`.
        experts: `E`.
        per_token: `K`.
        tokens: `T`, tokens of each rank.
        itemsize: bytes of a number, in weights and in tokens as they travel.
        gradient_itemsize: bytes of a number of the experts' gradients.
        gated: whether experts have three matrices (SwiGLU) instead of two.
        pre_expert_s: seconds between the experts of one layer and the router's result of the next, forward; `None`:
            from the floating-point operations of attention.
        sequence: tokens that attend to each other, where `pre_expert_s` is `None`.
        other_s: seconds of a step outside these layers: optimizer, embedding, output.
    """

    layers: int
    hidden: int
    inner: int
    experts: int
    per_token: int
    tokens: int
    itemsize: int = 2
    gradient_itemsize: int = 4
    gated: bool = True
    pre_expert_s: float | None = None
    sequence: int = 4096
    other_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "inner", "experts", "per_token", "tokens", "itemsize", "gradient_itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.itemsize not in DTYPES:
            raise ValueError(f"itemsize is {self.itemsize}; expected one of {', '.join(map(str, DTYPES))}")
        if self.per_token > self.experts:
            raise ValueError(f"per_token is {self.per_token}; expected at most the {self.experts} experts")
        for name in ("pre_expert_s", "other_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; expected a finite number of seconds, at least 0")

    @property
    def matrices(self) -> int:
        """Of one expert."""
        return 3 if self.gated else 2

    @property
    def row_bytes(self) -> int:
        """One token copy as it travels."""
        return self.hidden * self.itemsize

    @property
    def row_flops(self) -> int:
        """One token copy through its expert, forward."""
        return 2 * self.matrices * self.hidden * self.inner

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return self.matrices * self.hidden * self.inner * self.itemsize

    @property
    def expert_gradient_bytes(self) -> int:
        """Gradients of one expert."""
        return self.matrices * self.hidden * self.inner * self.gradient_itemsize

    def encoded_bytes(self, codec: Codec, num_experts: int) -> int:
        """So many experts as they travel through a codec, which is asked with shapes alone."""
        up = jax.ShapeDtypeStruct((num_experts, self.hidden, self.inner), DTYPES[self.itemsize])
        down = jax.ShapeDtypeStruct((num_experts, self.inner, self.hidden), DTYPES[self.itemsize])
        found = []

        def ask(*weights: Array) -> None:
            found.append(codec.encoded_bytes(Experts(*weights)))

        jax.eval_shape(ask, *((up, down, up) if self.gated else (up, down)))
        return found[0]

    def before_experts_s(self, cluster: Cluster) -> float:
        """Attention and router of one layer, forward, on one rank."""
        if self.pre_expert_s is not None:
            return self.pre_expert_s
        products = 2 * ATTENTION_PRODUCTS * self.hidden**2 + 2 * self.hidden * self.experts
        # Scores and their products with the values; half of them, as no token sees later ones.
        attention = 2 * self.hidden * self.sequence
        return self.tokens * (products + attention) / cluster.flops_per_s
