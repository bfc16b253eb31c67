"""Router of Phi-3.5-MoE."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jax_moe_lb import TopK
from jax_moe_lb.core.checks import NonNegative
from jax_moe_lb.core.types import iota
from jax_moe_lb.routing import Routing, TokenInfo


@dataclass(frozen=True)
class SparseMixer(TopK):
    """Router with two experts per token, each weighted by a softmax over the logits near its own."""

    # The second expert is the best without the first. Inference only: training samples experts and estimates the
    # gradient of the choice.
    # Source: Liu et al. 2024, GRIN, arXiv 2409.12136; `sparsemixer` of the published code.

    # Half of the largest distance of a logit in the softmax, relative to its magnitude or to the best logit
    jitter: NonNegative = 0.01

    def __call__(self, logits: Array, bias: Array | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        """Route tokens."""
        del bias, info
        first = jnp.argmax(logits, -1)
        second = jnp.argmax(self._without(logits, first), -1)
        return self.with_experts(logits, jnp.stack([first, second], -1).astype(jnp.int32))

    def with_experts(self, logits: Array, experts: Array, chosen: Array | None = None) -> Routing:
        """Return the routing to given experts; see `TopK.with_experts`."""
        del chosen
        first, second = experts[:, :1], experts[:, 1:]
        others = self._without(logits, first[:, 0])
        weights = [self._weight(logits, logits, first), self._weight(others, logits, second)]
        return Routing(experts, jnp.concatenate(weights, -1), logits, jax.nn.softmax(logits, -1))

    @staticmethod
    def _without(logits: Array, first: Array) -> Array:
        return jnp.where(iota(logits.shape[1])[None] == first[:, None], -jnp.inf, logits)

    def _weight(self, offered: Array, logits: Array, expert: Array) -> Array:
        """Return the weight of an offered expert, `[T, 1]`."""
        best = offered.max(-1, keepdims=True)
        distance = (best - logits) / jnp.maximum(jnp.abs(logits), best)
        near = jnp.where(distance > 2 * self.jitter, -jnp.inf, offered)
        return jnp.take_along_axis(jax.nn.softmax(near, -1), expert, 1)
