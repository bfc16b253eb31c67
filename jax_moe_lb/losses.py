"""Optional router losses, over the tokens of a whole expert-parallel group. Padding tokens do not count."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.routing import NO_EXPERT, Logits, Routing, tokens_per_expert
from jax_moe_lb.types import Counts, TokenMask


@dataclass(frozen=True)
class Losses:
    """Coefficients of the optional router losses; 0 leaves one out.

    Args:
        switch: load balance over the group (Switch Transformer, eq. 4).
        sequence: the same within each sequence (DeepSeek-V3, eq. 17-20).
        z: mean squared log-partition of the logits (ST-MoE, eq. 5).
    """

    switch: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for name in ("switch", "sequence", "z"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Losses.{name} is {getattr(self, name)}; expected at least 0")

    def __call__(
        self, routing: Routing, counts: Counts, axes: tuple[str, ...], sequence_length: int | None
    ) -> Float[Array, ""]:
        """The weighted sum over the ranks of mesh axes `axes`, on which it is equal; 0 if all are left out.

        Args:
            routing: this rank's.
            counts: `[R, E]`, that of the group.
            axes: the mesh axes of the group.
            sequence_length: consecutive tokens of one sequence; needed for `sequence`.

        Raises:
            ValueError: `sequence` is asked for without a length that divides the tokens.
        """
        total = jnp.zeros((), routing.scores.dtype)
        active = (routing.experts != NO_EXPERT).any(1)
        if self.switch:
            fraction = counts.sum(0).astype(total.dtype) / jnp.maximum(counts.sum(), 1).astype(total.dtype)
            total += self.switch * switch_loss(fraction, _group_mean(routing.scores, active, axes))
        if self.sequence:
            if sequence_length is None:
                raise ValueError("sequence_length is None; expected a number of tokens, for Losses.sequence")
            total += self.sequence * jax.lax.pmean(sequence_loss(routing, sequence_length), axes)
        if self.z:
            total += self.z * _group_mean(z_terms(routing.logits), active, axes)[0]
        return total


def switch_loss(fraction: Float[Array, "*B E"], probability: Float[Array, "*B E"]) -> Float[Array, ""]:
    """`E * sum_e fraction_e * probability_e`, averaged over leading dimensions: 1 when uniform.

    Args:
        fraction: share of the token copies that each expert got; no gradient flows through it.
        probability: mean score of each expert over the same tokens.
    """
    num_experts = fraction.shape[-1]
    return num_experts * (jax.lax.stop_gradient(fraction) * probability).sum(-1).mean()


def sequence_loss(routing: Routing, sequence_length: int) -> Float[Array, ""]:
    """`switch_loss` within each sequence of `sequence_length` consecutive tokens, averaged.

    Raises:
        ValueError: the tokens are no whole number of sequences.
    """
    num_tokens, num_experts = routing.scores.shape
    if sequence_length < 1 or num_tokens % sequence_length:
        raise ValueError(
            f"sequence_length is {sequence_length}; expected a divisor of the {num_tokens} tokens of a rank"
        )
    chosen = tokens_per_expert(routing.experts.reshape(num_tokens // sequence_length, -1), num_experts)
    active = (routing.experts != NO_EXPERT).any(1).reshape(-1, sequence_length, 1)
    scores = jnp.where(active, routing.scores.reshape(-1, sequence_length, num_experts), 0)
    num_active = jnp.maximum(active.sum(1), 1).astype(scores.dtype)
    per_tok = routing.experts.shape[1]
    return switch_loss(chosen.astype(scores.dtype) / (num_active * per_tok), scores.sum(1) / num_active)


def z_terms(logits: Logits) -> Float[Array, "T 1"]:
    """Squared log of the partition function of each token; the z-loss is their mean."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _group_mean(values: Float[Array, "T C"], active: TokenMask, axes: tuple[str, ...]) -> Float[Array, "C"]:
    sums = jax.lax.psum(jnp.where(active[:, None], values, 0).sum(0), axes)
    num_active = jax.lax.psum(active.sum(dtype=jnp.int32), axes)
    return sums / jnp.maximum(num_active, 1).astype(sums.dtype)
