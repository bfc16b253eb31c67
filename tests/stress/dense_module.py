"""A dense float64 form of `MoE` with biases, adapters, groups and losses; activations and mixes are formulas."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erf

from jax_moe_lb import MoE, TokenInfo
from jax_moe_lb.kernels import ClampedSwiGLU, geglu, gelu_exact, relu_squared, swiglu
from jax_moe_lb.nn import SharedMix
from jax_moe_lb.routing import Routing
from jax_moe_lb.routing.more_routers import capacity, within_capacity
from jax_moe_lb.routing.routers import router_options


def silu(z):
    return z / (1 + jnp.exp(-z))


def gelu_tanh(z):
    return 0.5 * z * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (z + 0.044715 * z**3)))


FORMULAS = {
    None: lambda gate, up: silu(gate) * up,
    swiglu: lambda gate, up: silu(gate) * up,
    geglu: lambda gate, up: gelu_tanh(gate) * up,
    gelu_exact: lambda up: 0.5 * up * (1 + erf(up / jnp.sqrt(2))),
    relu_squared: lambda up: jnp.where(up > 0, up, 0) ** 2,
    ClampedSwiGLU(): lambda gate, up: (
        (jnp.clip(up, -7, 7) + 1) * jnp.minimum(gate, 7) / (1 + jnp.exp(-1.702 * jnp.minimum(gate, 7)))
    ),
}
"""Formula of each activation; others are their own."""


class Tokens(NamedTuple):
    """Arguments of a call of `MoE`; arrays over all tokens."""

    mask: Array | None
    token_ids: Array
    key: Array
    segments: np.ndarray | None = None
    num_segments: int | None = None
    experts: Array | None = None
    weights: Array | None = None


def wide(variable):
    return None if variable is None else variable[...].astype(jnp.float64)


def widened(array):
    return array.astype(jnp.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def dense(layer: MoE, x: Array, tokens: Tokens) -> tuple[Array, Array]:
    """Return the outputs of tokens `[..., H]`, 0 for padding, and the mean router loss of the groups."""
    # The tests require explicit conversions of the library, not of this reference.
    with jax.numpy_dtype_promotion("standard"):
        return _dense(layer, x, tokens)


def _dense(layer: MoE, x: Array, tokens: Tokens) -> tuple[Array, Array]:
    flat = x.reshape(-1, x.shape[-1])
    active = jnp.ones(len(flat), bool) if tokens.mask is None else tokens.mask.reshape(-1)
    # Padding may be NaN.
    flat = jnp.where(active[:, None], flat, 0)
    # The layer routes without a mask if there is no padding.
    tokens = tokens._replace(mask=active if tokens.mask is not None or layer._layout(x).is_padded else None)
    y, losses, chosen, scores = jnp.zeros_like(flat), [], [], []
    for group in groups_of(layer, x):
        routings = []
        for shard, index in group:
            at, is_token = np.maximum(index, 0), index >= 0
            routing, asked, experts = route(layer, flat[at], active[at] & is_token, tokens, (shard, index))
            y = y.at[at].add(jnp.where(is_token[:, None], combine(layer, flat[at], routing.weights, experts), 0))
            # The losses count the copies before those above the capacity are dropped.
            routings.append((routing, asked))
            chosen.append(asked[is_token])
            scores.append((index[is_token], routing.scores[is_token]))
        losses.append(loss_of_group(layer, routings))
    order = np.argsort(np.concatenate([index for index, _ in scores]))
    by_token = (jnp.concatenate(chosen)[order], jnp.concatenate([one for _, one in scores])[order])
    loss = sum(losses) / len(losses) + loss_of_segments(layer, *by_token, segments_of(x.shape[:-1], tokens))
    y = jnp.where(active[:, None], with_shared(layer, flat, y), 0)
    return y.reshape(x.shape), loss


def groups_of(layer: MoE, x: Array) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Yield the number and the tokens of each shard of a group: indices in the flattened `x`, -1 for padding."""
    layout, mesh, topology = layer._layout(x), layer.mesh.shape, layer.topology
    widths = tuple((0, more) for more in layout.padding)
    index = np.pad(np.arange(x[..., 0].size).reshape(layout.sizes), widths, constant_values=-1)

    def shard(place: dict[str, int]) -> np.ndarray:
        block = index
        for dim, axes in enumerate(layout.split):
            number = 0
            for axis in axes:
                number = number * mesh[axis] + place[axis]
            parts = int(np.prod([mesh[axis] for axis in axes]))
            block = np.split(block, parts, dim)[number]
        return block.reshape(-1)

    places = [range(mesh[axis]) for axis in topology.data_axes + topology.expert_axes]
    shards = [
        shard(dict(zip(topology.data_axes + topology.expert_axes, one, strict=True)))
        for one in itertools.product(*places)
    ]
    for start in range(0, len(shards), topology.num_ranks):
        yield [(at, shards[at]) for at in range(start, start + topology.num_ranks)]


def route(layer, x, active, tokens, place) -> tuple[Routing, Array, Array]:
    """Return the routing of a shard, its experts before capacities, and after."""
    (shard, index), at = place, np.maximum(place[1], 0)
    options, num_experts = router_options(layer.router), layer.kernel.shape[1]
    logits = jnp.where(active[:, None], x, 0) @ wide(layer.kernel)
    if options.logit_bias:
        logits += wide(layer.kernel_bias)[None]
    # Random noise depends on the dtype of the logits.
    logits = logits.astype(layer.precision.dtype or jnp.float64)
    bias = layer.bias[...].astype(logits.dtype) if options.selection_bias else None
    key = jax.random.fold_in(tokens.key, shard)
    ids = tokens.token_ids.reshape(-1)[at].astype(jnp.int32)
    info = TokenInfo(
        None if tokens.mask is None else active, jnp.where(index >= 0, ids, 0), key, position=jnp.asarray(index)
    )
    routing = layer.router(logits, bias, info)
    if tokens.experts is not None:
        routing = replayed(layer, routing, logits, tokens, index)
    routing = jax.tree.map(widened, routing)
    experts = asked = jnp.where(active[:, None], routing.experts, -1)
    if options.capacity_factor is not None:
        size = capacity(options.capacity_factor, experts.size, num_experts)
        experts = within_capacity(experts, num_experts, size)
    return routing, asked, experts


def replayed(layer, routing, logits, tokens, index) -> Routing:
    """Return the routing with the given experts and weights of tokens that have some."""
    at = np.maximum(index, 0)
    given = jnp.where(index[:, None] >= 0, tokens.experts.reshape(-1, tokens.experts.shape[-1])[at], -1)
    is_copy, is_given = given >= 0, (given >= 0).any(1, keepdims=True)
    weights = layer.router.with_experts(logits, jnp.where(is_copy, given, 0), is_copy | ~is_given).weights
    if tokens.weights is not None:
        weights = tokens.weights.reshape(-1, given.shape[1])[at]
    weights = jnp.where(is_given, jnp.where(is_copy, weights, 0), routing.weights)
    return Routing(jnp.where(is_given, given, routing.experts), weights, logits, routing.scores)


def combine(layer, x, weights, experts):
    options, frozen = router_options(layer.router), getattr(layer, "up_a", None) is not None
    weights = jnp.where(experts >= 0, weights, 0)
    rows, factors = (x * weights, (experts >= 0).astype(x.dtype)) if options.scale_inputs else (x, weights)

    def product(rows, kind):
        matrix, bias = wide(getattr(layer, kind)), wide(getattr(layer, f"{kind}_bias", None))
        if frozen:
            matrix = jax.lax.stop_gradient(matrix) + wide(getattr(layer, f"{kind}_a")) @ wide(
                getattr(layer, f"{kind}_b")
            )
            bias = None if bias is None else jax.lax.stop_gradient(bias)
        out = jnp.einsum("eti,eio->eto", jnp.broadcast_to(rows, (len(matrix), *rows.shape[-2:])), matrix)
        return out if bias is None else out + bias[:, None]

    by_expert = product(activated(layer, rows, product), "down").swapaxes(0, 1)
    one_hot = jax.nn.one_hot(experts, by_expert.shape[1], dtype=x.dtype)
    return ((factors[:, :, None] * one_hot).sum(1)[:, :, None] * by_expert).sum(1)


def activated(layer, rows, product):
    config = layer.expert_config
    default = FORMULAS[None] if config.gated else jax.nn.gelu
    formula = FORMULAS.get(config.activation, config.activation) if config.activation is not None else default
    return formula(*([product(rows, "gate")] if config.gated else []), product(rows, "up"))


def with_shared(layer, x, y):
    if layer.shared_expert is None:
        return y
    shared = activated(layer, x, lambda rows, kind: rows @ wide(getattr(layer, f"shared_{kind}")))
    shared, mix = shared @ wide(layer.shared_down), layer.shared_expert.mix
    if mix is SharedMix.SUM:
        return y + shared
    logits = x @ wide(layer.shared_kernel)
    if mix is SharedMix.SIGMOID:
        return y + jax.nn.sigmoid(logits) * shared
    weights = jax.nn.softmax(logits, -1)
    return weights[:, :1] * y + weights[:, 1:] * shared


def loss_of_group(layer, routings):
    """Return the weighted router losses of a group, except that of segments."""
    coefficients, experts = layer.losses, jnp.concatenate([experts for _, experts in routings])
    scores, logits = (jnp.concatenate([getattr(r, name) for r, _ in routings]) for name in ("scores", "logits"))
    active, num_experts = (experts >= 0).any(1), scores.shape[1]
    fraction = copies(experts, num_experts).sum(0) / jnp.maximum((experts >= 0).sum(), 1)
    total = coefficients.switch * num_experts * (fraction * mean(scores, active)).sum()
    return total + coefficients.z * mean(jax.nn.logsumexp(logits, 1, keepdims=True) ** 2, active).sum()


def copies(experts, num_experts):
    return jax.nn.one_hot(experts, num_experts, dtype=jnp.float64).sum(1)


def mean(values, active):
    return jnp.where(active[:, None], values, 0).sum(0) / jnp.maximum(active.sum(), 1)


def segments_of(shape: tuple[int, ...], tokens: Tokens) -> np.ndarray | None:
    """Return the number of each token's segment among those of all sequences, -1 for none."""
    if tokens.segments is None:
        return None if len(shape) < 2 else np.arange(np.prod(shape)) // shape[-1]
    rows, number = tokens.token_ids.size // shape[-1], tokens.num_segments
    inside = tokens.segments.reshape(rows, shape[-1])
    first = np.arange(rows)[:, None] * number
    return np.where((inside >= 0) & (inside < number), first + inside, -1).reshape(-1)


def loss_of_segments(layer, experts, scores, segments):
    """Return the weighted mean loss of the segments with tokens."""
    if not layer.losses.sequence:
        return 0.0
    num_experts, per_tok = scores.shape[1], experts.shape[1]
    taken, active, each = copies(experts, num_experts), (experts >= 0).any(1), []
    for one in sorted(set(segments.tolist()) - {-1}):
        at = np.flatnonzero(segments == one)
        fraction = jax.lax.stop_gradient(mean(taken[at], active[at])) / per_tok
        each.append(num_experts * (fraction * mean(scores[at], active[at])).sum())
    return layer.losses.sequence * sum(each) / max(len(each), 1)
