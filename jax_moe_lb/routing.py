"""Which experts a token goes to, and with what weight. All in float32 (or float64) whatever the activations are."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_moe_lb._pytree import pytree
from jax_moe_lb.types import TokenMask, iota

NO_EXPERT = -1
"""The expert id of a token copy that goes nowhere: a padding token."""

Logits = Float[Array, "T E"]


@pytree
class Routing:
    """What a router decides.

    Args:
        experts: expert of each token copy, or `NO_EXPERT`.
        weights: what the expert's output is multiplied by; differentiable.
        logits: the router's logits, for the z-loss.
        scores: non-negative affinities that sum to 1 over the experts, for the other losses.
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    logits: Logits
    scores: Logits


Router = Callable[[Logits, Float[Array, "E"] | None, Int[Array, ""]], Routing]
"""A hashable value that turns logits into a `Routing`, given the bias of each expert (or `None`)
and the number, in the group, of the first token."""


@dataclass(frozen=True)
class GroupLimit:
    """Restricts a token to the experts of its best groups (DeepSeek-V2/V3 node-limited routing).

    Args:
        num_groups: equal, contiguous groups of experts.
        top_groups: groups that a token may use.
        experts_per_score: a group's score is the sum of its best so many scores:
            1 in DeepSeek-V2, 2 in DeepSeek-V3.
    """

    num_groups: int
    top_groups: int
    experts_per_score: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups}; expected 1 to num_groups = {self.num_groups}")
        if self.experts_per_score < 1:
            raise ValueError(f"experts_per_score is {self.experts_per_score}; expected at least 1")

    def __call__(self, scores: Logits) -> Logits:
        """The scores, with `-inf` outside each token's best groups."""
        num_tokens, num_experts = scores.shape
        if num_experts % self.num_groups or num_experts // self.num_groups < self.experts_per_score:
            raise ValueError(
                f"num_groups is {self.num_groups}; expected a divisor of the {num_experts} experts "
                f"that leaves at least {self.experts_per_score} in a group"
            )
        grouped = scores.reshape(num_tokens, self.num_groups, -1)
        group_scores = jax.lax.top_k(grouped, self.experts_per_score)[0].sum(-1)
        best = jax.lax.top_k(group_scores, self.top_groups)[1]
        allowed = (best[:, :, None] == iota(self.num_groups)[None, None]).any(1)
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True)
class TopK:
    """The `K` experts of highest score.

    Softmax top-k (GShard, Mixtral, Qwen3) by default; `score=jax.nn.sigmoid` with a bias
    and a `GroupLimit` is DeepSeek-V3's. The bias moves the choice, never the weight.

    Args:
        num_experts_per_tok: `K`.
        score: maps logits to scores: `jax.nn.softmax` or `jax.nn.sigmoid`.
        renormalise: divide the `K` weights by their sum.
        scale: factor on the weights, after that.
        group_limit: which experts a token may choose from; `None`: all.
    """

    num_experts_per_tok: int
    score: Callable[[Logits], Logits] = jax.nn.softmax
    renormalise: bool = True
    scale: float = 1.0
    group_limit: GroupLimit | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok < 1:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; expected at least 1")

    def __call__(
        self, logits: Logits, bias: Float[Array, "E"] | None = None, first_token: Int[Array, ""] | int = 0
    ) -> Routing:
        """Chooses by score and bias."""
        del first_token
        scores = self.score(logits)
        choice = scores if bias is None else scores + bias[None].astype(scores.dtype)
        self._require_enough(logits.shape[1])
        if self.group_limit is not None:
            choice = self.group_limit(choice)
        return self.with_experts(logits, jax.lax.top_k(choice, self.num_experts_per_tok)[1])

    def _require_enough(self, num_experts: int) -> None:
        limit = self.group_limit
        reach = num_experts if limit is None else num_experts // limit.num_groups * limit.top_groups
        if self.num_experts_per_tok > reach:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; expected at most {reach}")

    def with_experts(self, logits: Logits, experts: Int[Array, "T K"]) -> Routing:
        """The routing that sends the tokens to these experts, with the weights of their scores."""
        scores = self.score(logits)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdims=True)
        affinity = scores / scores.sum(-1, keepdims=True)
        return Routing(experts.astype(jnp.int32), weights * self.scale, logits, affinity)


@dataclass(frozen=True)
class ForceBalanced:
    """The papers' "ideal": tokens go round robin over all experts, with the weights that `router` gives them.

    Training with it is meaningless; its speed is the upper bound that balancers are held against.
    """

    router: TopK

    @property
    def num_experts_per_tok(self) -> int:
        """`K`."""
        return self.router.num_experts_per_tok

    def __call__(
        self, logits: Logits, bias: Float[Array, "E"] | None = None, first_token: Int[Array, ""] | int = 0
    ) -> Routing:
        """Chooses by the number of the token copy in the group."""
        del bias
        num_tokens, num_experts = logits.shape
        per_tok = self.num_experts_per_tok
        if per_tok > num_experts:
            raise ValueError(f"num_experts_per_tok is {per_tok}; expected at most {num_experts}")
        copy = iota(num_tokens * per_tok) + first_token * per_tok
        return self.router.with_experts(logits, (copy % num_experts).reshape(num_tokens, per_tok))


def mask_tokens(routing: Routing, mask: TokenMask) -> Routing:
    """Sends the tokens where `mask` is false to no expert, with weight 0."""
    return Routing(
        jnp.where(mask[:, None], routing.experts, NO_EXPERT),
        jnp.where(mask[:, None], routing.weights, 0),
        routing.logits,
        routing.scores,
    )


def updated_bias(bias: Float[Array, "E"], load: Int[Array, "E"], rate: float = 1e-3) -> Float[Array, "E"]:
    """DeepSeek-V3's auxiliary-loss-free update: up for an expert below the mean load, down above it.

    Args:
        bias: `[E]`, never touched by the optimizer.
        load: `[E]`, token copies of each expert in this step, over all ranks.
        rate: the step, DeepSeek-V3's gamma.
    """
    load = load.astype(bias.dtype)
    return bias + rate * jnp.sign(load.mean() - load)


def tokens_per_expert(experts: Int[Array, "B C"], num_experts: int) -> Int[Array, "B E"]:
    """How often each expert occurs in each line; ids outside `[0, E)` are not counted."""
    lines = jnp.broadcast_to(iota(experts.shape[0])[:, None], experts.shape)
    # A negative index would count from the end: send it past the end, where it is dropped.
    columns = jnp.where(experts < 0, num_experts, experts)
    return jnp.zeros((experts.shape[0], num_experts), jnp.int32).at[lines, columns].add(1, mode="drop")
