"""Routers by expert choice, by token hash and with noise, and capacity mode.

In capacity mode an expert takes a limited number of token copies, and the layer drops the others (GShard, arXiv
2006.16668). Use it for comparisons: the same layer drops nothing without `capacity_factor`. Each rank has its own share
of an expert's capacity, as GShard's groups have, so ranks exchange nothing for it. The output of a token is 0 if all
its copies are dropped.
"""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb.core.types import iota
from jax_moe_lb.routing.routers import NO_EXPERT, Logits, Routing, TokenInfo, TopK


def capacity(factor: float, num_copies: int, num_experts: int) -> int:
    """Returns how many copies of one rank an expert takes, at least 1.

    Args:
        factor: over the mean; 1 to 2 are usual.
        num_copies: `T * K`.
        num_experts: `E`.

    Raises:
        ValueError: `factor` is not positive and finite.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"capacity_factor is {factor}; expected above 0 and finite, or None to drop nothing")
    return max(1, math.ceil(factor * num_copies / num_experts))


def within_capacity(experts: Int[Array, "T K"], num_experts: int, capacity: int) -> Int[Array, "T K"]:
    """Sends copies beyond an expert's capacity nowhere.

    All first choices come before second ones, and among equals earlier tokens before later ones.

    Args:
        experts: the expert of each copy of this rank, `NO_EXPERT` for none.
        num_experts: `E`.
        capacity: how many copies an expert takes.
    """
    by_choice = experts.T.reshape(-1)
    queues = jnp.where(by_choice < 0, num_experts, by_choice)
    order = jnp.argsort(queues, stable=True)
    ordered = queues[order]
    # The place in the queue of an expert: how far a copy stands behind the first one of its expert.
    place = iota(order.size) - jnp.searchsorted(ordered, ordered, method="sort").astype(jnp.int32)
    kept = jnp.zeros_like(ordered, dtype=bool).at[order].set(place < capacity, unique_indices=True)
    return jnp.where(kept, by_choice, NO_EXPERT).reshape(experts.T.shape).T


@dataclass(frozen=True)
class ExpertChoice:
    """This router lets every expert choose tokens: those of highest score, as many for each (arXiv 2202.09368).

    Experts are level by construction, while tokens get more experts or fewer. Use it in encoders: in a language model
    the choice looks at later tokens. Each rank chooses among its own tokens, so that all ranks are level too; deviates:
    a token has at most `max_experts_per_tok` experts, since shapes are static, and those beyond are left out.

    Args:
        num_experts_per_tok: the mean number of experts of a token, the paper's capacity factor; 2 is usual.
        max_experts_per_tok: the largest number; rows of buffers are counted by it, so take a small one. 4 is usual.

    Raises:
        ValueError: the numbers are not in order.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import ExpertChoice
        >>> routing = ExpertChoice(1, max_experts_per_tok=2)(jnp.array([[2.0, 1.0], [0.0, 0.0]]))
        >>> routing.experts.tolist()  # each of two experts chooses one of two tokens
        [[0, -1], [1, -1]]
    """

    num_experts_per_tok: int
    max_experts_per_tok: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.max_experts_per_tok:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}; "
                f"expected 1 to max_experts_per_tok = {self.max_experts_per_tok}"
            )

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Lets experts choose by score.

        Args:
            logits: `[T, E]`.
            bias: it is not used: nothing is left to balance.
            info: its mask says which tokens nobody may choose.
        """
        del bias
        num_tokens, num_experts = logits.shape
        scores = jax.nn.softmax(logits, -1)
        offered = scores if info.mask is None else jnp.where(info.mask[:, None], scores, -1)
        size = min(capacity(1.0, num_tokens * self.num_experts_per_tok, num_experts), num_tokens)
        best, tokens = jax.lax.top_k(offered.T, size)
        chosen = jnp.zeros((num_experts, num_tokens), bool).at[iota(num_experts)[:, None], tokens].set(best >= 0).T
        per_tok = min(self.max_experts_per_tok, num_experts)
        kept, experts = jax.lax.top_k(jnp.where(chosen, scores, -1), per_tok)
        # A score can be 0 where it underflows; what was not chosen is below that.
        weights = jnp.where(kept >= 0, jnp.take_along_axis(scores, experts, axis=1), 0)
        return Routing(jnp.where(kept >= 0, experts, NO_EXPERT), weights, logits, scores)


@dataclass(frozen=True)
class HashRouter:
    """This router sends a token to experts that a hash of its id names (Hash Layers, arXiv 2106.04426).

    Nothing is learned, so that it is a baseline for learned routers; frequent tokens make its load uneven. Give the ids
    to the layer, as `token_ids`. Weights are equal; deviates: the paper also balances the table by token frequencies.

    Args:
        num_experts_per_tok: `K`, different experts for each token; 1 in the paper.

    Raises:
        ValueError: `num_experts_per_tok` is below 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TokenInfo
        >>> from jax_moe_lb.routing import HashRouter
        >>> routing = HashRouter(2)(jnp.zeros((3, 8)), info=TokenInfo(ids=jnp.array([5, 6, 5])))
        >>> (routing.experts[0] == routing.experts[2]).all().item(), routing.weights[0].tolist()
        (True, [0.5, 0.5])
    """

    num_experts_per_tok: int

    def __post_init__(self) -> None:
        if self.num_experts_per_tok < 1:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; expected at least 1")

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Chooses by the ids of tokens.

        Args:
            logits: `[T, E]`, which only the losses see.
            bias: it is not used.
            info: the ids of the tokens.

        Raises:
            ValueError: there are no ids, or fewer experts than `K`.
        """
        del bias
        num_experts, per_tok = logits.shape[1], self.num_experts_per_tok
        if info.ids is None:
            raise ValueError("token_ids is None; expected the ids of the tokens, for HashRouter")
        if per_tok > num_experts:
            raise ValueError(f"num_experts_per_tok is {per_tok}; expected at most {num_experts}")
        first = _hash(info.ids, 1) % jnp.uint32(num_experts)
        # Steps so short that the last expert is no round trip away: all of a token's experts differ.
        step = 1 + _hash(info.ids, 2) % jnp.uint32(max(1, (num_experts - 1) // max(1, per_tok - 1)))
        experts = (first[:, None] + step[:, None] * iota(per_tok)[None].astype(jnp.uint32)) % jnp.uint32(num_experts)
        weights = jnp.full(experts.shape, 1 / per_tok, logits.dtype)
        return Routing(experts.astype(jnp.int32), weights, logits, jax.nn.softmax(logits, -1))


@dataclass(frozen=True)
class NoisyTopK:
    """This router adds normal noise to the logits when it chooses, so that experts near the best are tried, too.

    Give the layer a `key` in training, and another one in each step; without one nothing is added, as in evaluation.
    Source: Shazeer et al. 2017 (arXiv 1701.06538, section 2.1); deviates: the noise has one standard deviation, not one
    learned for each logit, and it moves the choice alone, not the weights.

    Args:
        router: chooses, and gives the weights.
        std: the standard deviation of the noise; 1 / E is usual.

    Raises:
        ValueError: `std` is below 0.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TokenInfo, TopK
        >>> from jax_moe_lb.routing import NoisyTopK
        >>> router, logits = NoisyTopK(TopK(1), std=1.0), jnp.zeros((64, 4))
        >>> drawn = router(logits, info=TokenInfo(key=jax.random.key(0))).experts
        >>> sorted(set(drawn.ravel().tolist())), sorted(set(router(logits).experts.ravel().tolist()))
        ([0, 1, 2, 3], [0])
    """

    router: TopK = field(default_factory=lambda: TopK(2))
    std: float = 0.1

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std is {self.std}; expected at least 0")

    @property
    def num_experts_per_tok(self) -> int:
        """Counts the experts of a token, `K`."""
        return self.router.num_experts_per_tok

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Chooses by score, bias and noise.

        Args:
            logits: `[T, E]`.
            bias: `[E]`, added to the scores for the choice alone.
            info: its key draws the noise.
        """
        if info.key is None:
            return self.router(logits, bias, info)
        noise = self.std * jax.random.normal(info.key, logits.shape, logits.dtype)
        return self.router.with_experts(logits, self.router(logits + noise, bias, info).experts)


def _hash(ids: Int[Array, "T"], seed: int) -> Array:
    """Mixes the bits of each id (the finaliser of MurmurHash3), equal on every machine."""
    x = ids.astype(jnp.uint32) + jnp.uint32(seed * 0x9E3779B9 % (1 << 32))
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
