"""Optional router losses over the tokens of an expert-parallel group, excluding padding tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_moe_lb.core.checks import checked_fields
from jax_moe_lb.core.types import Counts, TokenMask
from jax_moe_lb.routing.routers import NO_EXPERT, Logits, Routing, tokens_per_expert


@dataclass(frozen=True)
@checked_fields
class Losses:
    """Coefficients of the optional router losses; 0 (default) disables a loss.

    Pass them to `nn.MoE` and add `router_loss` of the statistics to the loss of the model. Balanced plans do not need
    them, because plans balance ranks, not experts. Use them if experts themselves should be used evenly.

    Args:
        switch: coefficient of the load-balance loss over the group (Switch Transformer, eq. 4); usually 1e-2.
        sequence: coefficient of the load-balance loss within each sequence (DeepSeek-V3, eq. 17-20); usually 1e-4.
        z: coefficient of the mean squared log-partition function of the logits (ST-MoE, eq. 5), which keeps logits
            small; usually 1e-3.

    Raises:
        ValueError: a coefficient is negative.

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
        """Return the weighted sum of the losses over the group, equal on all its ranks.

        Args:
            routing: routing of this rank's tokens.
            counts: `[R, E]`, the token copies routed from each rank of the group to each expert.
            axes: mesh axes of the group.
            sequence_length: number of consecutive tokens per sequence, required for `sequence`.

        Returns:
            Scalar of the dtype of `routing.scores`; 0 if all coefficients are 0.

        Raises:
            ValueError: `sequence` is above 0 and `sequence_length` is `None` or does not divide the tokens.
        """
        total = jnp.zeros((), routing.scores.dtype)
        active = (routing.experts != NO_EXPERT).any(1)
        if self.switch:
            # The counts cover the whole group exactly, so the fraction needs no collective.
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
    """Return `E * sum_e fraction_e * probability_e`, averaged over leading dimensions; 1 if uniform.

    Args:
        fraction: `[..., E]`, fraction of the token copies routed to each expert; gradients are stopped.
        probability: `[..., E]`, mean score of each expert over the same tokens.

    Returns:
        Scalar.
    """
    num_experts = fraction.shape[-1]
    return num_experts * (jax.lax.stop_gradient(fraction) * probability).sum(-1).mean()


def sequence_loss(routing: Routing, sequence_length: int) -> Float[Array, ""]:
    """Return the mean of `switch_loss` over the sequences of `sequence_length` consecutive tokens.

    Args:
        routing: routing of this rank's tokens.
        sequence_length: tokens per sequence.

    Returns:
        Scalar of the dtype of `routing.scores`.

    Raises:
        ValueError: `sequence_length` does not divide the tokens of a rank.
    """
    num_tokens, num_experts = routing.scores.shape
    if not num_tokens:
        # A mean over no sequences would be NaN.
        return routing.scores.sum()
    if sequence_length < 1 or num_tokens % sequence_length:
        raise ValueError(
            f"sequence_length is {sequence_length}; expected a divisor of the {num_tokens} tokens of a rank"
        )
    chosen = tokens_per_expert(routing.experts.reshape(num_tokens // sequence_length, -1), num_experts)
    active = (routing.experts != NO_EXPERT).any(1).reshape(-1, sequence_length, 1)
    scores = jnp.where(active, routing.scores.reshape(-1, sequence_length, num_experts), 0)
    # A sequence of only padding tokens gives 0 instead of a division by zero.
    num_active = jnp.maximum(active.sum(1), 1).astype(scores.dtype)
    per_tok = routing.experts.shape[1]
    return switch_loss(chosen.astype(scores.dtype) / (num_active * per_tok), scores.sum(1) / num_active)


def z_terms(logits: Logits) -> Float[Array, "T 1"]:
    """Return the squared log-partition function of each token, `[T, 1]`; the z-loss is its mean."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _group_mean(values: Float[Array, "T C"], active: TokenMask, axes: tuple[str, ...]) -> Float[Array, "C"]:
    # Sum first and divide once, so that ranks with more padding weigh less.
    sums = jax.lax.psum(jnp.where(active[:, None], values, 0).sum(0), axes)
    num_active = jax.lax.psum(active.sum(dtype=jnp.int32), axes)
    return sums / jnp.maximum(num_active, 1).astype(sums.dtype)
