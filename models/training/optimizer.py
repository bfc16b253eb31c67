"""Optimizers with their learning rate schedules, clipped gradients, and state in float32 or bfloat16."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from optax import contrib

from models.config import OptimizerConfig, TrainConfig
from models.decoder.layers import ROUTER

FINAL_LEARNING_RATE = 0.1  # final learning rate of decaying schedules, as a fraction of the peak
STABLE = 0.8  # fraction of the steps at which the schedule `wsd` starts to decay
SECOND_DECAY = 0.95  # decay of Adam's second moments
MOMENTUM = 0.9  # decay of the momentum of SGD

# Root mean square of Muon's updates, x learning rate. It is AdamW's, for equal rates (arXiv 2502.16982).
MUON_RMS = 0.2
TABLES = ("embedding", "head", "conv")  # parameters of tokens, and filters, which Muon leaves to AdamW


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the optimizer of a run, with gradients clipped by their global norm over all devices."""
    # Weight decay leaves out norms, biases, attention sinks and routers.
    clip, rule = optax.clip_by_global_norm(config.optimizer.clip_norm), config.optimizer
    direction = optax.chain(clip, _direction(rule, make_schedule(config)))
    return stored(direction, jnp.dtype(rule.state_dtype), config.seed)


def _direction(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    muon = {"muon_weight_dimension_numbers": _matrices, "consistent_rms": MUON_RMS, "adam_b2": SECOND_DECAY}
    rules = {
        "adamw": [optax.scale_by_adam(b2=SECOND_DECAY)],
        # The rate -1 keeps the sign. Muon's own decay of the parameters left to AdamW has no mask.
        "muon": [contrib.muon(-1.0, **muon)],
        "adafactor": [optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)],
        "sgd": [optax.trace(MOMENTUM)],
    }
    decay = optax.add_decayed_weights(config.weight_decay, decays_weights)
    return optax.chain(*rules[config.name], decay, optax.scale_by_learning_rate(schedule))


def _names(path: Any) -> tuple[str, ...]:
    names = (str(jax.tree_util.keystr((key,), simple=True)) for key in path)
    return tuple(name for name in names if name != "value")


def decays_weights(params: Any) -> Any:
    """Return True for the matrices of a model, False for norms, biases, sinks, decays, indexers and routers."""

    def is_decayed(path: Any, _: Any) -> bool:
        names = _names(path)
        is_other = "bias" in names[-1] or names[-1] in ("scale", "sinks", "a_log") or names[-2:] == ROUTER
        # Indexers have no gradient.
        return not is_other and "indexer" not in names

    return jax.tree.map_with_path(is_decayed, params)


def _matrices(params: Any) -> Any:
    """Return the last two dimensions for the parameters updated by Muon, `None` for the others."""
    # Leading dimensions, of layers and experts, are matrices of their own.

    def dimensions(path: Any, leaf: Any, decays: bool) -> contrib.MuonDimensionNumbers | None:
        if not decays or leaf.ndim < 2 or set(TABLES) & set(_names(path)):
            return None
        return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree.map_with_path(dimensions, params, decays_weights(params))


def apply_gradients(model: nnx.Module, optimizer: nnx.Optimizer, gradients: nnx.State) -> None:
    """Update a model and its optimizer in place, inside a traced step."""
    # optax mixes integer counts and floats, which strict dtype promotion rejects.
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)


def gradient_norm(gradients: nnx.State) -> Array:
    """Return the norm over all parameters of all devices, float32, before clipping."""
    norm: Array = optax.global_norm(_cast(gradients, jnp.float32))
    return norm


def learning_rate(config: TrainConfig) -> Callable[[int], float]:
    """Return a function from a step of a run, from 1, to its learning rate."""
    schedule = jax.jit(make_schedule(config))

    def rate(step: int) -> float:
        # optax mixes integer counts and floats, as in `apply_gradients`.
        with jax.numpy_dtype_promotion("standard"):
            return float(schedule(step - 1))

    return rate


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Return the learning rate schedule, with steps from 0: a linear warm-up, then the configured schedule."""
    warmup_steps, peak = min(config.optimizer.warmup_steps, config.steps // 5), config.optimizer.learning_rate
    # Start above 0; otherwise the first step would not change the parameters.
    first, last = peak / (warmup_steps + 1), FINAL_LEARNING_RATE * peak
    if config.optimizer.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup_steps, config.steps, last)
    stable = {"linear": warmup_steps, "constant": config.steps, "wsd": max(warmup_steps, int(STABLE * config.steps))}
    start = stable[config.optimizer.schedule]
    return optax.join_schedules(
        [
            optax.linear_schedule(first, peak, warmup_steps),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, max(config.steps - start, 1)),
        ],
        [warmup_steps, start],
    )


class StoredState(NamedTuple):
    """State of `stored`."""

    num_updates: Array  # number of updates, which seeds the rounding
    inner: Any  # state of the inner optimizer


def stored(inner: optax.GradientTransformation, dtype: Any, seed: int) -> optax.GradientTransformation:
    """Compute an optimizer in float32, for parameters and state of either dtype."""
    # Values stored in bfloat16 are rounded stochastically: otherwise a change below a 256th of a value would be lost in
    # every step. Float32 parameters and state are those of the inner optimizer, unchanged.

    def init(params: Any) -> StoredState:
        state = inner.init(_cast(params, jnp.float32))
        return StoredState(jnp.zeros((), jnp.uint32), _cast(_without_foreign(state), dtype))

    def update(gradients: Any, state: StoredState, params: Any) -> tuple[Any, StoredState]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.num_updates))
        wide = _cast(params, jnp.float32)
        updates, new = inner.update(_cast(gradients, jnp.float32), _cast(state.inner, jnp.float32), wide)
        if dtype == jnp.bfloat16:
            new = _rounded_tree(new, keys[0])
        if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params)):
            # The difference is exact, so that adding it to the parameter gives the rounded value.
            after = _rounded_tree(jax.tree.map(jnp.add, wide, updates), keys[1])
            updates = jax.tree.map(lambda new, old: new.astype(jnp.float32) - old, after, wide)
        return updates, StoredState(state.num_updates + 1, new)

    return optax.GradientTransformation(init, update)


def _without_foreign(state: Any) -> Any:
    """Replace variables of another shape than their parameter by their values."""
    # Flax would apply the sharding of the parameter to them: factored moments, and empty nodes of masked optimizers.

    def replaced(node: Any) -> Any:
        if not isinstance(node, nnx.Variable):
            return node
        value = node.get_value()
        if isinstance(value, optax.MaskedNode):
            return value
        spec, mesh = nnx.get_partition_spec(node).get_value(), node.get_metadata().get("mesh")
        return value if mesh is not None and not _fits(NamedSharding(mesh, spec), value.shape) else node

    return jax.tree.map(replaced, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _fits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        return len(sharding.spec) <= len(shape) and sharding.shard_shape(shape) is not None
    except ValueError:
        return False


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def _rounded_tree(tree: Any, key: Array) -> Any:
    def one(i: int, leaf: Array) -> Array:
        return rounded(leaf, jax.random.fold_in(key, i)) if leaf.dtype == jnp.float32 else leaf

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(one, range(len(leaves)), leaves))


def rounded(x: Array, key: Array) -> Array:
    """Round float32 to one of the two nearest bfloat16 numbers, with probabilities preserving the mean."""
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
    near = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), near, x).astype(jnp.bfloat16)
