"""Loss of a model with the logits of all tokens, without stacked layers and blocks of tokens."""

from typing import Any

import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import Array

from jax_moe_lb import Stats
from models.data.marks import num_predicted, predicted, words


def next_token_loss(model: Any, tokens: Array, counts: Array | None = None) -> tuple[Array, tuple[Array, Stats]]:
    """Compute the mean cross-entropy of `tokens[:, 1:]` in nats per token."""
    plain, counts = words(tokens), num_predicted(tokens) if counts is None else counts
    logits, stats = model(plain[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, plain[:, 1:])
    loss = jnp.where(predicted(tokens)[0], losses, 0).sum() / counts[0]
    return loss, (loss, stats)
