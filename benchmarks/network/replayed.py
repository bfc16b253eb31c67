"""A router that reproduces recorded counts."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe_lb import TopK
from jax_moe_lb.core.types import iota
from jax_moe_lb.routing import Router, Routing, TokenInfo

OWN = -1.0
"""Selection bias of the first expert for the layer's own routing."""


@dataclass(frozen=True, eq=False)
class Replayed(Router):
    """Router with the counts of one record: the number of a rank's copies for each expert.

    The selection bias of the first expert is the index of the record, so one program replays all records. If it is
    `OWN`, tokens are routed by their logits. Weights always follow from the logits.
    """

    router: TopK = field(kw_only=True)
    records: np.ndarray = field(kw_only=True)
    selection_bias: bool = True

    @property
    def num_experts_per_tok(self) -> int:
        """Experts per token, `K`."""
        return self.router.num_experts_per_tok

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None, info: TokenInfo = TokenInfo()) -> Routing:
        assert bias is not None, "selection_bias is True"
        num_tokens, per_token = logits.shape[0], self.num_experts_per_tok
        record = jnp.maximum(bias[0], 0).astype(jnp.int32)
        # The index in the whole mesh; in expert domains a group of the layer has fewer ranks.
        rank = jax.lax.axis_index(jax.sharding.get_abstract_mesh().axis_names)
        counts = jnp.asarray(self.records, jnp.int32)[record, rank]
        experts = by_counts(counts, num_tokens, per_token)
        own = jax.lax.top_k(logits, per_token)[1].astype(jnp.int32)
        return self.router.with_experts(logits, jnp.where(bias[0] < 0, own, experts))


def by_counts(counts: jax.Array, num_tokens: int, per_token: int) -> jax.Array:
    """Return experts `[T, K]` int32 with these counts, and distinct experts of each token."""
    # Copies sorted by expert, dealt to tokens in turn: an expert's copies, at most `T`, are at distinct tokens.
    ends, copies = counts.cumsum(dtype=jnp.int32), iota(num_tokens * per_token)
    experts = (ends[None] <= copies[:, None]).sum(1, dtype=jnp.int32)
    return experts.reshape(per_token, num_tokens).T
