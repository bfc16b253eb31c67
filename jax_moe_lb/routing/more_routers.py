"""Routers by expert choice, by token hash and with noise."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_moe_lb.core.checks import Count, NonNegative, checked_fields
from jax_moe_lb.core.types import iota
from jax_moe_lb.routing.capacity import capacity
from jax_moe_lb.routing.routers import NO_EXPERT, Logits, Router, Routing, TokenInfo, TopK, TopKWrapper


@dataclass(frozen=True)
@checked_fields
class ExpertChoice(Router):
    """Expert-choice router: every expert selects an equal number of the highest-scoring tokens.

    Experts are balanced by construction, but the number of experts per token varies. Use it in encoders: in a language
    model the selection depends on later tokens. Each rank selects among its own tokens, so ranks are balanced, too.

    Args:
        num_experts_per_tok: mean number of experts per token, the paper's capacity factor; usually 2.
        max_experts_per_tok: maximum number of experts per token; 4 (default). It determines the rows of buffers, so
            keep it small.
        selection_bias: must be False (default), because experts are balanced by construction.
        logit_bias: see `Router`.
        capacity_factor: see `Router`.
        scale_inputs: see `Router`.

    Raises:
        ValueError: `num_experts_per_tok` is below 1 or above `max_experts_per_tok`, or `selection_bias` is True.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import ExpertChoice
        >>> routing = ExpertChoice(1, max_experts_per_tok=2)(jnp.array([[2.0, 1.0], [0.0, 0.0]]))
        >>> routing.experts.tolist()  # each of two experts chooses one of two tokens
        [[0, -1], [1, -1]]

    Reference:
        Zhou et al. 2022, arXiv 2202.09368. Deviation: a token has at most `max_experts_per_tok` experts, because shapes
        are static; further experts are dropped.
    """

    num_experts_per_tok: int
    max_experts_per_tok: int = 4

    def __post_init__(self) -> None:
        self._refuse("selection_bias")
        if not 1 <= self.num_experts_per_tok <= self.max_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; "
                f"expected 1 to max_experts_per_tok = {self.max_experts_per_tok}"
            )

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route tokens by expert choice.

        Args:
            logits: `[T, E]`, float32 or wider.
            bias: unused, because experts are balanced by construction.
            info: token properties; `mask` excludes tokens from selection.

        Returns:
            The routing, with `K = min(max_experts_per_tok, E)`.
        """
        del bias
        num_tokens, num_experts = logits.shape
        scores = jax.nn.softmax(logits, -1)
        # A token with NaN or an infinite logit takes no place of others, and has a fault.
        is_finite = jnp.isfinite(scores).all(1, keepdims=True)
        offered = jnp.where(is_finite if info.mask is None else is_finite & info.mask[:, None], scores, -1)
        size = min(capacity(1.0, num_tokens * self.num_experts_per_tok, num_experts), num_tokens)
        best, tokens = jax.lax.top_k(offered.T, size)
        chosen = jnp.zeros((num_experts, num_tokens), bool).at[iota(num_experts)[:, None], tokens].set(best >= 0).T
        per_tok = min(self.max_experts_per_tok, num_experts)
        kept, experts = jax.lax.top_k(jnp.where(chosen, scores, -1), per_tok)
        # The score of a selected token can underflow to 0; unselected entries are -1.
        weights = jnp.where(kept >= 0, jnp.take_along_axis(scores, experts, axis=1), 0)
        weights = jnp.where(is_finite, weights, jnp.nan)
        return Routing(jnp.where(kept >= 0, experts, NO_EXPERT), weights, logits, scores)

    def with_experts(
        self, logits: Logits, experts: Int[Array, "T K"], chosen: Bool[Array, "T K"] | None = None
    ) -> Routing:
        """Return the routing to given experts, with the scores as weights; see `TopK.with_experts`."""
        del chosen
        scores = jax.nn.softmax(logits, -1)
        return Routing(experts, jnp.take_along_axis(scores, experts, axis=1), logits, scores)


@dataclass(frozen=True)
@checked_fields
class HashRouter(Router):
    """Hash router: the experts of a token depend on a hash of the id.

    It has no learned routing, as a baseline for learned routers; frequent tokens make its load uneven. Pass `token_ids`
    to the layer. All weights are equal. `nn.MoE` warns that the kernel has no gradient without router losses.

    Args:
        num_experts_per_tok: `K`, number of distinct experts per token; 1 in the paper.
        selection_bias: must be False (default), because no scores select the experts.
        logit_bias: see `Router`.
        capacity_factor: see `Router`.
        scale_inputs: must be False (default), because the weights are constant.

    Raises:
        ValueError: `num_experts_per_tok` is below 1, or `selection_bias` or `scale_inputs` is True.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TokenInfo
        >>> from jax_moe_lb.routing import HashRouter
        >>> routing = HashRouter(2)(jnp.zeros((3, 8)), info=TokenInfo(ids=jnp.array([5, 6, 5])))
        >>> (routing.experts[0] == routing.experts[2]).all().item(), routing.weights[0].tolist()
        (True, [0.5, 0.5])

    Reference:
        Roller et al. 2021, Hash Layers, arXiv 2106.04426. Deviation: the paper also balances the hash table by token
        frequency.
    """

    num_experts_per_tok: Count

    learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._refuse("selection_bias", "scale_inputs")

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route tokens by the hash of ids.

        Args:
            logits: `[T, E]`, used by the losses only.
            bias: unused.
            info: token properties; `ids` is required.

        Returns:
            The routing, with weights `1 / K`.

        Raises:
            ValueError: `info.ids` is `None`, or there are fewer than `K` experts.
        """
        del bias
        num_experts, per_tok = logits.shape[1], self.num_experts_per_tok
        if info.ids is None:
            raise ValueError("token_ids is None; expected the ids of the tokens, for HashRouter")
        if per_tok > num_experts:
            raise ValueError(f"num_experts_per_tok is {per_tok}; expected at most {num_experts}")
        first = _hash(info.ids, 1) % jnp.uint32(num_experts)
        # The step is short enough to stay within one cycle, so all experts of a token differ.
        step = 1 + _hash(info.ids, 2) % jnp.uint32(max(1, (num_experts - 1) // max(1, per_tok - 1)))
        experts = (first[:, None] + step[:, None] * iota(per_tok)[None].astype(jnp.uint32)) % jnp.uint32(num_experts)
        return self.with_experts(logits, experts.astype(jnp.int32))

    def with_experts(
        self, logits: Logits, experts: Int[Array, "T K"], chosen: Bool[Array, "T K"] | None = None
    ) -> Routing:
        """Return the routing to given experts, with weights `1 / K`; see `TopK.with_experts`."""
        del chosen
        weights = jnp.full(experts.shape, 1 / self.num_experts_per_tok, logits.dtype)
        return Routing(experts, weights, logits, jax.nn.softmax(logits, -1))


@dataclass(frozen=True)
@checked_fields
class NoisyTopK(TopKWrapper):
    """Top-k router with normal noise on the logits for the selection of experts.

    The noise explores experts near the best. In training, pass a new `key` to the layer in each step. Without a key, as
    in evaluation, there is no noise.

    Args:
        router: router for selection and weights, and default of the options of `Router`; `TopK(2)` by default.
        std: standard deviation of the noise, 0.1 by default; usually 1 / E.
        selection_bias: see `Router`; the option of `router` by default.
        logit_bias: see `Router`; the option of `router` by default.
        capacity_factor: see `Router`; the option of `router` by default.
        scale_inputs: see `Router`; the option of `router` by default.

    Raises:
        ValueError: `std` is negative.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TokenInfo, TopK
        >>> from jax_moe_lb.routing import NoisyTopK
        >>> router, logits = NoisyTopK(TopK(1), std=1.0), jnp.zeros((64, 4))
        >>> drawn = router(logits, info=TokenInfo(key=jax.random.key(0))).experts
        >>> sorted(set(drawn.ravel().tolist())), sorted(set(router(logits).experts.ravel().tolist()))
        ([0, 1, 2, 3], [0])

    Reference:
        Shazeer et al. 2017, arXiv 1701.06538, section 2.1. Deviation: the noise has one fixed standard deviation
        instead of a learned one per logit. It affects the selection but not the weights.
    """

    router: TopK = field(default_factory=lambda: TopK(2))
    std: NonNegative = 0.1

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route tokens by noisy scores.

        Args:
            logits: `[T, E]`, float32 or wider.
            bias: `[E]`, added to the scores for selection only; `None` (default) for no bias.
            info: token properties; `key` generates the noise.

        Returns:
            The routing.
        """
        if info.key is None:
            return self.router(logits, bias, info)
        noise = self.std * jax.random.normal(info.key, logits.shape, logits.dtype)
        return self.router.with_experts(logits, self.router(logits + noise, bias, info).experts)


def _hash(ids: Int[Array, "T"], seed: int) -> Array:
    """Return a hash per id, uint32, equal on all machines (MurmurHash3 finalizer)."""
    x = ids.astype(jnp.uint32) + jnp.uint32(seed * 0x9E3779B9 % (1 << 32))
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
