"""The optimizer of a run: AdamW under a schedule, with clipped gradients."""

import jax
import optax  # type: ignore[import-untyped]
from flax import nnx

from models.presets import TrainConfig

FINAL_LEARNING_RATE = 0.1
"""Schedules that fall end at this share of the peak."""

STABLE = 0.8
"""The schedule `wsd` stays at the peak until this share of the steps is done."""


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes AdamW, whose gradients are clipped by their norm over all parameters of all devices."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(make_schedule(config), b2=0.95, weight_decay=config.weight_decay),
    )


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, gradients: nnx.State) -> None:
    """Updates a model and its optimizer in place, inside a traced step."""
    # optax mixes counts with floats.
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Makes the learning rate of each step, counted from 0: a linear warm-up, then what `config.schedule` says."""
    warmup_steps, peak = min(config.warmup_steps, config.steps // 5), config.learning_rate
    # From 0 the first step would learn nothing.
    first, last = peak / (warmup_steps + 1), FINAL_LEARNING_RATE * peak
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup_steps, config.steps, last)
    stable = {"linear": warmup_steps, "constant": config.steps, "wsd": max(warmup_steps, int(STABLE * config.steps))}
    start = stable[config.schedule]
    return optax.join_schedules(
        [
            optax.linear_schedule(first, peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, max(config.steps - start, 1)),
        ],
        [warmup_steps, start],
    )
