"""Random inputs of a layer: parameters, expert preferences, magnitudes, padding, documents and given experts."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_moe_lb import MoE
from tests.stress.dense_module import Tokens
from tests.stress.patterns import Pattern

PREFERENCE = 1 / 8
"""Difference between consecutive preferences of a token, similar in size to its features."""


class Inputs(NamedTuple):
    """Inputs on the host.

    Args:
        params: parameters, stacked over layers if each has its own.
        fixed: selection bias and places of experts.
        x: `[M, ..., H]`, tokens of each microbatch.
        mask: `[M, ...]`; `None` without padding.
        target: `[M, ..., H]`.
    """

    params: Any
    fixed: Any
    x: np.ndarray
    mask: np.ndarray | None
    target: np.ndarray


def draw_params(layer: MoE, params: nnx.State, pattern: Pattern, rng: np.random.Generator) -> nnx.State:
    """Return parameters on the host; those cast by the layer are exact in its dtype."""

    def one(path: tuple, leaf: jax.Array) -> np.ndarray:
        name = path[0].key
        if name == "kernel":
            value = _kernel(leaf.shape, pattern, rng)
        else:
            scale = 0.2 if name.endswith("bias") else 0.3 if name.endswith(("_a", "_b")) else 0.5
            value = scale * rng.normal(size=leaf.shape)
            # The router's parameters stay wide, as in training.
            if name != "kernel_bias" and layer.precision.dtype is not None:
                value = value.astype(layer.precision.dtype)
        return np.asarray(value, leaf.dtype)

    return jax.tree.map_with_path(one, params)


def _kernel(shape: tuple[int, int], pattern: Pattern, rng: np.random.Generator) -> np.ndarray:
    """Return the router kernel. Layers number experts in different orders, and features must not break ties."""
    width, num_experts = shape
    noise = 0.3 * pattern.noise * rng.normal(size=(width - num_experts, num_experts))
    return np.concatenate([noise, pattern.strength / PREFERENCE * rng.permutation(np.eye(num_experts))])


def draw_fixed(fixed: nnx.State, rng: np.random.Generator) -> nnx.State:
    def one(path: tuple, leaf: jax.Array) -> np.ndarray:
        value = rng.permutation(leaf.size) if path[0].key == "homes" else 0.3 * rng.normal(size=leaf.shape)
        return np.asarray(value, leaf.dtype)

    return jax.tree.map_with_path(one, fixed)


def draw_tokens(
    layer: MoE, shape: tuple[int, ...], pattern: Pattern, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens `[..., H]` and their mask; padding is zero unless the pattern sets a filling."""
    width, experts = layer.kernel.shape
    shards, number = _num_shards(layer), int(np.prod(shape))
    tokens = -(-number // shards)
    liking = np.broadcast_to(pattern.liking(rng, shards, experts), (shards, experts))[:, None]
    wishes = liking + pattern.taste * rng.gumbel(size=(shards, tokens, experts))
    # Use integers, which are exact in every dtype.
    preferences = np.argsort(np.argsort(wishes, axis=-1), axis=-1)
    if pattern.levels:
        preferences = preferences * pattern.levels // experts
    features = pattern.features * rng.normal(size=(shards, 1 if pattern.alike else tokens, width - experts))
    features = np.broadcast_to(features, (shards, tokens, width - experts))
    x = pattern.tokens * np.concatenate([features, PREFERENCE * (preferences - experts // 2)], -1)
    mask = np.broadcast_to(pattern.padding(rng, shards, tokens), (shards, tokens)).reshape(-1)[:number]
    return x.reshape(-1, width)[:number].reshape(*shape, width), mask.reshape(shape)


def _num_shards(layer: MoE) -> int:
    return math.prod(layer.mesh.shape[axis] for axis in layer.topology.data_axes) * layer.topology.num_ranks


def draw_shape(layer: MoE, flat: bool, rng: np.random.Generator) -> tuple[int, ...]:
    """Return the leading dimensions of tokens: sequences or none, also of numbers with padding."""
    shards = _num_shards(layer)
    if flat:
        return (shards * int(rng.choice([1, 2, 4, 5, 6, 7, 11, 12, 13, 16, 17])),)
    shapes = [(shards, int(rng.integers(1, 8))), (2, int(rng.integers(1, 4)), 4), (int(rng.integers(1, 60)),), (3, 5)]
    return shapes[rng.integers(len(shapes))]


def draw_arguments(layer: MoE, shape: tuple[int, ...], flat: bool, rng: np.random.Generator) -> Tokens:
    """Return the arguments of the calls besides tokens and mask."""
    given: dict[str, Any] = {"mask": None}
    if len(shape) > 1 and rng.random() < 0.5:
        given |= {"segments": rng.integers(-1, 4, shape), "num_segments": 3}
    elif len(shape) == 1 and layer.losses.sequence:
        number = shape[0] // 3 + 1 if flat else 4
        given |= {"segments": np.arange(shape[0]) // 3 if flat else rng.integers(0, 3, shape), "num_segments": number}
    if hasattr(layer.router, "with_experts") and rng.random() < 0.3:
        given |= replay(layer, shape, rng)
    return Tokens(token_ids=rng.integers(0, 50, shape), key=jax.random.key(rng.integers(99)), **given)


def replay(layer: MoE, shape: tuple[int, ...], rng: np.random.Generator) -> dict:
    """Return experts of most tokens, some copies of none, and in half of the layers weights."""
    per_tok = layer.router.num_experts_per_tok
    per_tok = getattr(layer.router, "max_experts_per_tok", None) or per_tok
    order = rng.permuted(np.broadcast_to(np.arange(layer.kernel.shape[1]), (*shape, layer.kernel.shape[1])), axis=-1)
    experts = np.where(rng.random((*shape, per_tok)) < 0.1, -1, order[..., :per_tok])
    experts = np.where(rng.random((*shape, 1)) < 0.2, -1, experts).astype(np.int32)
    weights = {"weights": rng.random((*shape, per_tok)).astype(np.float32)} if rng.random() < 0.5 else {}
    return {"experts": experts} | weights


def on_host(leaf: Any) -> Any:
    return jnp.asarray(jax.device_get(leaf))
