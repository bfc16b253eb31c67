"""The float64 reference of all random layers: a dense `MoE` from formulas, without collectives, plans or sorting.

Its gradients come from JAX. Selection, weights, activations, mixes, losses and quantization are formulas of their own;
routers other than `TopK` and `ForceBalanced` are called.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import erf

from jax_moe_lb import MoE, TokenInfo
from jax_moe_lb.kernels import ClampedSwiGLU, geglu, gelu_exact, relu_squared, swiglu
from jax_moe_lb.nn import SharedMix
from jax_moe_lb.routing import ForceBalanced, Routing, TopK
from jax_moe_lb.routing.capacity import capacity, within_capacity
from jax_moe_lb.routing.routers import router_options
from jax_moe_lb.transport.once import ListDispatch


def sigmoid(z):
    # Neither it nor its gradient overflows.
    return jnp.exp(-jnp.logaddexp(0, -z))


def silu(z):
    return z * sigmoid(z)


def gelu_tanh(z):
    return 0.5 * z * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (z + 0.044715 * z**3)))


FORMULAS = {
    None: lambda gate, up: silu(gate) * up,
    swiglu: lambda gate, up: silu(gate) * up,
    geglu: lambda gate, up: gelu_tanh(gate) * up,
    gelu_exact: lambda up: 0.5 * up * (1 + erf(up / jnp.sqrt(2))),
    relu_squared: lambda up: jnp.where(up > 0, up, 0) ** 2,
    ClampedSwiGLU(): lambda gate, up: (
        (jnp.clip(up, -7, 7) + 1) * jnp.minimum(gate, 7) * sigmoid(1.702 * jnp.minimum(gate, 7))
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


class Dense(NamedTuple):
    """Results of the reference.

    Args:
        y: outputs of tokens `[..., H]`, 0 for padding.
        loss: mean router loss of the groups.
        counts: `[G, R, E]`, token copies of each group from each rank to each expert, by place.
        dropped: `[G]`, copies of each group above the capacities.
        margin: smallest relative distance between a score of a chosen expert and the next one, other than ties.
    """

    y: Array
    loss: Array
    counts: Array
    dropped: Array
    margin: Array


def dense(layer: MoE, x: Array, tokens: Tokens, dtype: str | None = None) -> Dense:
    """Return the results for tokens of a dtype, by default the dtype of `x`."""
    # The tests require explicit conversions of the library, not of this reference.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _dense(layer, x, tokens, jnp.dtype(layer.precision.dtype or dtype or x.dtype))


def _dense(layer: MoE, x: Array, tokens: Tokens, dtype: np.dtype) -> Dense:
    flat = x.reshape(-1, x.shape[-1])
    active = jnp.ones(len(flat), bool) if tokens.mask is None else tokens.mask.reshape(-1)
    # Padding may be NaN.
    flat = jnp.where(active[:, None], flat, 0)
    # The layer routes without a mask if there is no padding.
    tokens = tokens._replace(mask=active if tokens.mask is not None or layer._layout(x).is_padded else None)
    shards = shards_of(layer, x)
    groups, index = shards.shape[:2], shards.reshape(-1, shards.shape[2])
    at, is_token = np.maximum(index, 0), index >= 0
    routing, asked, experts, margins = jax.vmap(partial(route, layer, tokens, dtype))(
        flat[at], active[at] & is_token, np.arange(len(index)), index
    )
    rows = combine(
        layer, dtype, flat[at.reshape(-1)], *(one.reshape(at.size, -1) for one in (routing.weights, experts))
    )
    y = jnp.zeros_like(flat).at[at.reshape(-1)].add(jnp.where(is_token.reshape(-1, 1), rows, 0))
    # The losses count the copies before those above the capacity are dropped.
    of_groups = (one.reshape(groups[0], -1, one.shape[-1]) for one in (asked, routing.scores, routing.logits))
    loss = jax.vmap(partial(loss_of_group, layer.losses))(*of_groups).mean()
    order = np.argsort(index[is_token])
    by_token = (one[is_token][order] for one in (asked, routing.scores))
    loss += loss_of_segments(layer, *by_token, segments_of(x.shape[:-1], tokens))
    y = jnp.where(active[:, None], with_shared(layer, flat, y), 0)
    counts = copies(placed(layer, experts), layer.kernel.shape[1]).sum(1).reshape(*groups, -1)
    dropped = ((asked >= 0).sum((1, 2)) - (experts >= 0).sum((1, 2))).reshape(groups).sum(1)
    return Dense(y.reshape(x.shape), loss, counts, dropped, margins.min())


def placed(layer: MoE, experts: Array) -> Array:
    """Return the places of experts; -1 stays."""
    return experts if layer.homes is None else jnp.where(experts < 0, -1, layer.homes[...][jnp.maximum(experts, 0)])


def shards_of(layer: MoE, x: Array) -> np.ndarray:
    """Return the tokens `[G, R, T]` of each rank: indices in the flattened `x`, -1 for padding."""
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

    axes = topology.data_axes + topology.expert_axes
    places = itertools.product(*(range(mesh[axis]) for axis in axes))
    shards = np.stack([shard(dict(zip(axes, one, strict=True))) for one in places])
    return shards.reshape(-1, topology.num_ranks, shards.shape[1])


def route(layer, tokens, dtype, x, active, shard, index) -> tuple[Routing, Array, Array, Array]:
    """Return the routing of a shard, its experts before capacities and after, and the margin."""
    at, options, num_experts = jnp.maximum(index, 0), router_options(layer.router), layer.kernel.shape[1]
    logits = x @ wide(layer.kernel)
    if options.logit_bias:
        logits += wide(layer.kernel_bias)[None]
    # Random noise depends on the dtype of the logits.
    narrow = logits.astype(jnp.promote_types(dtype, jnp.float32))
    bias = layer.bias[...] if options.selection_bias else None
    ids = tokens.token_ids.reshape(-1)[at].astype(jnp.int32)
    info = TokenInfo(
        None if tokens.mask is None else active,
        jnp.where(index >= 0, ids, 0),
        jax.random.fold_in(tokens.key, shard),
        position=index,
    )
    routing, margin = routed(layer.router, logits, narrow, bias, info, active)
    if tokens.experts is not None:
        routing = replayed(layer, routing, narrow, tokens, index)
    routing = jax.tree.map(widened, routing)
    experts = asked = jnp.where(active[:, None], routing.experts, -1)
    if options.capacity_factor is not None:
        size = capacity(options.capacity_factor, experts.size, num_experts)
        experts = within_capacity(experts, num_experts, size)
    return routing, asked, experts, margin


def routed(router, logits, narrow, bias, info, active) -> tuple[Routing, Array]:
    """Return a routing, and the margin of its choice if the choice is a formula."""
    inner = router.router if type(router) is ForceBalanced else router
    if type(inner) is not TopK or inner.score not in (jax.nn.softmax, jax.nn.sigmoid):
        return router(narrow, None if bias is None else bias.astype(narrow.dtype), info), jnp.array(jnp.inf)
    log_scores = jax.nn.log_softmax(logits, -1) if inner.score is jax.nn.softmax else -jnp.logaddexp(0, -logits)
    num_experts, per_tok, margin = logits.shape[1], inner.num_experts_per_tok, jnp.array(jnp.inf)
    if inner is router:
        scores = jnp.exp(log_scores) + (0 if bias is None else bias[None])
        experts, margin = best(inner, scores, active)
    else:
        experts = (info.position[:, None] * per_tok + np.arange(per_tok)) % num_experts
    chosen = jnp.take_along_axis(log_scores, experts, 1)
    sums_to_1 = per_tok > 1 if inner.renormalise is None else inner.renormalise
    weights = jnp.exp(jax.nn.log_softmax(chosen, -1) if sums_to_1 else chosen) * inner.scale
    return Routing(experts, weights, logits, jax.nn.softmax(log_scores, -1)), margin


def best(router: TopK, scores: Array, active: Array) -> tuple[Array, Array]:
    """Return the experts of the highest scores, with ties to the lower index, and the margin of the choice."""
    limit, margin = router.group_limit, jnp.array(jnp.inf)
    if limit is not None:
        grouped = scores.reshape(len(scores), limit.num_groups, -1)
        group_scores = -jnp.sort(-grouped, 2)[:, :, : limit.experts_per_score].sum(2)
        groups, margin = highest(group_scores, limit.top_groups, active)
        allowed = (groups[:, :, None] == np.arange(limit.num_groups)).any(1)
        scores = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    experts, among_experts = highest(scores, router.num_experts_per_tok, active)
    return experts, jnp.minimum(margin, among_experts)


def highest(scores: Array, number: int, active: Array) -> tuple[Array, Array]:
    """Return the columns of the highest scores, and the smallest distance to the next score other than a tie."""
    order = jnp.argsort(-scores, axis=1, stable=True)
    if number == scores.shape[1]:
        return order, jnp.array(jnp.inf)
    last, following = jnp.take_along_axis(scores, order[:, number - 1 : number + 1], 1).T
    # Relative to the score, but at least to the smallest float32 scale.
    gaps = (last - following) / jnp.maximum(jnp.abs(last), 1e-30)
    return order[:, :number], jnp.where(active & (last != following), gaps, jnp.inf).min(initial=jnp.inf)


def replayed(layer, routing, logits, tokens, index) -> Routing:
    """Return the routing with given experts and weights."""
    at = jnp.maximum(index, 0)
    given = jnp.where(index[:, None] >= 0, tokens.experts.reshape(-1, tokens.experts.shape[-1])[at], -1)
    is_copy, is_given = given >= 0, (given >= 0).any(1, keepdims=True)
    weights = layer.router.with_experts(logits, jnp.where(is_copy, given, 0), is_copy | ~is_given).weights
    if tokens.weights is not None:
        weights = tokens.weights.reshape(-1, given.shape[1])[at]
    weights = jnp.where(is_given, jnp.where(is_copy, weights, 0), routing.weights)
    return Routing(jnp.where(is_given, given, routing.experts), weights, logits, routing.scores)


def quantized(transfer, dtype, rows):
    """Return rows `[..., H]` after a transfer; the derivative of the rounding counts as 1.

    The largest number of each block becomes the largest one of the transfer's dtype, but scales are normal numbers. All
    arithmetic is in float32.
    """
    blocks = rows.astype(dtype).astype(jnp.float32).reshape(*rows.shape[:-1], -1, transfer.block)
    largest = jnp.abs(blocks).max(-1, keepdims=True)
    top = 127 if transfer.dtype == jnp.int8 else 448
    scales = jnp.maximum(largest * np.float32(1 / top), np.finfo(np.float32).tiny)
    scaled = blocks * (np.float32(1) / scales)
    numbers = jnp.rint(scaled) if top == 127 else scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    received = (numbers * scales).reshape(rows.shape).astype(dtype).astype(jnp.float64)
    return rows + jax.lax.stop_gradient(received - rows)


def combine(layer, dtype, x, weights, experts):
    options, frozen = router_options(layer.router), getattr(layer, "up_a", None) is not None
    weights = jnp.where(experts >= 0, weights, 0)
    rows, factors = (x * weights, (experts >= 0).astype(x.dtype)) if options.scale_inputs else (x, weights)
    transfer, places = layer.system.dispatch.transfer, placed(layer, experts)
    rows = rows if transfer is None else quantized(transfer, dtype, rows)

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
    one_hot = (factors[:, :, None] * jax.nn.one_hot(places, by_expert.shape[1], dtype=x.dtype)).sum(1)[:, :, None]
    y = (one_hot * by_expert).sum(1)
    # Sums of outputs return in the dtype of the tokens.
    if transfer is None or isinstance(layer.system.dispatch, ListDispatch):
        return y
    # Gradients of the weights use the outputs before rounding.
    received = (jax.lax.stop_gradient(one_hot) * quantized(transfer, dtype, by_expert)).sum(1)
    return y + jax.lax.stop_gradient(received - y)


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


def loss_of_group(losses, experts, scores, logits):
    """Return the weighted router losses of a group, without the loss of segments."""
    active, num_experts = (experts >= 0).any(1), scores.shape[1]
    fraction = copies(experts, num_experts).sum(0) / jnp.maximum((experts >= 0).sum(), 1)
    total = losses.switch * num_experts * (fraction * mean(scores, active)).sum()
    return total + losses.z * mean(jax.nn.logsumexp(logits, 1, keepdims=True) ** 2, active).sum()


def copies(experts, num_experts):
    return jax.nn.one_hot(experts, num_experts, dtype=jnp.float64).sum(-2)


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
