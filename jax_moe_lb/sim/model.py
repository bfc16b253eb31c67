"""A model shape says what one layer of the simulated model computes and moves."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_moe_lb.balancers.facts import LayerFacts
from jax_moe_lb.experts import Experts
from jax_moe_lb.sim.cluster import Cluster
from jax_moe_lb.transport.codec import Codec

DTYPES = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32}
"""These dtypes have so many bytes; only their size matters."""

ATTENTION_PRODUCTS = 4
"""Every token is multiplied with so many `H x H` matrices: for queries, keys, values and output."""


@dataclass(frozen=True)
class ModelShape:
    """A model shape has the sizes of layers that are all alike, with one microbatch per step.

    Fill it in for `simulate`, `replay` and `skewed_counts`; `sim/presets` has some models.

    Args:
        layers: the MoE layers of the model.
        hidden: `H`, the width of the model.
        inner: `F`, the inner width of an expert.
        experts: `E`, the experts of a layer.
        per_token: `K`, the experts of a token, usually 1 to 8.
        tokens: `T`, the tokens of each rank, 4096 to 8192 in the presets.
        itemsize: the bytes of a number, in weights and in tokens as they travel; usually 2, for bfloat16.
        gradient_itemsize: the bytes of a number in the experts' gradients; usually 4, for float32.
        gated: whether experts have three matrices (SwiGLU), which is usual, or two.
        pre_expert_s: the seconds between the experts of one layer and the router's result of the next, forward; `None`
            computes them from the floating-point operations of attention.
        sequence: the tokens that attend to each other, where `pre_expert_s` is `None`.
        other_s: the seconds of a step outside these layers: optimizer, embedding, output.
        shared_inner: the inner width of the experts that all tokens pass on their own rank, together; 0 without any.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from jax_moe_lb.sim import ModelShape
        >>> model = ModelShape(layers=58, hidden=7168, inner=2048, experts=256, per_token=8, tokens=4096)
        >>> model.row_bytes, model.expert_bytes
        (14336, 88080384)
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
    shared_inner: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "inner", "experts", "per_token", "tokens", "itemsize", "gradient_itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.shared_inner < 0:
            raise ValueError(f"shared_inner is {self.shared_inner}; expected at least 0")
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
        """Counts the matrices of one expert."""
        return 3 if self.gated else 2

    @property
    def row_bytes(self) -> int:
        """Counts the bytes of one token copy as it travels."""
        return self.hidden * self.itemsize

    @property
    def row_flops(self) -> int:
        """Counts the floating-point operations of one token copy through its expert, forward."""
        return 2 * self.matrices * self.hidden * self.inner

    @property
    def shared_flops(self) -> int:
        """Counts the floating-point operations of one token through the experts that all tokens pass, forward."""
        return 2 * self.matrices * self.hidden * self.shared_inner

    @property
    def expert_bytes(self) -> int:
        """Counts the bytes of one expert's weights."""
        return self.matrices * self.hidden * self.inner * self.itemsize

    @property
    def expert_gradient_bytes(self) -> int:
        """Counts the bytes of one expert's gradients."""
        return self.matrices * self.hidden * self.inner * self.gradient_itemsize

    @property
    def facts(self) -> LayerFacts:
        """Returns what a layer of the model tells its balancer."""
        return LayerFacts(
            num_copies=self.tokens * self.per_token,
            expert_bytes=self.expert_bytes,
            gradient_bytes=self.expert_gradient_bytes,
            token_bytes=self.row_bytes,
            token_flops=self.row_flops,
        )

    def encoded_bytes(self, codec: Codec, num_experts: int) -> int:
        """Counts the bytes of experts as they travel through a codec, which is asked with shapes alone.

        Args:
            codec: what they are encoded with.
            num_experts: how many travel together.
        """
        up = jax.ShapeDtypeStruct((num_experts, self.hidden, self.inner), DTYPES[self.itemsize])
        down = jax.ShapeDtypeStruct((num_experts, self.inner, self.hidden), DTYPES[self.itemsize])
        found = []

        def ask(experts: Experts) -> None:
            found.append(codec.encoded_bytes(experts))

        # Nothing is allocated so, however large the experts are.
        jax.eval_shape(lambda up, down: ask(Experts(up, down, up if self.gated else None)), up, down)
        return found[0]

    def before_experts_s(self, cluster: Cluster) -> float:
        """Computes the seconds of attention and router of one layer, forward, on one rank."""
        if self.pre_expert_s is not None:
            return self.pre_expert_s
        products = 2 * ATTENTION_PRODUCTS * self.hidden**2 + 2 * self.hidden * self.experts
        # Scores and their products with the values; half of them, as no token sees later ones.
        attention = 2 * self.hidden * self.sequence
        return self.tokens * (products + attention) / cluster.flops_per_s
