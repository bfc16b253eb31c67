"""These optional router losses are taken over the tokens of a whole expert-parallel group, without padding tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.core.types import Counts, TokenMask
from jax_moe_lb.routing.routers import NO_EXPERT, Logits, Routing, tokens_per_expert


@dataclass(frozen=True)
class Losses:
    """These are the coefficients of the optional router losses; 0 leaves one out.

    Give them to `nn.MoE` and add `Stats.loss` to the loss of the model. Balanced plans need none of them, as they level
    ranks and not experts: use them where experts themselves should be used evenly.

    Args:
        switch: weighs the load balance over the group (Switch Transformer, eq. 4); usually 1e-2.
        sequence: weighs the load balance within each sequence (DeepSeek-V3, eq. 17-20); usually 1e-4.
        z: weighs the mean squared log-partition of the logits (ST-MoE, eq. 5), which keeps them small; usually 1e-3.

    Raises:
        ValueError: a coefficient is below 0.

    Examples:
        >>> from jax_moe_lb import Losses
        >>> Losses(switch=1e-2, z=1e-3)
        Losses(switch=0.01, sequence=0.0, z=0.001)
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
        """Computes the weighted sum over the group, equal on all its ranks; 0 if all losses are left out.

        Args:
            routing: the routing of this rank's tokens.
            counts: `[R, E]`, the token copies that each rank of the group routes to each expert.
            axes: the mesh axes of the group.
            sequence_length: consecutive tokens of one sequence; needed for `sequence`.

        Raises:
            ValueError: `sequence` is asked for without a length that divides the tokens.
        """
        total = jnp.zeros((), routing.scores.dtype)
        active = (routing.experts != NO_EXPERT).any(1)
        if self.switch:
            # The counts are the group's, exact, so the fraction needs no collective of its own.
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
    """Computes `E * sum_e fraction_e * probability_e`, averaged over leading dimensions: 1 when uniform.

    Args:
        fraction: the share of the token copies that each expert got; no gradient flows through it.
        probability: the mean score of each expert over the same tokens.
    """
    num_experts = fraction.shape[-1]
    return num_experts * (jax.lax.stop_gradient(fraction) * probability).sum(-1).mean()


def sequence_loss(routing: Routing, sequence_length: int) -> Float[Array, ""]:
    """Averages `switch_loss` over the sequences of `sequence_length` consecutive tokens.

    Args:
        routing: the routing of this rank's tokens.
        sequence_length: tokens of a sequence.

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
    # A sequence of padding alone must give 0, not a division by zero.
    num_active = jnp.maximum(active.sum(1), 1).astype(scores.dtype)
    per_tok = routing.experts.shape[1]
    return switch_loss(chosen.astype(scores.dtype) / (num_active * per_tok), scores.sum(1) / num_active)


def z_terms(logits: Logits) -> Float[Array, "T 1"]:
    """Squares the log of each token's partition function; the z-loss is the mean of that."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _group_mean(values: Float[Array, "T C"], active: TokenMask, axes: tuple[str, ...]) -> Float[Array, "C"]:
    # Sums first and one division after: ranks with more padding must not weigh as much as others.
    sums = jax.lax.psum(jnp.where(active[:, None], values, 0).sum(0), axes)
    num_active = jax.lax.psum(active.sum(dtype=jnp.int32), axes)
    return sums / jnp.maximum(num_active, 1).astype(sums.dtype)
