"""A router says which experts a token goes to, and with what weight.

All of it is in float32 (or float64), whatever the activations are: neighbouring scores must stay different.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jax_moe_lb.core.types import TokenMask, iota, pytree

NO_EXPERT = -1
"""It is the expert id of a token copy that goes nowhere, as that of a padding token."""

Logits = Float[Array, "T E"]


@pytree
class Routing:
    """A routing holds what a router decides about the tokens of one rank; a router of your own returns one.

    Args:
        experts: `[T, K]` int32, the expert of each token copy, or `NO_EXPERT`.
        weights: `[T, K]`, the factors of the experts' outputs; gradients flow through them.
        logits: `[T, E]`, the router's logits, for the z-loss.
        scores: `[T, E]`, non-negative affinities that sum to 1 over the experts, for the other losses.

    Examples:
        A router of one's own, which sends all tokens to the first expert:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import Routing
        >>> def to_the_first(logits, bias, info):
        ...     first = jnp.zeros((logits.shape[0], 1), jnp.int32)
        ...     return Routing(first, jnp.ones_like(logits[:, :1]), logits, jax.nn.softmax(logits, -1))
        >>> to_the_first(jnp.zeros((2, 4)), None, None).experts.tolist()
        [[0], [0]]
    """

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    logits: Logits
    scores: Logits


@pytree
class TokenInfo:
    """Says what a router may know about the tokens of a rank beside their logits.

    `moe` makes one for each call of the router; without arguments it is that of a first rank without padding.

    Args:
        first: int32, the number of this rank's first token in the group.
        mask: `[T]`, false for padding tokens; `None` if there are none.
        ids: `[T]` int32, what the caller gave as `token_ids`, for `HashRouter`; `None` if nothing.
        key: random numbers of this rank, other ones on each, from the `key` that the caller gave; `None` without.

    Examples:
        >>> from jax_moe_lb import TokenInfo
        >>> TokenInfo().first
        0
    """

    first: Int[Array, ""] | int = 0
    mask: TokenMask | None = None
    ids: Int[Array, "T"] | None = None
    key: Key[Array, ""] | None = None


Router = Callable[[Logits, Float[Array, "E"] | None, TokenInfo], Routing]
"""A router is a hashable value that turns logits into a `Routing`, given the bias of each expert (or `None`) and what
else is known of the tokens. `docs/how-to/routers.md` shows how to write one."""


@dataclass(frozen=True)
class GroupLimit:
    """A group limit restricts a token to the experts of its best groups (DeepSeek-V2/V3 node-limited routing).

    Give it to `TopK` where experts of one group are at home on one node, so that a token goes to few nodes.

    Args:
        num_groups: equal, contiguous groups of experts: 8 in DeepSeek-V3.
        top_groups: groups that a token may use: 4 in DeepSeek-V3.
        experts_per_score: how many of a group's best scores make up the group's score: 1 in DeepSeek-V2, 2 in
            DeepSeek-V3.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import GroupLimit
        >>> limit = GroupLimit(num_groups=2, top_groups=1, experts_per_score=1)
        >>> limit(jnp.array([[0.1, 0.2, 0.3, 0.4]])).tolist()[0][:2]
        [-inf, -inf]
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
        """Replaces the scores outside each token's best groups by `-inf`."""
        num_tokens, num_experts = scores.shape
        if num_experts % self.num_groups or num_experts // self.num_groups < self.experts_per_score:
            raise ValueError(
                f"num_groups is {self.num_groups}; expected a divisor of the {num_experts} experts "
                f"that leaves at least {self.experts_per_score} in a group"
            )
        grouped = scores.reshape(num_tokens, self.num_groups, -1)
        group_scores = jax.lax.top_k(grouped, self.experts_per_score)[0].sum(-1)
        # Among equals top_k takes the lower index, on every backend, so that the choice can be reproduced.
        best = jax.lax.top_k(group_scores, self.top_groups)[1]
        allowed = (best[:, :, None] == iota(self.num_groups)[None, None]).any(1)
        # Not 0 but -inf, as a bias may have made all scores negative.
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


@dataclass(frozen=True)
class TopK:
    """This router sends a token to the `K` experts of highest score.

    It is the one to use: softmax top-k (GShard, Mixtral, Qwen3) by default, and DeepSeek-V3's with
    `score=jax.nn.sigmoid`, a bias and a `GroupLimit`. The bias moves the choice, never the weight. Among equal scores
    the lower expert wins.

    Args:
        num_experts_per_tok: `K`, usually 1 to 8.
        score: maps logits to scores: `jax.nn.softmax` or `jax.nn.sigmoid`.
        renormalise: whether the `K` weights are divided by their sum, which is usual.
        scale: the factor on the weights after that, usually 1; 2.5 in DeepSeek-V3.
        group_limit: restricts the experts that a token may choose from; `None` allows all.

    Raises:
        ValueError: `num_experts_per_tok` is below 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TopK
        >>> routing = TopK(2)(jnp.array([[0.0, 2.0, 1.0, -1.0]]))
        >>> routing.experts.tolist(), [round(weight, 2) for weight in routing.weights[0].tolist()]
        ([[1, 2]], [0.73, 0.27])
    """

    num_experts_per_tok: int
    score: Callable[[Logits], Logits] = jax.nn.softmax
    renormalise: bool = True
    scale: float = 1.0
    group_limit: GroupLimit | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok < 1:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; expected at least 1")

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Chooses by score and bias.

        Args:
            logits: `[T, E]`, in float32 or wider.
            bias: `[E]`, added to the scores for the choice alone; `None` adds nothing.
            info: what else is known of the tokens, which this router does not need.

        Raises:
            ValueError: there are fewer experts to choose from than `K`.
        """
        del info
        scores = self.score(logits)
        # The bias is float32 and the scores may be float64, which strict promotion does not mix.
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
        """Makes the routing that sends the tokens to given experts, with the weights of their scores.

        Use it to force a choice, as `ForceBalanced` does.

        Args:
            logits: `[T, E]`.
            experts: `[T, K]` integers, the expert of each token copy.
        """
        log_scores = _log_scores(self.score, logits)
        chosen = jnp.take_along_axis(log_scores, experts, axis=1)
        # A quotient of scores that underflow is 0 / 0, and its gradient is so long before: their logarithms are not.
        if self.renormalise:
            weights = jax.nn.softmax(chosen, -1)
        else:
            weights = jnp.take_along_axis(self.score(logits), experts, axis=1)
        # Sigmoid scores do not sum to 1; the losses want shares.
        return Routing(experts.astype(jnp.int32), weights * self.scale, logits, jax.nn.softmax(log_scores, -1))


def _log_scores(score: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """The logarithm of the scores, without underflow for the two scores that have a logarithm of their own."""
    if score is jax.nn.softmax:
        return jax.nn.log_softmax(logits, -1)
    if score is jax.nn.sigmoid:
        return jax.nn.log_sigmoid(logits)
    return jnp.log(score(logits))


@dataclass(frozen=True)
class ForceBalanced:
    """This router is the papers' "ideal": it sends tokens round robin over all experts.

    Use it to measure the speed that balancers are held against, in place of the real router. Training with it is
    meaningless.

    Args:
        router: gives the weights of the forced choice, and `K`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb.routing import ForceBalanced
        >>> ForceBalanced(TopK(2))(jnp.zeros((2, 4))).experts.tolist()
        [[0, 1], [2, 3]]
    """

    router: TopK

    @property
    def num_experts_per_tok(self) -> int:
        """Counts the experts of a token, `K`."""
        return self.router.num_experts_per_tok

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Chooses by the number of the token copy in the group.

        Args:
            logits: `[T, E]`.
            bias: it is not used: there is nothing left to balance.
            info: it says the number of this rank's first token, so that ranks go on where others end.

        Raises:
            ValueError: there are fewer experts than `K`.
        """
        del bias
        num_tokens, num_experts = logits.shape
        per_tok = self.num_experts_per_tok
        if per_tok > num_experts:
            raise ValueError(f"num_experts_per_tok is {per_tok}; expected at most {num_experts}")
        copy = iota(num_tokens * per_tok) + info.first * per_tok
        return self.router.with_experts(logits, (copy % num_experts).reshape(num_tokens, per_tok))


def mask_tokens(routing: Routing, mask: TokenMask) -> Routing:
    """Sends the tokens where `mask` is false to no expert, with weight 0; `moe` calls it for padding tokens."""
    return Routing(
        jnp.where(mask[:, None], routing.experts, NO_EXPERT),
        jnp.where(mask[:, None], routing.weights, 0),
        routing.logits,
        routing.scores,
    )


def updated_bias(bias: Float[Array, "E"], load: Int[Array, "E"], rate: float = 1e-3) -> Float[Array, "E"]:
    """Moves each expert's bias up if its load is below the mean, down if above (DeepSeek-V3, without auxiliary loss).

    Call it once per step, after the optimizer; `MoE.update_bias` does it for a layer.

    Args:
        bias: `[E]`, never touched by the optimizer.
        load: `[E]` integers, the token copies of each expert in this step, over all ranks.
        rate: the step, DeepSeek-V3's gamma, usually 1e-3.

    Returns:
        The bias for the next step, `[E]`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import updated_bias
        >>> [round(b, 3) for b in updated_bias(jnp.zeros(3), jnp.array([2, 4, 3])).tolist()]
        [0.001, -0.001, 0.0]
    """
    load = load.astype(bias.dtype)
    # The paper takes the sign alone: an expert far off the mean moves no faster than one near to it.
    return bias + rate * jnp.sign(load.mean() - load)


def tokens_per_expert(experts: Int[Array, "B C"], num_experts: int) -> Int[Array, "B E"]:
    """Counts how often each expert occurs in each line; ids outside `[0, E)` are not counted."""
    lines = jnp.broadcast_to(iota(experts.shape[0])[:, None], experts.shape)
    # A negative index would count from the end: send it past the end, where it is dropped.
    columns = jnp.where(experts < 0, num_experts, experts)
    return jnp.zeros((experts.shape[0], num_experts), jnp.int32).at[lines, columns].add(1, mode="drop")
