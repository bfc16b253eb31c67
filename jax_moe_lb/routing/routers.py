"""Routers: experts and weights per token.

Routers compute in float32 (or float64) for any dtype of the activations, because nearby scores must stay distinct.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer, Key

from jax_moe_lb.core.checks import Count, Positive, checked_fields
from jax_moe_lb.core.types import TokenMask, Tokens, iota, pytree

NO_EXPERT = -1
"""Expert id of an unrouted token copy, such as a copy of a padding token."""

ROUTING_NAME = "moe_routing"
"""Name of the routing in policies of `jax.checkpoint`."""

Logits = Float[Array, "T E"]


@pytree
class Routing:
    """Experts and weights of the tokens of one rank, returned by every router.

    Args:
        experts: `[T, K]` integers, the expert per token copy, or `NO_EXPERT`; the layer converts them to int32.
        weights: `[T, K]`, factors of the expert outputs; gradients flow through them.
        logits: `[T, E]`, the router logits, for the z-loss.
        scores: `[T, E]`, nonnegative affinities with sum 1 over the experts, for the other losses.

    Examples:
        A custom router, sending all tokens to the first expert:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import Routing
        >>> def to_the_first(logits, bias, info):
        ...     first = jnp.zeros((logits.shape[0], 1), jnp.int32)
        ...     return Routing(first, jnp.ones_like(logits[:, :1]), logits, jax.nn.softmax(logits, -1))
        >>> to_the_first(jnp.zeros((2, 4)), None, None).experts.tolist()
        [[0], [0]]
    """

    experts: Integer[Array, "T K"]
    weights: Float[Array, "T K"]
    logits: Logits
    scores: Logits


@pytree
class TokenInfo:
    """Properties of a rank's tokens besides the embeddings, an argument of `moe` and of routers.

    Args:
        mask: `[T]` bool, False for padding tokens, which are not routed and have output 0; `None` (default) without
            padding.
        ids: `[T]` int32, token ids, required by `HashRouter`.
        key: random key, required by `NoisyTopK` in training. Pass another key in each step and layer, equal on all
            ranks; routers receive it with the rank index folded in.
        segments: `[T]` int32, number of each token's sequence or packed document among those of all ranks, for
            `Losses.sequence`. A segment may span ranks. Tokens with other numbers than 0 to `num_segments - 1` are in
            none. `None` (default) without this loss.
        num_segments: number of segments of all ranks, some of which may be empty; static. Required with `segments`.
        position: `[T]` int32, index per token among the tokens of all ranks; `None` (default) if these are in the
            order of ranks. Routers always get it.
        experts: `[T, K]` int32, given experts per token, such as those of a rollout (router replay). In a token's
            row, -1 is no expert, but if all are -1, the router chooses. `None` (default) if the router chooses for all.
        weights: `[T, K]`, weights of the given experts; `None` (default) to compute them from the logits by
            `with_experts` of the router.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TokenInfo
        >>> TokenInfo(mask=jnp.array([True, True, False])).mask.shape
        (3,)
    """

    mask: TokenMask | None = None
    ids: Int[Array, "T"] | None = None
    key: Key[Array, ""] | None = None
    segments: Int[Array, "T"] | None = None
    num_segments: int | None = field(default=None, metadata={"static": True})
    position: Int[Array, "T"] | None = None
    experts: Int[Array, "T K"] | None = None
    weights: Float[Array, "T K"] | None = None


RouterFunction = Callable[[Logits, Float[Array, "E"] | None, TokenInfo], Routing]
"""Hashable function from logits, selection bias per expert (or `None`) and token properties to a `Routing`.

`docs/how-to/routers.md` has an example.
"""


@dataclass(frozen=True, kw_only=True)
@checked_fields
class Router:
    """Base class of the built-in routers, with routing options of the layer.

    A plain function is a router, too; these options then have the defaults. For a custom router with options, derive
    a frozen dataclass and define `__call__(logits, bias, info)`.

    Args:
        selection_bias: if True, `nn.MoE` adds a bias without gradients to the scores for expert selection. Call
            `MoE.update_bias` in each step (balancing without auxiliary loss, DeepSeek-V3). False by default.
        logit_bias: if True, add a learned bias to the router logits, as in GPT-OSS; False by default.
        capacity_factor: if set, drop copies as in GShard: the capacity of an expert is `capacity_factor` times the mean
            number of copies from each rank, and first choices take precedence. `None` (default) for a dropless layer.
        scale_inputs: if True, multiply tokens by the routing weight before the expert, as in Llama 4, instead of
            the output. It requires one expert per token. False by default.

    Raises:
        ValueError: `capacity_factor` is not positive and finite.

    Examples:
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb.routing import Router
        >>> router = TopK(2, selection_bias=True)
        >>> isinstance(router, Router), router.selection_bias, router.capacity_factor
        (True, True, None)
    """

    selection_bias: bool = False
    logit_bias: bool = False
    capacity_factor: Positive | None = None
    scale_inputs: bool = False

    learns: ClassVar[bool] = True
    """False if the routing does not depend on the logits, so that only router losses train the kernel."""

    def _refuse(self, *names: str) -> None:
        """Refuse options without effect on this router."""
        for name in names:
            if getattr(self, name):
                raise ValueError(f"{name} is True; expected False, as {type(self).__name__} would ignore it")


def router_options(router: RouterFunction) -> Router:
    """Return the options of a router; the defaults for a plain function."""
    return router if isinstance(router, Router) else Router()


@dataclass(frozen=True)
@checked_fields
class GroupLimit:
    """Restriction of each token to the experts of the best groups (DeepSeek-V2/V3 node-limited routing).

    Pass it to `TopK` if the experts of each group are at home on one node, so that a token is sent to few nodes.

    Args:
        num_groups: number of equal, contiguous groups of experts; 8 in DeepSeek-V3.
        top_groups: number of groups per token; 4 in DeepSeek-V3.
        experts_per_score: number of top scores summed to the score of a group: 1 in DeepSeek-V2, 2 (default) in
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
    experts_per_score: Count = 2

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups}; expected 1 to num_groups = {self.num_groups}")

    def __call__(self, scores: Logits) -> Logits:
        """Return the scores, with `-inf` outside the best groups per token.

        Args:
            scores: `[T, E]`.

        Returns:
            `[T, E]`.

        Raises:
            ValueError: `num_groups` does not divide `E`, or a group has fewer than `experts_per_score` experts.
        """
        num_tokens, num_experts = scores.shape
        if num_experts % self.num_groups or num_experts // self.num_groups < self.experts_per_score:
            raise ValueError(
                f"num_groups is {self.num_groups}; expected a divisor of the {num_experts} experts "
                f"with at least {self.experts_per_score} experts per group"
            )
        # Without -1, which has no size for a batch without tokens.
        grouped = scores.reshape(num_tokens, self.num_groups, num_experts // self.num_groups)
        group_scores = jax.lax.top_k(grouped, self.experts_per_score)[0].sum(-1)
        # top_k takes the lower index of equal scores on every backend, so the selection is reproducible.
        best = jax.lax.top_k(group_scores, self.top_groups)[1]
        allowed = (best[:, :, None] == iota(self.num_groups)[None, None]).any(1)
        # Use -inf instead of 0, because a bias can make all scores negative.
        return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def max_nodes(self, num_experts: int, num_nodes: int) -> int:
        """Return the largest number of nodes with experts of one token, if experts are at home in order.

        Args:
            num_experts: `E`, a multiple of both numbers.
            num_nodes: number of nodes, each with equally many experts.

        Examples:
            >>> limit = GroupLimit(num_groups=8, top_groups=4)
            >>> [limit.max_nodes(256, nodes) for nodes in (2, 4, 8, 32)]
            [2, 4, 4, 16]
        """
        size, per_node = num_experts // self.num_groups, num_experts // num_nodes
        ends = [(group * size // per_node, ((group + 1) * size - 1) // per_node) for group in range(self.num_groups)]
        of_groups = sorted((last - first + 1 for first, last in ends), reverse=True)
        return min(num_nodes, sum(of_groups[: self.top_groups]))


@dataclass(frozen=True)
@checked_fields
class TopK(Router):
    """Top-k router: each token goes to the `K` experts of highest score.

    It is the standard router: softmax top-k (GShard, Mixtral, Qwen3) by default, and DeepSeek-V3's with
    `score=jax.nn.sigmoid`, a selection bias and a `GroupLimit`. The selection bias affects the selection but not the
    weights. Ties go to the lower expert index.

    Args:
        num_experts_per_tok: `K`, usually 1 to 8.
        score: function from logits to scores: `jax.nn.softmax` (default) or `jax.nn.sigmoid`.
        renormalise: if True, divide the `K` weights by the sum; if False, keep the scores as weights. `None`
            (default) is True for `K` above 1. A single weight divided by its sum is 1, and the router has no gradient.
        scale: factor of the weights after renormalization; 1 by default, 2.5 in DeepSeek-V3.
        group_limit: restriction of the experts per token; `None` (default) for no restriction.
        selection_bias: see `Router`.
        logit_bias: see `Router`.
        capacity_factor: see `Router`.
        scale_inputs: see `Router`.

    Raises:
        ValueError: `num_experts_per_tok` is below 1.

    Warns:
        UserWarning: `renormalise` is True and `num_experts_per_tok` is 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TopK
        >>> routing = TopK(2)(jnp.array([[0.0, 2.0, 1.0, -1.0]]))
        >>> routing.experts.tolist(), [round(weight, 2) for weight in routing.weights[0].tolist()]
        ([[1, 2]], [0.73, 0.27])
    """

    num_experts_per_tok: Count
    score: Callable[[Logits], Logits] = jax.nn.softmax
    renormalise: bool | None = None
    scale: float = 1.0
    group_limit: GroupLimit | None = None

    def __post_init__(self) -> None:
        if self.renormalise and self.num_experts_per_tok == 1:
            # The generated `__init__` and the check of the fields are between this line and the caller.
            warnings.warn(
                "renormalise is True; expected None or False for num_experts_per_tok = 1, whose router has no gradient",
                stacklevel=4,
            )

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route tokens by score and bias.

        Args:
            logits: `[T, E]`, float32 or wider.
            bias: `[E]`, added to the scores for selection only; `None` (default) for no bias.
            info: unused.

        Returns:
            The routing.

        Raises:
            ValueError: there are fewer than `K` experts, or fewer than `K` in the selected groups.
        """
        del info
        scores = self.score(logits)
        # The bias is float32 and the scores may be float64; strict dtype promotion rejects mixing them.
        choice = scores if bias is None else scores + bias[None].astype(scores.dtype)
        self._require_enough(logits.shape[1])
        if self.group_limit is not None:
            choice = self.group_limit(choice)
        # Named here, too, since the gradients of the weights depend on these ids.
        experts = checkpoint_name(jax.lax.top_k(choice, self.num_experts_per_tok)[1], ROUTING_NAME)
        return self.with_experts(logits, experts)

    def _require_enough(self, num_experts: int) -> None:
        limit = self.group_limit
        reach = num_experts if limit is None else num_experts // limit.num_groups * limit.top_groups
        if self.num_experts_per_tok > reach:
            chosen = f"the experts of {limit.top_groups} groups" if limit else "all experts"
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok}; expected at most {reach}, {chosen}")

    def with_experts(
        self, logits: Logits, experts: Int[Array, "T K"], chosen: Bool[Array, "T K"] | None = None
    ) -> Routing:
        """Return the routing to given experts, with the weights of the scores.

        Use it to force a selection, as in `ForceBalanced`. `moe` calls it for `TokenInfo.experts`.

        Args:
            logits: `[T, E]`, float32 or wider.
            experts: `[T, K]` integers, the expert per token copy.
            chosen: `[T, K]` bool, False for copies that do not count in the sum of weights, whose weights are
                arbitrary; `None` (default) if all count. Each token needs a copy that counts.

        Returns:
            The routing.
        """
        log_scores = _log_scores(self.score, logits)
        of_experts = jnp.take_along_axis(log_scores, experts, axis=1)
        if chosen is not None:
            of_experts = jnp.where(chosen, of_experts, -jnp.inf)
        # A quotient of underflowing scores is 0 / 0, and its gradient fails even earlier. Logarithms do not underflow.
        renormalise = self.num_experts_per_tok > 1 if self.renormalise is None else self.renormalise
        if renormalise:
            weights = jax.nn.softmax(of_experts, -1)
        else:
            weights = jnp.take_along_axis(self.score(logits), experts, axis=1)
        # Sigmoid scores do not sum to 1, but the losses need fractions.
        return Routing(experts.astype(jnp.int32), weights * self.scale, logits, jax.nn.softmax(log_scores, -1))


def _log_scores(score: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """Return the logarithm of the scores, without underflow for softmax and sigmoid."""
    if score is jax.nn.softmax:
        return jax.nn.log_softmax(logits, -1)
    if score is jax.nn.sigmoid:
        return jax.nn.log_sigmoid(logits)
    return jnp.log(score(logits))


class TopKWrapper(Router):
    """Base class of routers that select experts and leave `K`, weights and default options to a `TopK`."""

    router: TopK

    def __post_init__(self) -> None:
        for name in ("selection_bias", "logit_bias", "capacity_factor", "scale_inputs"):
            # A frozen dataclass rejects ordinary assignment.
            object.__setattr__(self, name, getattr(self, name) or getattr(self.router, name))

    @property
    def num_experts_per_tok(self) -> int:
        """Number of experts per token, `K`."""
        return self.router.num_experts_per_tok

    def with_experts(
        self, logits: Logits, experts: Int[Array, "T K"], chosen: Bool[Array, "T K"] | None = None
    ) -> Routing:
        """Return the routing to given experts; see `TopK.with_experts`."""
        return self.router.with_experts(logits, experts, chosen)


@dataclass(frozen=True)
@checked_fields
class ForceBalanced(TopKWrapper):
    """Router sending tokens round robin to all experts, the "ideal" of the papers.

    Use it instead of the real router to measure the speed at perfect balance. Training with it is meaningless.

    Args:
        router: router for the weights, `K` and the default options of `Router`.
        selection_bias: the option of `router`, so that both have the same parameters; it has no effect here.
        logit_bias: see `Router`; the option of `router` by default.
        capacity_factor: see `Router`; the option of `router` by default.
        scale_inputs: see `Router`; the option of `router` by default.

    Raises:
        ValueError: `selection_bias` is True and the option of `router` is not.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb import TopK
        >>> from jax_moe_lb.routing import ForceBalanced
        >>> ForceBalanced(TopK(2))(jnp.zeros((2, 4))).experts.tolist()
        [[0, 1], [2, 3]]
    """

    router: TopK

    def __post_init__(self) -> None:
        if not self.router.selection_bias:
            self._refuse("selection_bias")
        super().__post_init__()

    def __call__(self, logits: Logits, bias: Float[Array, "E"] | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route token copies round robin by the position of the token.

        Args:
            logits: `[T, E]`, float32 or wider.
            bias: unused, because experts are balanced by construction.
            info: token properties; `position` continues across ranks; 0, 1, ... if it is `None`.

        Returns:
            The routing.

        Raises:
            ValueError: there are fewer than `K` experts.
        """
        del bias
        num_tokens, num_experts = logits.shape
        per_tok = self.num_experts_per_tok
        if per_tok > num_experts:
            raise ValueError(f"num_experts_per_tok is {per_tok}; expected at most {num_experts}")
        position = iota(num_tokens) if info.position is None else info.position
        # The remainder first: a product with positions of many ranks may exceed int32.
        copy = position[:, None] % num_experts * per_tok + iota(per_tok)[None]
        return self.router.with_experts(logits, copy % num_experts)


def mask_tokens(routing: Routing, mask: TokenMask) -> Routing:
    """Set the expert of tokens with `mask` False to `NO_EXPERT`, and the weights, logits and scores to 0."""
    # `moe` calls it for padding tokens, for which a router may return NaN.
    weights, logits, scores = (
        jnp.where(mask[:, None], array, 0) for array in (routing.weights, routing.logits, routing.scores)
    )
    return Routing(jnp.where(mask[:, None], routing.experts, NO_EXPERT), weights, logits, scores)


def scale_inputs(x: Tokens, routing: Routing) -> tuple[Tokens, Routing]:
    """Multiply tokens by the routing weight, and set it to 1; `moe` calls it for routers with `scale_inputs`."""
    # Returns the tokens and the routing. Weights of padding and of faults stay.
    per_tok = routing.weights.shape[1]
    if per_tok != 1:
        raise ValueError(f"num_experts_per_tok is {per_tok}; expected 1, as router.scale_inputs is True")
    is_valid = (routing.experts >= 0) & jnp.isfinite(routing.weights)
    weights = jnp.where(is_valid, 1, routing.weights)
    return x * routing.weights.astype(x.dtype), replace(routing, weights=weights)


def updated_bias(bias: Float[Array, "E"], load: Int[Array, "E"], rate: float = 1e-3) -> Float[Array, "E"]:
    """Return the selection bias after one step of balancing without auxiliary loss (DeepSeek-V3).

    The bias of an expert rises by `rate` if the load is below the mean, and falls by `rate` if it is above. Call it
    once per step, after the optimizer; `MoE.update_bias` does so for a layer.

    Args:
        bias: `[E]`, not updated by the optimizer.
        load: `[E]` integers, token copies per expert in this step, over all ranks.
        rate: step size, DeepSeek-V3's gamma; 1e-3 by default.

    Returns:
        `[E]`, the bias for the next step.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax_moe_lb.routing import updated_bias
        >>> [round(b, 3) for b in updated_bias(jnp.zeros(3), jnp.array([2, 4, 3])).tolist()]
        [0.001, -0.001, 0.0]
    """
    load = load.astype(bias.dtype)
    # As in the paper, only the sign counts: the step size does not depend on the distance from the mean.
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(load.mean() - load)


def tokens_per_expert(experts: Int[Array, "B C"], num_experts: int) -> Int[Array, "B E"]:
    """Return the number of occurrences of the experts in the rows, `[B, E]` int32, ignoring ids outside `[0, E)`."""
    lines = jnp.broadcast_to(iota(experts.shape[0])[:, None], experts.shape)
    # Map negative ids past the end, to drop them: a negative index would count from the end.
    columns = jnp.where(experts < 0, num_experts, experts)
    return jnp.zeros((experts.shape[0], num_experts), jnp.int32).at[lines, columns].add(1, mode="drop")
