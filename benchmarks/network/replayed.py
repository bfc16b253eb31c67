"""A router that reproduces recorded counts, and counts for it."""

from dataclasses import dataclass, field
from pathlib import Path

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


def fitted(loads: np.ndarray, num_tokens: int, per_token: int) -> np.ndarray:
    """Scale loads to counts for `Replayed`."""
    total = num_tokens * per_token
    flat = loads.reshape(-1, loads.shape[-1]).astype(np.float64)
    scaled = flat / flat.sum(1, keepdims=True) * total
    for _ in range(loads.shape[-1]):
        # Copies above the maximum go to the other experts by their loads.
        over = scaled > num_tokens
        if not over.any():
            break
        scaled[over] = num_tokens
        rest = np.where(over, 0.0, scaled)
        scaled = np.where(
            over,
            scaled,
            rest * (total - scaled.sum(1, keepdims=True) + rest.sum(1, keepdims=True)) / rest.sum(1, keepdims=True),
        )
    counts = np.floor(scaled + 1e-9).astype(np.int32)
    for row, exact in zip(counts, scaled, strict=True):
        # The largest remainders get the missing copies.
        short = total - int(row.sum())
        row[np.argsort(row - exact, kind="stable")[:short]] += 1
    return counts.reshape(loads.shape)


def recorded(path: Path, shape: tuple[int, int, int], num_tokens: int, per_token: int) -> np.ndarray:
    """Return counts `[steps, layers, R, E]` of a recording, scaled to the sizes.

    It has multiples of the ranks and experts. Adjacent ranks and adjacent experts are merged, so ranks keep their share
    of the load.
    """
    layers, num_ranks, num_experts = shape
    counts = np.load(path)["counts"][:, :layers].astype(np.int64)
    steps, _, ranks, experts = counts.shape
    merged = counts.reshape(steps, layers, num_ranks, ranks // num_ranks, num_experts, experts // num_experts)
    return fitted(merged.sum((3, 5)), num_tokens, per_token)
