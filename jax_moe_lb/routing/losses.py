"""Optional router losses over the tokens of an expert-parallel group, excluding padding tokens."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.checks import NonNegative, checked_fields
from jax_moe_lb.core.manual_axes import vary_like
from jax_moe_lb.core.topology import Topology
from jax_moe_lb.core.types import Counts, TokenMask, as_int32
from jax_moe_lb.routing.routers import Logits, Routing, TokenInfo


@dataclass(frozen=True)
@checked_fields
class Losses:
    """Coefficients of the optional router losses; 0 (default) disables a loss.

    Pass them to `nn.MoE` and add `router_loss` of the statistics to the loss of the model. Balanced plans do not need
    them, because plans balance ranks, not experts. Use them if experts themselves should be used evenly.

    Args:
        switch: coefficient of the load-balance loss over the group (Switch Transformer, eq. 4); usually 1e-2.
        sequence: coefficient of the load-balance loss within each sequence or document (DeepSeek-V3, eq. 17-20);
            usually 1e-4.
        z: coefficient of the mean squared log-partition function of the logits (ST-MoE, eq. 5), which keeps logits
            small; usually 1e-3.

    Raises:
        ValueError: a coefficient is negative.

    Examples:
        >>> from jax_moe_lb import Losses
        >>> Losses(switch=1e-2, z=1e-3)
        Losses(switch=0.01, sequence=0.0, z=0.001)
    """

    switch: NonNegative = 0.0
    sequence: NonNegative = 0.0
    z: NonNegative = 0.0

    def __call__(
        self, routing: Routing, counts: Counts, topology: Topology, tokens: TokenInfo = TokenInfo()
    ) -> Float[Array, ""]:
        """Return the weighted sum of the losses over the group, equal on all ranks.

        Args:
            routing: routing of this rank's tokens.
            counts: `[R, E]`, the token copies routed from each rank of the group to each expert.
            topology: topology of the layer.
            tokens: properties of this rank's tokens: the `mask` of padding, and `segments` and `num_segments` for
                `sequence`. A segment may span ranks and groups; its loss covers all tokens.

        Returns:
            Scalar of the dtype of `routing.scores`; 0 if all coefficients are 0.

        Raises:
            ValueError: `sequence` is above 0 and `tokens.segments` or `tokens.num_segments` is `None`.
        """
        return self.with_z(routing, counts, topology, tokens)[0]

    def with_z(
        self, routing: Routing, counts: Counts, topology: Topology, tokens: TokenInfo = TokenInfo()
    ) -> tuple[Float[Array, ""], Float[Array, ""] | None]:
        """Return the weighted sum of the losses, and the part of `z` in it.

        Args:
            routing: see `__call__`, as for the other arguments.
            counts: `[R, E]`.
            topology: topology of the layer.
            tokens: properties of this rank's tokens.

        Returns:
            Two scalars; the second is `None` if `z` is 0, so that programs without it have no such output.

        Raises:
            ValueError: see `__call__`.
        """
        axes = topology.expert_axes
        total = jnp.zeros((), routing.scores.dtype)
        # All tokens but padding, also those without an expert, as of `ExpertChoice`.
        active = vary_like(
            jnp.ones(routing.scores.shape[:1], bool) if tokens.mask is None else tokens.mask, routing.scores
        )
        if self.switch:
            # The counts cover the whole group exactly, so the fraction needs no collective.
            fraction = counts.sum(0).astype(total.dtype) / jnp.maximum(counts.sum(), 1).astype(total.dtype)
            total += self.switch * switch_loss(fraction, _group_mean(routing.scores, active, axes))
        if self.sequence:
            segments, number = tokens.segments, tokens.num_segments
            if segments is None or number is None:
                name = "segments" if segments is None else "num_segments"
                raise ValueError(f"{name} is None; expected the segments of the tokens, for Losses.sequence")
            mean = segment_loss(routing, active, segments, number, axes, topology.data_axes)
            total += self.sequence * mean
        if not self.z:
            return total, None
        z_loss = self.z * _group_mean(z_terms(routing.logits), active, axes)[0]
        return total + z_loss, z_loss


def switch_loss(fraction: Float[Array, "*B E"], probability: Float[Array, "*B E"]) -> Float[Array, ""]:
    """Return `E * sum_e fraction_e * probability_e`, averaged over leading dimensions; 1 if uniform."""
    num_experts = fraction.shape[-1]
    return num_experts * (jax.lax.stop_gradient(fraction) * probability).sum(-1).mean()


def segment_loss(
    routing: Routing,
    active: TokenMask,
    segments: Int[Array, "T"],
    num_segments: int,
    axes: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Return the mean of `switch_loss` over the segments with tokens; a segment of padding tokens alone has 0."""
    # Each group returns its part: the mean over groups is the mean over all segments. If groups have equally many
    # segments of their own, the part is the mean over these.
    scores, experts = routing.scores, routing.experts
    if not num_segments:
        # A mean over no segments would be NaN.
        return jnp.zeros((), scores.dtype)
    num_experts, active = scores.shape[1], active[:, None]
    # Map negative numbers past the end, to drop them: a negative index would count from the end.
    rows = jnp.where(segments < 0, num_segments, as_int32(segments))
    columns = jnp.where(experts < 0, num_experts, experts)
    terms = jnp.concatenate([jnp.where(active, scores, 0), active, jnp.ones_like(active)], 1, dtype=scores.dtype)
    sums = jnp.zeros((num_segments, num_experts + 2), scores.dtype).at[rows].add(terms, mode="drop")
    chosen = jnp.zeros((num_segments, num_experts), scores.dtype).at[rows[:, None], columns].add(1, mode="drop")
    of_group = jax.lax.psum(jnp.concatenate([sums, chosen], 1), axes)
    is_here = (of_group[:, num_experts + 1 : num_experts + 2] > 0).astype(scores.dtype)
    table = jax.lax.psum(jnp.concatenate([of_group, is_here], 1), others)
    ends = (num_experts, num_experts + 1, num_experts + 2, 2 * num_experts + 2)
    scores, num_active, _, chosen, num_groups = jnp.split(table, ends, 1)
    num_active = jnp.maximum(num_active, 1)
    # Groups share the loss of a segment: their mean is the mean over all segments.
    share = is_here / jnp.maximum(num_groups, 1) * math.prod(map(jax.lax.axis_size, others))
    mean = switch_loss(chosen / (num_active * experts.shape[1]), scores / num_active * share)
    # The mean includes segments without tokens, whose terms are 0.
    return mean * num_segments / jnp.maximum((num_groups > 0).sum(dtype=jnp.int32), 1).astype(mean.dtype)


def z_terms(logits: Logits) -> Float[Array, "T 1"]:
    """Return the squared log-partition function per token, `[T, 1]`; the z-loss is the mean."""
    return jnp.square(jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _group_mean(values: Float[Array, "T C"], active: TokenMask, axes: tuple[str, ...]) -> Float[Array, "C"]:
    # Sum first and divide once, so that ranks with more padding weigh less.
    sums = jax.lax.psum(jnp.where(active[:, None], values, 0).sum(0), axes)
    num_active = jax.lax.psum(active.sum(dtype=jnp.int32), axes)
    return sums / jnp.maximum(num_active, 1).astype(sums.dtype)
