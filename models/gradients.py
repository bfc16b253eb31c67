"""`loss_and_gradients` is the forward and backward pass of a step, all at once or in microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_moe_lb import Stats, router_loss
from models.decoder.model import Decoder
from models.parallel import state_shardings

Model = Callable[[Array], tuple[Array, Stats]]


def next_token_loss(model: Model, tokens: Array) -> tuple[Array, Stats]:
    """Computes the mean cross-entropy in nats per token of `tokens[:, 1:]` given those before, and statistics.

    Args:
        model: maps int32 `[B, T]` to logits `[B, T, words]` and statistics.
        tokens: int32 `[B, T + 1]`; `~t` in place of a token `t` that begins a document, which is not predicted.
    """
    return _share_of_loss(model, tokens, num_predicted(tokens))


def num_predicted(tokens: Array) -> Array:
    """Counts the tokens `[B, T + 1]` that are predicted, at least 1, float32."""
    return jnp.maximum((tokens[:, 1:] >= 0).sum(dtype=jnp.int32), 1).astype(jnp.float32)


def _share_of_loss(model: Model, tokens: Array, count: Array) -> tuple[Array, Stats]:
    """Sums the cross-entropy of what is predicted, over `count`, which may be that of more than these tokens."""
    words = jnp.where(tokens < 0, ~tokens, tokens)
    logits, stats = model(words[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])
    return jnp.where(tokens[:, 1:] >= 0, losses, 0).sum() / count, stats


def further_loss(model: Decoder, tokens: Array, weight: float) -> tuple[Array, Stats]:
    """Adds to `next_token_loss` that of the tokens after the next one (DeepSeek-V3's technical report, section 2.2.2).

    Args:
        model: what `from_pretrained(predict_further=True)` returned.
        tokens: int32 `[B, T + 1]`, with marks; nothing is predicted across the beginning of a document.
        weight: the factor on the mean loss of its `further` modules; the paper has 0.3, and 0.1 for the last third.
    """
    words, inside, losses = jnp.where(tokens < 0, ~tokens, tokens), tokens[:, 1:] >= 0, []
    logits, stats = model.ahead(words[:, :-1], words[:, 1:])
    for k, one in enumerate(logits):
        if k > 0:
            inside = inside[:, :-1] & (tokens[:, 1 + k :] >= 0)
        each = optax.softmax_cross_entropy_with_integer_labels(one[:, : one.shape[1] - k], words[:, 1 + k :])
        count = jnp.maximum(inside.sum(dtype=jnp.int32), 1).astype(jnp.float32)
        losses.append(jnp.where(inside, each, 0).sum() / count)
    return losses[0] + weight * sum(losses[1:]) / len(losses[1:]), stats


def loss_and_gradients(model: Any, tokens: Array, accumulate: int, mesh: Mesh) -> tuple[Array, Stats, nnx.State]:
    """Computes the cross-entropy of a batch, statistics, and the gradient of that loss and the router losses.

    Microbatches have as many sequences of each device. Each is routed and planned for by itself, so that a balancer
    sees one after the other; their router losses are averaged. The gradient is otherwise that of the whole batch.

    Args:
        model: an `nnx.Module` as in `next_token_loss`; what its balancers remember is updated.
        tokens: int32 `[B, T + 1]`, with marks.
        accumulate: the microbatches.
        mesh: the devices over which sequences are split.

    Returns:
        The cross-entropy in nats per token; statistics `[layers, accumulate * D, ...]`, as if microbatches were
        groups, those of the first microbatch first; and the gradient.
    """
    count = num_predicted(tokens)
    if accumulate == 1:
        return _of_one(model, tokens, count, 1)
    graph, _ = nnx.split(model)
    params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    # A device has sequences of every microbatch, so that nothing moves.
    parts = tokens.reshape(-1, accumulate, tokens.shape[1]).swapaxes(0, 1)
    parts = jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)))
    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, params), state_shardings(params, mesh))

    def add(sums: tuple[nnx.State, Array, nnx.State], part: Array) -> tuple[tuple[nnx.State, Array, nnx.State], Stats]:
        gradients, loss, rest = sums
        # Flax wants variables of the loop, not of what is around it.
        model = nnx.merge(graph, params, rest, copy=True)
        share, stats, more = _of_one(model, part, count, accumulate)
        return (jax.tree.map(jnp.add, gradients, more), loss + share, nnx.state(model, nnx.Not(nnx.Param))), stats

    (gradients, loss, rest), stats = jax.lax.scan(add, (zeros, jnp.zeros((), jnp.float32), rest), parts)
    nnx.update(model, rest)
    return loss, jax.tree.map(_as_groups, stats), gradients


def _of_one(model: Any, tokens: Array, count: Array, accumulate: int) -> tuple[Array, Stats, nnx.State]:
    def objective(model: Any) -> tuple[Array, tuple[Array, Stats]]:
        loss, stats = _share_of_loss(model, tokens, count)
        return loss + router_loss(stats) / accumulate, (loss, stats)

    (_, (loss, stats)), gradients = nnx.value_and_grad(objective, has_aux=True)(model)
    return loss, stats, gradients


def _as_groups(leaf: Array) -> Array:
    """Makes `[layers, microbatches * D, ...]` of `[microbatches, layers, D, ...]`."""
    return leaf.swapaxes(0, 1).reshape(leaf.shape[1], -1, *leaf.shape[3:])
