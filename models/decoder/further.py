"""`Further` predicts the token after the one that the model predicts, from what the model made of the tokens so far."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from models.decoder.attention import norm
from models.decoder.config import DecoderConfig


class Further(nnx.Module):
    """It is a module of multi-token prediction (DeepSeek-V3's technical report, section 2.2), with a block of its own.

    It shares the embedding and the output layer with the model. It serves training: the model learns to look further
    ahead, and without it computes the same as before.

    deviates: the stream of the model comes to the first module behind the model's last norm, and the embedding stands
    before it, as those expect that generate with the published weights; the paper has neither.

    Args:
        config: the sizes of the model.
        block: a `DecoderBlock` like those of the model.
        rngs: random numbers for the parameters.
    """

    def __init__(self, config: DecoderConfig, block: Any, *, rngs: nnx.Rngs) -> None:
        width = config.embed_dim
        self.embed_norm = norm(width, config.norm_eps, config, rngs)
        self.stream_norm = norm(width, config.norm_eps, config, rngs)
        self.join = nnx.Linear(
            2 * width, width, use_bias=False, dtype=config.compute_dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.block = block
        self.norm = norm(width, config.norm_eps, config, rngs)

    def joined(self, x: Array, following: Array) -> Array:
        """Joins the stream `[B, T, H]` of tokens and the embeddings `[B, T, H]` of those that follow, for the block."""
        both = self.embed_norm(following).astype(x.dtype), self.stream_norm(x).astype(x.dtype)
        return self.join(jnp.concatenate(both, -1))
